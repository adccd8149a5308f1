"""Delivery of outcomes: to a directory, a URL or S3.

1. `deliver` sends an outcome to the address in `_rollout`. Delivering twice changes nothing. Transient errors
   (connections, 5xx, a full disk) are retried a few times; then Unavailable is raised.
2. `send_hint` announces it through SQS, NATS or Redis (extras `aws`, `nats`, `redis`). A hint that cannot be
   sent is logged; polling finds the outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit, urlunsplit

from msgspec import Struct

from afield import wire
from afield.errors import Unavailable, UsageError
from afield.sdk.stores import (
    FileStore,
    OutcomeRejected,
    S3Store,
    TransientError,
    aws_client,
    call_aws,
    deliver_to_store,
    write_hint,
)
from afield.wire import Hint, Invocation, OutcomeRecord, Submission

log = logging.getLogger(__name__)

RETRY_DELAYS_S = (0.2, 0.5, 1.0, 2.0, 4.0)
REQUEST_TIMEOUT_S = 30.0


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: a redirected POST becomes a GET that succeeds without delivering."""

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> None:
        return None


def deliver(
    invocation: Invocation,
    record: OutcomeRecord | Submission,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Deliver an outcome; False if the attempt is already decided otherwise.

    Blocks; call it in a thread. Raises OutcomeRejected, or Unavailable after the last retry.
    """
    for delay in (*RETRY_DELAYS_S, None):
        try:
            return _deliver_once(invocation, record)
        except TransientError as error:
            if delay is None:
                raise Unavailable(f"no delivery after {len(RETRY_DELAYS_S) + 1} attempts: {error}") from error
            sleep(delay)
    raise AssertionError("the last attempt returns or raises")


def file_root(url: str) -> Path:
    """The directory of a `file:` URL."""
    parts = urlsplit(url)
    if parts.netloc not in {"", "localhost"} or not parts.path.startswith("/"):
        raise UsageError(f"outcome_url {url!r} must be a directory of this machine: file:///absolute/path")
    return Path(unquote(parts.path))


def _deliver_once(invocation: Invocation, record: OutcomeRecord | Submission) -> bool:
    url = invocation.outcome_url
    if url is not None and not url.startswith("file:"):
        return _to_http(url, invocation, record)
    if isinstance(record, Submission):
        raise UsageError(
            f"{invocation.session_id} has a verifier; its submission must go to the gateway, not to a store"
        )
    hint = wire.encode(Hint(exp_id=invocation.exp_id, session_id=invocation.session_id))
    if url is None:
        with contextlib.closing(S3Store(invocation.s3_bucket or "")) as store:
            stands = deliver_to_store(store, invocation, record)
    else:
        stands = deliver_to_store(FileStore(file_root(url)), invocation, record)
        if stands and not invocation.hint_url:
            write_hint(file_root(url), invocation.exp_id, hint)
    if stands:
        send_hint(invocation, hint)
    return stands


def _to_http(url: str, invocation: Invocation, record: OutcomeRecord | Submission) -> bool:
    request = urllib.request.Request(
        url,
        data=wire.encode(record),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {invocation.api_key}"},
        method="POST",
    )
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=REQUEST_TIMEOUT_S) as response:
            response.read()
            return True
    except urllib.error.HTTPError as error:
        with error:
            reply = error.read(2_000).decode("utf-8", "replace")
        if error.code == 409:
            return False
        message = f"{url} answered {error.code} to the outcome of {invocation.session_id}: {reply}"
        if error.code in (400, 413, 422):
            raise OutcomeRejected(message, too_large=error.code == 413) from None
        raise (TransientError if error.code >= 500 or error.code in (408, 429) else Unavailable)(
            message
        ) from None
    except (OSError, http.client.HTTPException) as error:
        raise TransientError(
            f"cannot deliver the outcome of {invocation.session_id} to {url}: {error}"
        ) from error


# --- hints ---------------------------------------------------------------------------------------

DEFAULT_NAME = "afield"
CONNECT_S = 5.0
REDIS_FIELD = b"body"


class HintServer(Struct, frozen=True):
    """A NATS or Redis server for hints: `nats://HOST:4222?name=NAME`."""

    url: str
    """URL without options."""
    name: str = DEFAULT_NAME
    """Prefix of afield's subjects and keys there."""

    @classmethod
    def of(cls, url: str) -> HintServer:
        parts = urlsplit(url)
        options = parse_qs(parts.query)
        if unknown := options.keys() - {"name"}:
            raise UsageError(
                f"unknown option {min(unknown)!r} in {without_password(url)}; the only option is name"
            )
        bare = urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))
        return cls(bare, options.get("name", [DEFAULT_NAME])[-1])

    def hint_url(self) -> str:
        return f"{self.url}?name={self.name}"

    def subject(self, exp_id: str, kind: str = "hints") -> str:
        """NATS subject. Dots separate its parts, so those of the id become tildes, which ids never have."""
        return f"{self.name}.{kind}.{exp_id.replace('.', '~')}"

    def stream_key(self, exp_id: str, kind: str = "hints") -> str:
        """Key of a Redis stream."""
        return f"{self.name}:{kind}:{exp_id}"


def without_password(url: str) -> str:
    """A URL for messages, without credentials."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def send_hint(invocation: Invocation, body: bytes) -> None:
    """Send a hint to the queue in `_rollout`, if there is one. A failure is logged."""
    try:
        if invocation.sqs_url:
            _to_sqs(invocation.sqs_url, body)
        elif invocation.hint_url and invocation.hint_url.startswith(("nats:", "tls:")):
            asyncio.run(_to_nats(HintServer.of(invocation.hint_url), invocation.exp_id, body))
        elif invocation.hint_url:
            _to_redis(HintServer.of(invocation.hint_url), invocation.exp_id, body)
    except (Unavailable, UsageError, OSError) as error:
        log.warning("hint: %s not sent: %s; polling finds the outcome", invocation.session_id, error)


def _to_sqs(url: str, body: bytes) -> None:
    sqs = aws_client("sqs")
    try:
        call_aws(lambda: sqs.send_message(QueueUrl=url, MessageBody=body.decode()), f"cannot send to {url}")
    finally:
        sqs.close()


async def _to_nats(server: HintServer, exp_id: str, body: bytes) -> None:
    nats = import_nats()
    try:
        async with asyncio.timeout(2 * CONNECT_S):
            connection = await nats.connect(server.url, connect_timeout=CONNECT_S, allow_reconnect=False)
            try:
                await connection.jetstream().publish(server.subject(exp_id), body, timeout=CONNECT_S)
            finally:
                await connection.close()
    except (nats.errors.Error, TimeoutError) as error:
        raise Unavailable(f"{without_password(server.url)}: {error!r}") from error


def _to_redis(server: HintServer, exp_id: str, body: bytes) -> None:
    redis = import_redis()
    try:
        with redis.Redis.from_url(
            server.url, socket_timeout=CONNECT_S, socket_connect_timeout=CONNECT_S
        ) as connection:
            connection.xadd(server.stream_key(exp_id), {REDIS_FIELD: body})
    except redis.exceptions.RedisError as error:
        raise Unavailable(f"{without_password(server.url)}: {error}") from error


def import_nats() -> Any:
    try:
        import nats
        import nats.errors
        import nats.js.errors
    except ImportError as error:
        raise UsageError("nats:// needs nats-py: pip install 'afield[nats]'") from error
    return nats


def import_redis() -> Any:
    try:
        import redis
        import redis.asyncio
        import redis.exceptions
    except ImportError as error:
        raise UsageError("redis:// needs redis: pip install 'afield[redis]'") from error
    return redis
