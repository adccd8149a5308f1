"""Outcomes in a directory of this machine, with hints in SQLite beside them.

Agents write it with `afield.sdk.deliver`; this reads it, and fences attempts by the same commit that
agents race for. A directory that cannot be written is refused when the transport is entered.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from pathlib import Path
from typing import Any, Self

from afield.errors import Unavailable, UsageError
from afield.sdk import filestore
from afield.seams.transport import Fence
from afield.types import Attempt
from afield.wire import CommitRecord, Invocation, OutcomeRecord

log = logging.getLogger("afield.transports")

POLL_S = 0.02


class FilesTransport:
    def __init__(self, root: Path) -> None:
        self._root = root.resolve()
        self._db: sqlite3.Connection | None = None

    async def __aenter__(self) -> Self:
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            self._db = filestore.open_hints(self._root)
        except (OSError, sqlite3.Error) as error:
            raise UsageError(
                f"outcomes cannot be kept in {self._root}: {error}; choose a writable directory"
            ) from error
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def address(self) -> dict[str, Any]:
        return {"outcome_url": self._root.as_uri()}

    async def deliver(self, invocation: Invocation, record: OutcomeRecord) -> bool:
        return await asyncio.to_thread(filestore.deliver, self._root, invocation, record)

    async def decision(self, exp_id: str, attempt: Attempt) -> OutcomeRecord | Fence | None:
        return await asyncio.to_thread(self._decision, exp_id, attempt)

    async def fence(self, exp_id: str, attempt: Attempt, reason: str) -> OutcomeRecord | Fence:
        return await asyncio.to_thread(self._fence, exp_id, attempt, reason)

    async def hints(self, exp_id: str, wait_s: float) -> list[Attempt]:
        if self._db is None:
            raise UsageError("the files transport is used before 'async with' or after it")
        deadline = time.monotonic() + wait_s
        while not (sessions := await self._hinted(exp_id)):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            await asyncio.sleep(min(POLL_S, left))
        return [Attempt.from_session_id(s) for s in sessions]

    async def sweep(self, exp_id: str) -> list[Attempt]:
        sessions = await asyncio.to_thread(filestore.committed, self._root, exp_id)
        attempts: list[Attempt] = []
        for session in sessions:
            try:
                attempts.append(Attempt.from_session_id(session))
            except ValueError as error:
                log.warning("a commit under %s is not one of ours: %s", self._root, error)
        return attempts

    async def _hinted(self, exp_id: str) -> list[str]:
        try:
            # Looking costs less than a thread would; taking may wait for a writer and gets one.
            if self._db is None or not filestore.hinted(self._db, exp_id):
                return []
            return await asyncio.to_thread(filestore.take_hints, self._root, exp_id)
        except sqlite3.Error as error:
            log.warning("no hints from %s (%s); a sweep finds what they would tell", self._root, error)
            return []

    def _decision(self, exp_id: str, attempt: Attempt) -> OutcomeRecord | Fence | None:
        commit = filestore.read_commit(self._root, exp_id, attempt.session_id)
        if commit is None:
            return None
        return Fence(commit.fenced) if commit.fenced else filestore.read_record(self._root, commit)

    def _fence(self, exp_id: str, attempt: Attempt, reason: str) -> OutcomeRecord | Fence:
        commit = CommitRecord(session_id=attempt.session_id, fenced=reason)
        if filestore.put_commit(self._root, exp_id, commit):
            return Fence(reason)
        standing = self._decision(exp_id, attempt)
        if standing is None:
            raise Unavailable(
                f"the commit of {attempt.session_id} in {self._root} vanished; is something deleting it?"
            )
        return standing
