"""How one attempt's outcome is put into a store, whatever the store is.

Data first, then the commit that is put only where none is: the first one decides. An outcome that does
not stand is kept apart, where people can look at it. Shared by agents and by the transports that read.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from afield import wire
from afield.errors import Unavailable, WireError
from afield.wire import CommitRecord, Invocation, OutcomeRecord

T = TypeVar("T")


class Passing(Unavailable):
    """A failure that may be gone in a moment."""


class Refused(Unavailable):
    """What was said cannot be taken, however often it is said."""

    def __init__(self, message: str, *, too_large: bool = False) -> None:
        super().__init__(message)
        self.too_large = too_large


class Store(Protocol):
    """Objects under keys, written once. Calls may block; all of them may come from any thread.

    Raises Unavailable, with the place and the remedy, when it cannot be reached or refuses.
    """

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Whether the object is there because of this call. It appears whole or not at all."""
        ...

    def get(self, key: str) -> bytes | None: ...

    def list(self, prefix: str) -> list[str]: ...


def deliver(store: Store, invocation: Invocation, record: OutcomeRecord) -> bool:
    """Whether this outcome stands. Repeating it is harmless and answers the same.

    The first data object of an attempt stays, so that a commit never points at another's record.
    """
    commit = CommitRecord(session_id=invocation.session_id, data_key=invocation.data_key)
    data = wire.encode(record)
    mine = store.put_if_absent(invocation.data_key, data)
    won = store.put_if_absent(invocation.commit_key, wire.encode(commit))
    if (mine and won) or _stands(store, invocation, record):
        return True
    store.put_if_absent(wire.late_key(invocation.exp_id, invocation.session_id), data)
    return False


def _stands(store: Store, invocation: Invocation, record: OutcomeRecord) -> bool:
    commit = read(store, invocation.commit_key, CommitRecord)
    if commit is None or commit.fenced:
        return False
    standing = read(store, commit.data_key, OutcomeRecord)
    return standing is not None and standing.outcome == record.outcome


def read(store: Store, key: str, into: type[T]) -> T | None:
    data = store.get(key)
    return None if data is None else wire.decode(data, into, key)


def standing(store: Store, commit: CommitRecord) -> OutcomeRecord:
    """The record a commit names."""
    record = read(store, commit.data_key, OutcomeRecord)
    if record is None:
        raise WireError(f"the commit of {commit.session_id} names {commit.data_key}, which is missing")
    return record
