"""AWS Signature Version 4: verifies that a request was signed with a secret access key."""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from urllib.parse import quote

ALGORITHM = "AWS4-HMAC-SHA256"
LATE_S = 900.0
_AUTHORIZATION = re.compile(
    rf"{ALGORITHM} Credential=(?P<key>[^/,\s]+)/(?P<scope>(?P<date>\d{{8}})/(?P<region>[^/,\s]+)/"
    r"(?P<service>[^/,\s]+)/aws4_request),\s*SignedHeaders=(?P<headers>[^,\s]+),\s*Signature=(?P<signature>\w+)"
)


def problem(
    secret: str, method: str, path: str, query: str, headers: Mapping[str, str], body: bytes
) -> str | None:
    """Why a request is not accepted; None if it is. `path` and `query` are as they were sent."""
    match = _AUTHORIZATION.fullmatch(headers.get("authorization", ""))
    if match is None:
        return "Missing Authentication Token: the request is not signed"
    stamp = headers.get("x-amz-date", "")
    if not _recent(stamp) or not stamp.startswith(match["date"]):
        return f"Signature expired: x-amz-date is {stamp!r}; the clocks of client and server differ too much"
    digest = hashlib.sha256(body).hexdigest()
    if headers.get("x-amz-content-sha256", digest) != digest:
        return "The provided x-amz-content-sha256 header does not match the body"
    names = match["headers"].split(";")
    if "host" not in names or "x-amz-date" not in names:
        return "The signature must cover the headers host and x-amz-date"
    signed = "".join(f"{name}:{' '.join(headers.get(name, '').split())}\n" for name in names)
    pairs = sorted(pair if "=" in pair else f"{pair}=" for pair in query.split("&") if pair)
    canonical = [method, quote(path, safe="/~"), "&".join(pairs), signed, match["headers"], digest]
    hashed = hashlib.sha256("\n".join(canonical).encode()).hexdigest()
    key = f"AWS4{secret}".encode()
    for part in (match["date"], match["region"], match["service"], "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    text = "\n".join([ALGORITHM, stamp, match["scope"], hashed])
    wanted = hmac.digest(key, text.encode(), "sha256").hex()
    if not hmac.compare_digest(wanted, match["signature"]):
        return "The request signature does not match: sign with the secret access key of this server"
    return None


def _recent(stamp: str) -> bool:
    try:
        signed = datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        return False
    return abs(time.time() - signed.timestamp()) <= LATE_S
