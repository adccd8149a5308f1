"""A worker: one engine of a pool, with its standing and its numbers."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from afield.gateway.resumable_call import ResumableCall
from afield.interfaces import Engine, EngineInfo, Image, Pausable


class WorkerHealth(StrEnum):
    READY = "ready"
    ASIDE = "aside"  # broke, or lacks the weights; looked at again and again
    LEAVING = "leaving"


class WorkerInfo(Struct, frozen=True, kw_only=True):
    """A worker as people and metrics see it."""

    id: str
    kind: str
    url: str
    standing: WorkerHealth
    reason: str
    version: int | None
    in_flight: int
    calls: int
    failures: int
    notes: tuple[str, ...] = ()


class Worker:
    def __init__(self, id: str, engine: Engine, *, kind: str = "", url: str = "") -> None:
        self.id, self.engine, self.kind, self.url = id, engine, kind, url
        self.standing = WorkerHealth.ASIDE
        self.reason = "not looked at yet"
        self.entered = False
        self.frozen = False
        self.thawing = False  # it was told to go on, and may not have heard
        self.tended = False
        self.unheard = False  # it got weights while it stood still
        self.facts: EngineInfo | None = None
        self.flights: set[ResumableCall] = set()
        self.sessions = 0
        self.calls = 0
        self.failures = 0

    @property
    def ready(self) -> bool:
        return self.standing is WorkerHealth.READY

    @property
    def load(self) -> tuple[int, int]:
        return len(self.flights), self.sessions

    def takes(self, images: tuple[Image, ...]) -> bool:
        return self.ready and (not images or (self.facts is not None and self.facts.images))

    async def resume(self) -> None:
        if self.thawing and isinstance(self.engine, Pausable):
            await self.engine.resume()
        self.thawing = False

    async def leave(self) -> None:
        if self.entered:
            self.entered = False
            await self.engine.__aexit__(None, None, None)

    @property
    def info(self) -> WorkerInfo:
        facts = self.facts
        return WorkerInfo(
            id=self.id,
            kind=facts.kind if facts else self.kind,
            url=self.url,
            standing=self.standing,
            reason="" if self.ready else self.reason,
            version=facts.version if facts else None,
            in_flight=len(self.flights),
            calls=self.calls,
            failures=self.failures,
            notes=facts.notes if facts else (),
        )
