"""The containers of one run: found by the session they belong to, and removed with their last words kept.

Those of other runs are not touched, even where a session has the same id.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import Any

from afield.errors import InfrastructureFailure
from afield.interfaces.runtime import Phase, SessionStatus
from afield.options import ContainerOptions
from afield.runtimes.docker.engine import Engine, Refused
from afield.runtimes.docker.spec import (
    RUN,
    SESSION,
    death_of,
    labels_of,
    live_of,
    name_of,
    networks_of,
    phase_of,
)
from afield.types import Reason

log = logging.getLogger("afield.runtimes")

LOG_LINES = 10_000
SOON_S = 0.1


class Fleet:
    def __init__(self, engine: Engine, options: ContainerOptions, run: str, log_dir: Path) -> None:
        self._engine = engine
        self._options = options
        self._run = run
        self._log_dir = log_dir

    async def create(self, session_id: str) -> None:
        """Refused where it is there already."""
        command = list(self._options.command) or None
        labels = labels_of(self._run, session_id)
        await self._engine.create(name_of(session_id), labels, serve=True, command=command)

    async def find(self, session_id: str) -> dict[str, Any] | None:
        """What the engine tells of its container; one of that name that another run made is Refused."""
        found = await self._engine.inspect(name_of(session_id))
        if found is None:
            return None
        run = (found["Config"].get("Labels") or {}).get(RUN)
        if run != self._run:
            said = f"container {name_of(session_id)} belongs to run {run!r}, not to {self._run!r}"
            raise Refused(f"{said}; give rollouts other ids, or stop that run")
        return found

    async def alive(self, session_id: str, unavailable_timeout_s: float = 0.0) -> dict[str, Any]:
        """The same of one that runs. Raises with the last words of one that has ended, or does so within
        `unavailable_timeout_s`.
        """
        end = asyncio.get_running_loop().time() + unavailable_timeout_s
        name = name_of(session_id)
        while True:
            found = await self.find(session_id)
            if found is None:
                raise InfrastructureFailure(f"container {name} is gone: somebody removed it", Reason.DIED)
            if phase_of(found["State"]["Status"]) is Phase.ENDED:
                tail = await self._engine.logs(name)
                what = " ".join((self._options.image, *self._options.command))
                said = f"container {name} ({what}) {death_of(found['State'], self._options.limits)}"
                raise InfrastructureFailure(f"{said}; its log ends: {tail}", Reason.DIED)
            if asyncio.get_running_loop().time() >= end:
                return found
            await asyncio.sleep(SOON_S)

    async def list(self) -> list[SessionStatus]:
        rows = await self._engine.list(f"{RUN}={self._run}")
        return [live_of(row) for row in rows if SESSION in (row.get("Labels") or {})]

    async def logs(self, session_id: str) -> str:
        if await self.find(session_id) is not None:
            return await self._engine.logs(name_of(session_id), LOG_LINES)
        with contextlib.suppress(FileNotFoundError):
            return self._log_of(session_id).read_text(errors="replace")
        return ""

    async def remove(self, session_id: str) -> None:
        """With all that runs in it; harmless where there is none."""
        try:
            found = await self.find(session_id)
        except Refused as error:
            log.warning("%s was not stopped: %s", session_id, error)
            return
        if found is not None:
            await self._keep_log(session_id)
            await self._engine.remove(name_of(session_id))

    def url(self, found: dict[str, Any] | None) -> str:
        """Where a container answers; empty while it has no address."""
        if found is None:
            return ""
        published = (found["NetworkSettings"].get("Ports") or {}).get(f"{self._options.port}/tcp")
        if published:
            return f"http://{self._engine.bind.reach}:{published[0]['HostPort']}"
        # Networks without a way out publish nothing; we are on them all the same.
        address = next((n["IPAddress"] for n in networks_of(found) if n.get("IPAddress")), "")
        return f"http://{address}:{self._options.port}" if address and self._engine.local else ""

    async def _keep_log(self, session_id: str) -> None:
        try:
            if said := await self._engine.logs(name_of(session_id), LOG_LINES):
                path = self._log_of(session_id)
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.write_text(said + "\n")
        except (OSError, Refused) as error:
            log.warning("what %s printed was not kept: %s", session_id, error)

    def _log_of(self, session_id: str) -> Path:
        return self._log_dir / f"{session_id}.log"
