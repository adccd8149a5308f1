"""Brings an outcome to where `_rollout` says: a directory, an HTTP endpoint, or S3; then gives a hint.

Delivering twice changes nothing. What may pass (a connection, a 5xx, a full disk) is tried again a
bounded number of times; after that Unavailable is raised, and the caller says so loudly; what is wrong in
itself is Refused at once. A hint that cannot be given is logged only: a sweep finds the outcome.
"""

from __future__ import annotations

import contextlib
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from afield import wire
from afield.errors import Unavailable, UsageError
from afield.sdk import file_store, outcomes
from afield.sdk.hints import notify
from afield.sdk.outcomes import Passing, Refused
from afield.sdk.s3_store import S3Store
from afield.wire import Hint, Invocation, OutcomeRecord, Submission

DELAYS_S = (0.2, 0.5, 1.0, 2.0, 4.0)
REQUEST_S = 30.0


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected POST becomes a GET that succeeds and delivers nothing."""

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> None:
        return None


def deliver(
    invocation: Invocation,
    record: OutcomeRecord | Submission,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Whether this outcome stands; not if the attempt was decided otherwise. Blocks: call it in a thread."""
    for delay in (*DELAYS_S, None):
        try:
            return _deliver_once(invocation, record)
        except Passing as error:
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


def _deliver_once(invocation: Invocation, record: OutcomeRecord | Submission) -> bool:
    url = invocation.outcome_url
    if url is not None and not url.startswith("file:"):
        return _to_http(url, invocation, record)
    if isinstance(record, Submission):
        raise UsageError(f"{invocation.session_id} is judged: what it hands in goes to its gateway")
    hint = wire.encode(Hint(exp_id=invocation.exp_id, session_id=invocation.session_id))
    if url is None:
        with contextlib.closing(S3Store(invocation.s3_bucket or "")) as store:
            stands = outcomes.deliver(store, invocation, record)
    else:
        stands = outcomes.deliver(file_store.FileStore(file_root(url)), invocation, record)
        if stands and not invocation.hint_url:
            file_store.hint(file_root(url), invocation.exp_id, hint)
    if stands:  # nobody waits for one that was refused
        notify(invocation, hint)
    return stands


def _to_http(url: str, invocation: Invocation, record: OutcomeRecord | Submission) -> bool:
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
        if error.code in (400, 413, 422):
            raise Refused(refused, too_large=error.code == 413) from None
        raise (Passing if error.code >= 500 or error.code in (408, 429) else Unavailable)(refused) from None
    except (OSError, http.client.HTTPException) as error:
        raise Passing(f"{url} does not take the outcome of {invocation.session_id}: {error}") from error
