"""Hints from agents: that something was decided goes to SQS, NATS or Redis; names of queues are made here.

The client libraries are those of the extras `aws`, `nats` and `redis`. A hint that cannot be sent is logged
and costs nothing but time: a sweep finds the outcome.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any
from urllib.parse import parse_qs, urlsplit, urlunsplit

from msgspec import Struct

from afield.errors import Unavailable, UsageError
from afield.sdk import s3_store
from afield.wire import Invocation

log = logging.getLogger("afield.sdk")

NAME = "afield"
CONNECT_S = 5.0
MESSAGE = b"body"


class Place(Struct, frozen=True):
    """A server and the name under which afield's queues lie there: `nats://HOST:4222?name=NAME`."""

    url: str
    name: str = NAME

    @classmethod
    def of(cls, url: str) -> Place:
        parts = urlsplit(url)
        given = parse_qs(parts.query)
        if unknown := given.keys() - {"name"}:
            raise UsageError(f"unknown option {min(unknown)!r} in {shown(url)}; it takes: name")
        bare = urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))
        return cls(bare, given.get("name", [NAME])[-1])

    def hint_url(self) -> str:
        return f"{self.url}?name={self.name}"

    def subject(self, exp_id: str, what: str = "hints") -> str:
        """NATS: a dot would separate tokens; an experiment's id never has a tilde."""
        return f"{self.name}.{what}.{exp_id.replace('.', '~')}"

    def stream_key(self, exp_id: str, what: str = "hints") -> str:
        return f"{self.name}:{what}:{exp_id}"


def shown(url: str) -> str:
    """Without a password."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def notify(invocation: Invocation, body: bytes) -> None:
    try:
        if invocation.sqs_url:
            _to_sqs(invocation.sqs_url, body)
        elif invocation.hint_url and invocation.hint_url.startswith(("nats:", "tls:")):
            asyncio.run(_to_nats(Place.of(invocation.hint_url), invocation.exp_id, body))
        elif invocation.hint_url:
            _to_redis(Place.of(invocation.hint_url), invocation.exp_id, body)
    except (Unavailable, UsageError, OSError) as error:
        log.warning("no hint for %s: %s; it will be found by a sweep", invocation.session_id, error)


def _to_sqs(url: str, body: bytes) -> None:
    sqs = s3_store.client("sqs")
    try:
        s3_store.called(
            lambda: sqs.send_message(QueueUrl=url, MessageBody=body.decode()), f"cannot send to {url}"
        )
    finally:
        sqs.close()


async def _to_nats(place: Place, exp_id: str, body: bytes) -> None:
    nats = nats_library()
    try:
        async with asyncio.timeout(2 * CONNECT_S):
            connection = await nats.connect(place.url, connect_timeout=CONNECT_S, allow_reconnect=False)
            try:
                await connection.jetstream().publish(place.subject(exp_id), body, timeout=CONNECT_S)
            finally:
                await connection.close()
    except (nats.errors.Error, TimeoutError) as error:
        raise Unavailable(f"{shown(place.url)}: {error!r}") from error


def _to_redis(place: Place, exp_id: str, body: bytes) -> None:
    redis = redis_library()
    try:
        with redis.Redis.from_url(
            place.url, socket_timeout=CONNECT_S, socket_connect_timeout=CONNECT_S
        ) as connection:
            connection.xadd(place.stream_key(exp_id), {MESSAGE: body})
    except redis.exceptions.RedisError as error:
        raise Unavailable(f"{shown(place.url)}: {error}") from error


def nats_library() -> Any:
    try:
        import nats
        import nats.errors
        import nats.js.errors
    except ImportError as error:
        raise UsageError("nats:// needs nats-py: pip install 'afield[nats]'") from error
    return nats


def redis_library() -> Any:
    try:
        import redis
        import redis.asyncio
        import redis.exceptions
    except ImportError as error:
        raise UsageError("redis:// needs redis: pip install 'afield[redis]'") from error
    return redis
