"""What a cluster keeps: objects in versions, their history for watches, label and field selectors.

As in etcd: one counter for all versions; a compaction forgets history, and who asks for older things is told
that they are gone.
"""

from __future__ import annotations

import asyncio
import copy
import re
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

Json = dict[str, Any]
NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
TERM = re.compile(r"\s*(!?)([\w./-]+)\s*(?:(==|=|!=)\s*([\w.-]*)|(in|notin)\s*\(([^)]*)\))?\s*")


class Problem(Exception):
    """Answered as a Status."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason, self.message = code, reason, message


class Change:
    def __init__(self, version: int, kind: str, how: str, item: Json) -> None:
        self.version, self.kind, self.how, self.item = version, kind, how, item


class Store:
    def __init__(self) -> None:
        self.version = 100
        self.items: dict[str, dict[str, Json]] = {"jobs": {}, "pods": {}, "events": {}}
        self.history: list[Change] = []
        self.compacted = 0
        self._news = asyncio.Event()

    def create(self, kind: str, item: Json) -> Json:
        name = item["metadata"]["name"]
        if name in self.items[kind]:
            group = "jobs.batch" if kind == "jobs" else kind
            raise Problem(409, "AlreadyExists", f'{group} "{name}" already exists')
        item = copy.deepcopy(item)
        item["metadata"] |= {"uid": str(uuid4()), "creationTimestamp": stamp()}
        self._put(kind, "ADDED", item)
        return copy.deepcopy(item)

    def get(self, kind: str, name: str) -> Json:
        if name not in self.items[kind]:
            group = "jobs.batch" if kind == "jobs" else kind
            raise Problem(404, "NotFound", f'{group} "{name}" not found')
        return copy.deepcopy(self.items[kind][name])

    def change(self, kind: str, item: Json) -> None:
        """A write that finds nothing, or another object of that name, is lost."""
        there = self.items[kind].get(item["metadata"]["name"])
        if there is not None and there["metadata"]["uid"] == item["metadata"]["uid"]:
            self._put(kind, "MODIFIED", copy.deepcopy(item))

    def delete(self, kind: str, name: str) -> None:
        if name in self.items[kind]:
            item = self.items[kind].pop(name)
            self._note(kind, "DELETED", item)

    def select(self, kind: str, labels: str = "", fields: str = "") -> list[Json]:
        found = self.items[kind].values()
        return [copy.deepcopy(i) for i in found if matches(i, labels) and has_fields(i, fields)]

    def compact(self) -> None:
        """Whatever was before now is forgotten."""
        self.version += 1
        self.compacted = self.version
        self.history.clear()

    def after(self, version: int, kind: str, labels: str) -> list[Change]:
        if version < self.compacted:
            message = f"too old resource version: {version} ({self.compacted})"
            raise Problem(410, "Expired", message)
        return [c for c in self.history if c.version > version and c.kind == kind and matches(c.item, labels)]

    async def news(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            pass

    def wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _put(self, kind: str, how: str, item: Json) -> None:
        self.items[kind][item["metadata"]["name"]] = item
        self._note(kind, how, item)

    def _note(self, kind: str, how: str, item: Json) -> None:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        self.history.append(Change(self.version, kind, how, copy.deepcopy(item)))
        self.wake()


def matches(item: Json, selector: str) -> bool:
    """`a=b`, `a!=b`, `a in (b,c)`, `a notin (b,c)`, `a`, `!a`; all of those given."""
    labels = item["metadata"].get("labels", {})
    for term in re.split(r",(?![^(]*\))", selector) if selector else []:
        parsed = TERM.fullmatch(term)
        if parsed is None:
            raise Problem(400, "BadRequest", f"unable to parse requirement: {term!r}")
        no, key, operator, value, among, values = parsed.groups()
        has = labels.get(key)
        if operator in ("=", "=="):
            good = has == value
        elif operator == "!=":
            good = has != value
        elif among:
            good = (has in [v.strip() for v in values.split(",")]) == (among == "in")
        else:
            good = (key in labels) != bool(no)
        if not good:
            return False
    return True


def has_fields(item: Json, selector: str) -> bool:
    for term in selector.split(",") if selector else []:
        path, _, value = term.partition("=")
        found: Any = item
        for part in path.split("."):
            found = found.get(part, "") if isinstance(found, dict) else ""
        if found != value:
            return False
    return True


def check_job(job: Json) -> None:
    """A few of the server's own rules."""
    meta, spec = job.get("metadata", {}), job.get("spec", {})
    name, pod = meta.get("name", ""), spec.get("template", {}).get("spec", {})
    wrong = [] if NAME.fullmatch(name) and len(name) <= 63 else [f"metadata.name: Invalid value: {name!r}"]
    for labels in (meta.get("labels", {}), spec.get("template", {}).get("metadata", {}).get("labels", {})):
        bad = [v for v in labels.values() if not LABEL.fullmatch(v) or len(v) > 63]
        wrong += [f"metadata.labels: Invalid value: {value!r}" for value in bad]
    if pod.get("restartPolicy") not in ("Never", "OnFailure"):
        wrong.append(f"spec.template.spec.restartPolicy: Unsupported value: {pod.get('restartPolicy')!r}")
    if not all(container.get("image") for container in pod.get("containers", []) or [{}]):
        wrong.append("spec.template.spec.containers[0].image: Required value")
    for field, least in (("activeDeadlineSeconds", 1), ("ttlSecondsAfterFinished", 0), ("backoffLimit", 0)):
        value = spec.get(field, least)
        if not isinstance(value, int) or value < least:
            wrong.append(f"spec.{field}: Invalid value: {value!r}")
    if wrong:
        raise Problem(422, "Invalid", f'Job.batch "{name}" is invalid: {"; ".join(wrong)}')


def stamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def condition(kind: str, status: str, reason: str = "", message: str = "") -> Json:
    made = {"type": kind, "status": status, "lastTransitionTime": stamp()}
    return made | {k: v for k, v in (("reason", reason), ("message", message)) if v}


def with_condition(item: Json, made: Json) -> None:
    others = [c for c in item["status"].get("conditions", []) if c["type"] != made["type"]]
    item["status"]["conditions"] = [*others, made]
