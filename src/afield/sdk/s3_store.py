"""Outcomes in an S3 bucket, and clients of AWS, through boto3 (extra `aws`).

Objects are put with `If-None-Match: *`, so the first writer of a key wins. A key that is missing, or that
S3 refuses to tell about (403 without ListBucket), is "not yet". Retries and timeouts are bounded. Without an
endpoint boto3 looks for one itself: AWS_ENDPOINT_URL, a profile, or AWS.
"""

from __future__ import annotations

import functools
import random
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from afield.errors import Unavailable, UsageError
from afield.sdk.outcomes import Passing

T = TypeVar("T")

CONNECT_S = 5.0
READ_S = 30.0
TRIES = 4
CONFLICTS = 8
EXISTS = frozenset({"PreconditionFailed", "412"})
CONFLICT = frozenset({"ConditionalRequestConflict", "409"})
NOT_YET = frozenset({"NoSuchKey", "NotFound", "404", "AccessDenied", "403"})
S3_ACTIONS = {"PutObject": "s3:PutObject", "GetObject": "s3:GetObject", "ListObjectsV2": "s3:ListBucket"}
PASSING_STATUS = frozenset({408, 429})
_making = threading.Lock()


def client(service: str, *, endpoint: str | None = None, region: str | None = None, pool: int = 4) -> Any:
    """boto3 clients have no static types."""
    try:
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise UsageError(f"{service} needs boto3: pip install 'afield[aws]'") from error
    config = Config(
        connect_timeout=CONNECT_S,
        read_timeout=READ_S,
        retries={"mode": "standard", "total_max_attempts": TRIES},
        max_pool_connections=pool,
    )
    try:
        with _making:
            return _session(region).client(service, endpoint_url=endpoint, config=config)
    except ImportError as error:
        raise UsageError(f"{service} needs boto3: pip install 'afield[aws]'") from error
    except (BotoCoreError, ValueError) as error:
        raise UsageError(
            f"no {service} client: {error}; set AWS_REGION, or give region and endpoint"
        ) from error


@functools.cache
def _session(region: str | None) -> Any:
    """One for all: it remembers what takes long to load. Clients are made from it one at a time."""
    import boto3

    return boto3.Session(region_name=region)


def warm() -> None:
    """Load what clients are made of, so that those of processes forked from this one are made quickly."""
    made = {"region_name": "us-east-1", "aws_access_key_id": "-", "aws_secret_access_key": "-"}
    for service in ("s3", "sqs"):
        _session(None).client(service, **made)


def called(call: Callable[[], T], what: str) -> T:
    """Whatever boto3 raises becomes Unavailable; Passing where another try may help."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return call()
    except ClientError as error:
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        kind = Passing if status >= 500 or status in PASSING_STATUS else Unavailable
        raise kind(f"{what}: {error}{_remedy(error)}") from error
    except BotoCoreError as error:
        raise Passing(f"{what}: {error}; is the endpoint right, and are there credentials?") from error


def code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _remedy(error: Any) -> str:
    if code(error) == "NoSuchBucket":
        return "; create the bucket, or correct its name"
    if code(error) in {"AccessDenied", "403"}:
        operation = str(getattr(error, "operation_name", ""))
        action = S3_ACTIONS.get(operation, f"sqs:{operation}")
        return f"; allow {action} in the policy of these credentials"
    return ""


class S3Store:
    """Makes its client at the first call."""

    def __init__(
        self, bucket: str, *, endpoint: str | None = None, region: str | None = None, pool: int = 4
    ) -> None:
        self.bucket = bucket
        self._endpoint = endpoint
        self._region = region
        self._pool = pool
        self._made: Any = None
        self._lock = threading.Lock()

    @property
    def place(self) -> str:
        return f"bucket {self.bucket!r}" + (f" at {self._endpoint}" if self._endpoint else "")

    def put_if_absent(self, key: str, data: bytes) -> bool:
        what = f"cannot write {key} to {self.place}"
        for n in range(CONFLICTS):
            won = called(lambda: self._put(key, data), what)
            if won is not None:
                return won
            # Another writer was at the same key at the same moment; who was first shows in a moment.
            time.sleep(random.uniform(0, 0.05 * 2**n))
        raise Passing(f"{what}: others kept writing to the same key")

    def _put(self, key: str, data: bytes) -> bool | None:
        from botocore.exceptions import ClientError

        try:
            self._s3().put_object(
                Bucket=self.bucket, Key=key, Body=data, ContentType="application/json", IfNoneMatch="*"
            )
        except ClientError as error:
            if code(error) in EXISTS:
                return False
            if code(error) in CONFLICT:
                return None
            raise
        return True

    def get(self, key: str) -> bytes | None:
        from botocore.exceptions import ClientError

        def fetch() -> bytes | None:
            try:
                with self._s3().get_object(Bucket=self.bucket, Key=key)["Body"] as body:
                    return body.read()
            except ClientError as error:
                if code(error) in NOT_YET:
                    return None
                raise

        return called(fetch, f"cannot read {key} from {self.place}")

    def list(self, prefix: str) -> list[str]:
        def pages() -> list[str]:
            every = self._s3().get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix)
            return [item["Key"] for page in every for item in page.get("Contents", ())]

        return called(pages, f"cannot list {prefix} in {self.place}")

    def close(self) -> None:
        if self._made is not None:
            self._made.close()
            self._made = None

    def _s3(self) -> Any:
        with self._lock:
            if self._made is None:
                self._made = client("s3", endpoint=self._endpoint, region=self._region, pool=self._pool)
            return self._made
