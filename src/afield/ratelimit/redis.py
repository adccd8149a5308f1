"""RedisLimiter: one rate limit for processes of several machines.

1. A transaction reads the state, changes it and writes it only if no other process has changed it (WATCH).
2. Times are those of the server, so that the clocks of the machines do not matter.
3. Requests run in a thread. While the server does not answer they are repeated for `unavailable_timeout_s`.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit, urlunsplit

import msgspec
from msgspec import Struct, field

from afield.errors import Unavailable, UsageError
from afield.ratelimit.controller import RateController, RateLimits
from afield.ratelimit.shared import LEASE_S, LeasedLimiter, LimiterState, new_slot
from afield.utils.backoff import Backoff

log = logging.getLogger(__name__)
T = TypeVar("T")
REQUEST_S = 5.0
"""Timeout of a request, in seconds."""


class RedisState(Struct):
    """State of a limiter, as it is stored."""

    controllers: dict[str, RateController] = field(default_factory=dict)
    """Schedules by kind of call."""
    slots: dict[int, float] = field(default_factory=dict)
    """End of the lease of each launch slot, in seconds of the server's clock."""

    def controller(self, kind: str) -> RateController:
        return self.controllers.get(kind) or RateController()

    def save(self, kind: str, controller: RateController) -> None:
        self.controllers[kind] = controller

    def take_slot(self, now: float, until: float, latest: float, limit: int) -> int | None:
        self.slots = {slot: end for slot, end in self.slots.items() if now <= end <= latest}
        if len(self.slots) >= limit:
            return None
        slot = new_slot()
        self.slots[slot] = until
        return slot

    def renew_slots(self, slots: Iterable[int], until: float) -> None:
        self.slots.update(dict.fromkeys(slots, until))

    def free_slots(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.slots.pop(slot, None)


class RedisLimiter(LeasedLimiter):
    """Limiter for all processes with the same `redis://HOST:PORT/DB[?name=NAME]`.

    NAME is the key of the budget (default: `afield:limiter`).
    """

    def __init__(
        self,
        limits: RateLimits,
        url: str,
        *,
        lease_s: float = LEASE_S,
        unavailable_timeout_s: float = 60.0,
    ) -> None:
        super().__init__(limits, lease_s=lease_s, clock=self._server_time)
        self._url, self._key = _address(url)
        self._unavailable_timeout_s = unavailable_timeout_s
        self._ahead_s = 0.0  # of the server's clock before this process's monotonic one
        self._redis = _redis_module()
        self._client: Any = self._redis.Redis.from_url(
            self._url, socket_timeout=REQUEST_S, socket_connect_timeout=REQUEST_S
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="limiter")

    def check(self) -> None:
        try:
            self._transact(lambda _: None)
        except self._redis.RedisError as error:
            raise Unavailable(self._failed(error)) from error

    def close(self) -> None:
        super().close()
        self._thread.shutdown(wait=True)
        self._client.close()

    async def _write_when_free(self, work: Callable[[LimiterState], T]) -> T:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._unavailable_timeout_s
        backoff = Backoff(0.1, 2.0, jitter=True)
        while True:
            # The thread runs one transaction at a time, so that no pending change is written twice.
            try:
                return await loop.run_in_executor(self._thread, self._write, work)
            except self._redis.RedisError as error:
                if loop.time() >= end:
                    raise Unavailable(self._failed(error)) from error
                log.warning("%s; tried again", self._failed(error))
            await backoff.sleep()

    def _write(self, work: Callable[[LimiterState], T]) -> T:
        refusals, returned = list(self._refusals), list(self._returned)

        def change(state: LimiterState) -> T:
            self._write_pending(state, refusals, returned)
            return work(state)

        result = self._transact(change)
        del self._refusals[: len(refusals)]
        del self._returned[: len(returned)]
        return result

    def _transact(self, change: Callable[[LimiterState], T]) -> T:
        with self._client.pipeline() as pipe:
            while True:
                pipe.watch(self._key)
                self._read_clock(pipe)
                stored = pipe.get(self._key)
                state = msgspec.msgpack.decode(stored, type=RedisState) if stored else RedisState()
                result = change(state)
                pipe.multi()
                pipe.set(self._key, msgspec.msgpack.encode(state))
                try:
                    pipe.execute()
                    return result
                except self._redis.WatchError:
                    continue

    def _read_clock(self, pipe: Any) -> None:
        started = time.monotonic()
        seconds, microseconds = pipe.time()
        self._ahead_s = seconds + microseconds / 1e6 - (started + time.monotonic()) / 2

    def _server_time(self) -> float:
        return time.monotonic() + self._ahead_s

    def _failed(self, error: Exception) -> str:
        return f"the limiter at {_public(self._url)} does not answer: {error}; start redis-server there"


def _address(url: str) -> tuple[str, str]:
    setting = f"limiter_url {_public(url)!r}"
    if re.search(r"[/?#]", url.rpartition("@")[0].partition("://")[2]):
        raise UsageError(f"{setting}: write / ? and # in the password as %2F, %3F and %23")
    parts = urlsplit(url)
    options = parse_qs(parts.query, keep_blank_values=True)
    if parts.scheme not in ("redis", "rediss") or not parts.netloc or options.keys() - {"name"}:
        raise UsageError(f"{setting} must be like redis://HOST:PORT/DB?name=NAME")
    try:
        valid = bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise UsageError(
            f"{setting} has no valid host or port: it must be like redis://HOST:PORT/DB?name=NAME"
        )
    if not re.fullmatch(r"(/\d*)?", parts.path):
        raise UsageError(
            f"{setting}: {parts.path[1:]!r} must be the number of a database; ?name=NAME has a name"
        )
    name = options.get("name", ["afield:limiter"])[-1]
    if not name:
        raise UsageError(f"{setting}: name is empty; leave it out, or write ?name=NAME")
    return urlunsplit((parts.scheme, parts.netloc, parts.path, "", "")), name


def _public(url: str) -> str:
    """A URL for messages, without credentials, however they are written, and options."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2].partition('?')[0]}"


def _redis_module() -> Any:
    try:
        import redis
    except ModuleNotFoundError as error:
        raise UsageError("redis is not installed: pip install 'afield[redis]'") from error
    return redis
