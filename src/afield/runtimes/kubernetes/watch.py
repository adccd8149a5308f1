"""Knows at any time what a cluster has of one kind of object, by one list and one watch.

A watch that ends, breaks or stays silent is taken up where it was; where the server no longer knows that
place (410), everything is listed again, and what is missing then was deleted. Nothing is told twice in
one version. It goes on until it is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Generic, Protocol, TypeVar

import aiohttp
import msgspec
from msgspec import Struct

from afield.errors import AfieldError, Unavailable
from afield.runtimes.kubernetes.api import CONNECT_S, SILENT, Cluster, named, refusal
from afield.runtimes.kubernetes.objects import Change, Meta, Status

log = logging.getLogger("afield.runtimes.kubernetes.runtime")

PAUSE_S = (0.2, 15.0)  # after a watch that failed: at first, at most
WATCH_S = 60
SLACK_S = 15.0
GONE = 410


class Object(Protocol):
    @property
    def metadata(self) -> Meta: ...


K = TypeVar("K", bound=Object)


class _Expired(Exception):
    """The server has forgotten the version we were at."""


class _Bare(Struct, frozen=True):
    metadata: Meta = Meta()


class Watch(Generic[K]):
    """`changed` is told each object as it is now; `gone` the last that was seen of one that was deleted."""

    def __init__(
        self,
        cluster: Cluster,
        path: str,
        kind: type[K],
        selector: str,
        *,
        changed: Callable[[K], None],
        gone: Callable[[K], None],
    ) -> None:
        self._cluster = cluster
        self._path = path
        self._kind = kind
        self._selector = selector
        self._changed = changed
        self._gone = gone
        self._known: dict[str, K] = {}
        self._version = ""

    async def keep(self) -> None:
        pause_s = PAUSE_S[0]
        while True:
            try:
                if not self._version:
                    await self._list()
                began = asyncio.get_running_loop().time()
                async for change in self._changes():
                    pause_s = PAUSE_S[0]
                    self._take(change)
                # The server ends each watch after a while; one that does so at once is not to be hurried.
                if asyncio.get_running_loop().time() - began > pause_s:
                    continue
            except _Expired:
                log.info("%s: the watch is too old and begins anew", self._path)
                self._version = ""
            except SILENT as error:
                log.info("%s: the watch broke (%s) and is taken up again", self._path, named(error))
            except (AfieldError, msgspec.MsgspecError) as error:
                log.warning("%s cannot be watched: %s; tried again", self._path, error)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, PAUSE_S[1])

    async def _list(self) -> None:
        found, version = await self._cluster.list(self._path, self._kind, {"labelSelector": self._selector})
        there = {item.metadata.uid: item for item in found}
        for uid in self._known.keys() - there.keys():
            self._gone(self._known.pop(uid))
        for item in there.values():
            self._put(item)
        self._version = version

    async def _changes(self) -> AsyncGenerator[Change]:
        params: Mapping[str, str] = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "labelSelector": self._selector,
            "resourceVersion": self._version,
            "timeoutSeconds": str(WATCH_S),
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=WATCH_S + SLACK_S)
        async with self._cluster.asked("GET", self._path, params=params, timeout=timeout) as response:
            if response.status == GONE:
                raise _Expired
            if response.status >= 300:
                said = await response.read()
                raise refusal(response.status, said, response.headers.get("Retry-After", ""))
            async for line in response.content:
                # A line without its end is one that the connection was cut in.
                if line.endswith(b"\n") and line.strip():
                    yield msgspec.json.decode(line, type=Change)

    def _take(self, change: Change) -> None:
        match change.type:
            case "ERROR":
                status = msgspec.json.decode(change.object, type=Status)
                if status.code == GONE:
                    raise _Expired
                raise Unavailable(f"the watch says {status.code}: {status.message}")
            case "BOOKMARK":
                self._version = msgspec.json.decode(change.object, type=_Bare).metadata.resource_version
            case "DELETED":
                item = msgspec.json.decode(change.object, type=self._kind)
                self._known.pop(item.metadata.uid, None)
                self._gone(item)
                self._version = item.metadata.resource_version
            case _:
                item = msgspec.json.decode(change.object, type=self._kind)
                self._put(item)
                self._version = item.metadata.resource_version

    def _put(self, item: K) -> None:
        before = self._known.get(item.metadata.uid)
        self._known[item.metadata.uid] = item
        if before is None or before.metadata.resource_version != item.metadata.resource_version:
            self._changed(item)
