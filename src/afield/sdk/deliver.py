"""Brings an outcome to where `_rollout` says: a directory, an HTTP endpoint, or S3 (with SQS).

Data first, then the commit that is put only where none is, then the hint. Delivering twice changes
nothing. What may pass (a connection, a 5xx, a full disk) is tried again a bounded number of times;
after that Unavailable is raised, and the caller says so loudly.
"""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from msgspec import Struct

from afield import wire
from afield.errors import Unavailable, UsageError
from afield.sdk import filestore
from afield.wire import CommitRecord, Hint, Invocation, OutcomeRecord

DELAYS_S = (0.2, 0.5, 1.0, 2.0, 4.0)
REQUEST_S = 30.0
OBJECT_EXISTS = frozenset({"PreconditionFailed", "ConditionalRequestConflict", "412", "409"})


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected POST becomes a GET that succeeds and delivers nothing."""

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> None:
        return None


class _Passing(Unavailable):
    """A failure that may be gone in a moment."""


def deliver(
    invocation: Invocation, record: OutcomeRecord, *, sleep: Callable[[float], None] = time.sleep
) -> bool:
    """False when the attempt was decided before. Blocks; call it from a thread."""
    for delay in (*DELAYS_S, None):
        try:
            return _deliver_once(invocation, record)
        except _Passing as error:
            if delay is None:
                raise Unavailable(f"gave up after {len(DELAYS_S) + 1} tries: {error}") from error
            sleep(delay)
    raise AssertionError("the last try returns or raises")


def file_root(url: str) -> Path:
    """The directory of a `file:` URL."""
    parts = urlsplit(url)
    if parts.netloc not in {"", "localhost"} or not parts.path.startswith("/"):
        raise UsageError(f"outcome_url {url!r} must name a directory of this machine: file:///absolute/path")
    return Path(unquote(parts.path))


def _deliver_once(invocation: Invocation, record: OutcomeRecord) -> bool:
    url = invocation.outcome_url
    if url is None:
        return _to_s3(invocation, record, _clients(invocation))
    if url.startswith("file:"):
        try:
            return filestore.deliver(file_root(url), invocation, record)
        except Unavailable as error:
            raise _Passing(str(error)) from error
    return _to_http(url, invocation, record)


def _to_http(url: str, invocation: Invocation, record: OutcomeRecord) -> bool:
    request = urllib.request.Request(
        url,
        data=wire.encode(record),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {invocation.api_key}"},
        method="POST",
    )
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=REQUEST_S) as response:
            response.read()
            return True
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(2_000).decode("utf-8", "replace")
        if error.code == 409:
            return False
        refused = f"{url} answered {error.code} to the outcome of {invocation.session_id}: {said}"
        raise (_Passing if error.code >= 500 or error.code in (408, 429) else Unavailable)(refused) from None
    except (OSError, http.client.HTTPException) as error:
        raise _Passing(f"{url} does not take the outcome of {invocation.session_id}: {error}") from error


class _Aws(Struct, frozen=True):
    """boto3 clients have no static types."""

    s3: Any
    sqs: Any


def _clients(invocation: Invocation) -> _Aws:
    try:
        import boto3
    except ImportError as error:
        raise UsageError("delivering to s3_bucket needs boto3: pip install 'afield[aws]'") from error
    session = boto3.Session()
    return _Aws(session.client("s3"), session.client("sqs") if invocation.sqs_url else None)


def _to_s3(invocation: Invocation, record: OutcomeRecord, aws: _Aws) -> bool:
    commit = CommitRecord(session_id=invocation.session_id, data_key=invocation.data_key)
    _put_object(aws.s3, invocation.s3_bucket, invocation.data_key, wire.encode(record))
    won = _put_object(aws.s3, invocation.s3_bucket, invocation.commit_key, wire.encode(commit))
    if aws.sqs is not None:
        message = wire.encode(Hint(exp_id=invocation.exp_id, session_id=invocation.session_id)).decode()
        _aws_call(lambda: aws.sqs.send_message(QueueUrl=invocation.sqs_url, MessageBody=message))
    return won


def _put_object(s3: Any, bucket: str | None, key: str, body: bytes) -> bool:
    return _aws_call(
        lambda: s3.put_object(
            Bucket=bucket, Key=key, Body=body, ContentType="application/json", IfNoneMatch="*"
        )
    )


def _aws_call(call: Callable[[], object]) -> bool:
    """False when the object was there before. botocore has already retried what AWS says may pass."""
    import botocore.exceptions

    try:
        call()
    except botocore.exceptions.ClientError as error:
        if error.response.get("Error", {}).get("Code") in OBJECT_EXISTS:
            return False
        raise Unavailable(str(error)) from error
    except botocore.exceptions.BotoCoreError as error:
        raise _Passing(str(error)) from error
    return True
