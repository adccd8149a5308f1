"""Batches of rollouts: submitted in order, returned as they finish.

1. At most `ahead` rollouts are submitted and unfinished.
2. Finished rollouts wait as futures; their turns and tokens are loaded when they are returned.
3. Closing a batch cancels its running rollouts. A batch timeout ends them too, and returns each as a failure.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Self

from msgspec import Struct

from afield.client.futures import RolloutFuture
from afield.client.ids import RolloutRequest
from afield.errors import AfieldError
from afield.runs.token_account import TokenAccount, count_tokens
from afield.types import Failure, Group, Outcome, Rollout, RolloutResult


class BatchItem(Struct, frozen=True, kw_only=True):
    """Finished rollout of a batch."""

    index: int
    """Index of its row in the batch, from 0."""
    input_id: str
    """Task id."""
    rollout: int
    """Number of the rollout within its task, from 0."""
    elapsed: float
    """Seconds from submission to the end."""
    finished: RolloutResult
    """Outcome, training sequences and turns."""

    @property
    def outcome(self) -> Outcome:
        return self.finished.outcome

    @property
    def failure(self) -> Failure | None:
        return self.finished.outcome.failure

    @property
    def tokens(self) -> TokenAccount:
        """Token account of this rollout."""
        return count_tokens([self.finished])


class EndedRequest(Struct, frozen=True):
    """Request with its completed future."""

    request: RolloutRequest
    """Request that was submitted."""
    future: RolloutFuture
    """Future of its rollout."""


Put = Callable[[EndedRequest | BaseException], object]


class RolloutBatch:
    """Submits requests in order and passes each to `put` when it has ended."""

    def __init__(
        self,
        requests: Sequence[RolloutRequest],
        submit: Callable[[Rollout], RolloutFuture],
        *,
        ahead: int,
        timeout: float | None,
    ) -> None:
        self.requests = requests
        self.timeout = timeout
        self._submit = submit
        self._ahead = ahead
        self._put: Put = lambda _: None
        self._left = deque(requests)
        self._running: dict[str, RolloutFuture] = {}
        self._closed = False
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._closed, self.requests, running = True, (), list(self._running.values())
            self._left.clear()
        for future in running:
            future.cancel()

    def start(self, put: Put) -> None:
        self._put = put
        for _ in range(min(self._ahead, len(self._left))):
            self._next()

    def expire(self, attempts: Callable[[str], int]) -> None:
        """End the batch after its timeout: unfinished rollouts become timeout failures."""
        with self._lock:
            running, left = list(self._running.values()), list(self._left)
            self._left.clear()
        message = f"no outcome within the {self.timeout:g} s of its batch"
        for future in running:
            future.expire(f"{message}; raise timeout", attempts(future.rollout.id))
        for request in left:
            future = RolloutFuture(request.rollout, end=lambda *_: None, read=_not_started)
            future.expire(f"{message}; it was not started, raise timeout or concurrency")
            self._put(EndedRequest(request, future))

    def _next(self) -> None:
        with self._lock:  # held over pop and submit to keep the order
            if not self._left:
                return
            request = self._left.popleft()
            try:
                future = self._running[request.rollout.id] = self._submit(request.rollout)
            except AfieldError as error:
                self._put(error)
                return
        future.add_done_callback(partial(self._ended, request))

    def _ended(self, request: RolloutRequest, future: RolloutFuture) -> None:
        with self._lock:
            self._running.pop(request.rollout.id, None)
            if self._closed:
                return
        self._put(EndedRequest(request, future))
        self._next()


def as_item(ended: EndedRequest) -> BatchItem:
    return BatchItem(
        index=ended.request.index,
        input_id=ended.request.rollout.task.id,
        rollout=ended.request.k,
        elapsed=ended.future.elapsed,
        finished=ended.future.finished(),
    )


class GroupAssembler:
    """Collects the rollouts of each group until the group is complete."""

    def __init__(self, requests: Sequence[RolloutRequest]) -> None:
        self._missing = Counter(request.rollout.group_id for request in requests)
        self._ended: defaultdict[str, list[EndedRequest]] = defaultdict(list)

    def add(self, ended: EndedRequest) -> Group | None:
        """Add a rollout; returns the group if this was its last one."""
        rollout = ended.request.rollout
        self._ended[rollout.group_id].append(ended)
        self._missing[rollout.group_id] -= 1
        if self._missing[rollout.group_id]:
            return None
        members = sorted(self._ended.pop(rollout.group_id), key=lambda member: member.request.k)
        finished = tuple(member.future.finished() for member in members)
        return Group(
            id=rollout.group_id, task_id=rollout.task.id, epoch=0, split=rollout.split, finished=finished
        )


def _not_started(rollout_id: str) -> RolloutResult:
    raise AssertionError(f"{rollout_id} was not started")
