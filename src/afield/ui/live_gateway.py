"""Sessions, engines and metrics of a running gateway, for the UI.

The admin key stays in this process; the browser gets the numbers alone.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any, Self

from afield.errors import Unavailable

TIMEOUT_S = 5.0
SHOWN_SESSIONS = 1_000
_SAMPLE = re.compile(r"afield_(\w+?)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class LiveGateway:
    """Reader of a gateway's admin API."""

    def __init__(self, url: str, admin_key: str) -> None:
        self._url = url.rstrip("/")
        self._admin_key = admin_key

    async def __aenter__(self) -> Self:
        import aiohttp

        self._http = aiohttp.ClientSession(
            headers={"authorization": f"Bearer {self._admin_key}"},
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.close()

    async def read(self) -> dict[str, Any]:
        """Health, engines, sessions and metrics, read now."""
        health, engines, sessions, page = await asyncio.gather(
            self._get("/health"),
            self._get("/engines"),
            self._get(f"/sessions?limit={SHOWN_SESSIONS}"),
            self._get("/metrics"),
        )
        return {
            "url": self._url,
            "time": time.time(),
            "health": health,
            "engines": engines["engines"],
            "sessions": sessions["sessions"],
            "metrics": metrics(page),
        }

    async def _get(self, path: str) -> Any:
        import aiohttp

        try:
            async with self._http.get(self._url + path) as response:
                if response.status != 200:
                    reason = (await response.text())[:200]
                    raise Unavailable(f"gateway {self._url} answered {response.status} to {path}: {reason}")
                plain = response.content_type == "text/plain"
                return await (response.text() if plain else response.json())
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unavailable(f"gateway {self._url} does not answer: {error or 'timeout'}") from error


def metrics(page: str) -> list[dict[str, Any]]:
    """Samples of a page in the Prometheus text format, without buckets of histograms."""
    samples = []
    for line in page.splitlines():
        match = _SAMPLE.fullmatch(line)
        if match and not match[1].endswith("_bucket"):
            labels = dict(_LABEL.findall(match[2] or ""))
            samples.append({"name": match[1], "labels": labels, "value": float(match[3])})
    return samples
