"""Outcome stores of agents: a directory or an S3 bucket.

1. `deliver_to_store` writes an outcome's data, then its commit if there is none: the first commit decides.
   An outcome that lost is kept apart under `late`.
2. `FileStore` writes and syncs a temporary file and links it to its name, which fails if the name exists.
   Hints are rows of `hints.sqlite` beside the objects; a lost hint only delays its outcome.
3. `S3Store` puts objects with `If-None-Match: *` through boto3 (extra `aws`). A missing key, or one that S3
   does not disclose (403 without ListBucket), counts as not yet written. Without an endpoint boto3 finds one
   itself: AWS_ENDPOINT_URL, a profile, or AWS.

Shared by agents, which write, and transports, which read.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

from afield import wire
from afield.errors import Unavailable, UsageError, WireError
from afield.utils import sqlite
from afield.utils.durable_files import sync
from afield.wire import CommitRecord, Invocation, OutcomeRecord

log = logging.getLogger(__name__)

T = TypeVar("T")


class TransientError(Unavailable):
    """A failure that a retry may overcome."""


class OutcomeRejected(Unavailable):
    """The receiver rejects the outcome itself; a retry does not help."""

    def __init__(self, message: str, *, too_large: bool = False) -> None:
        super().__init__(message)
        self.too_large = too_large


class OutcomeStore(Protocol):
    """Write-once objects under keys. Calls may block and may come from any thread.

    Raises Unavailable, with the location and the remedy, when it cannot be reached or refuses.
    """

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write the object, whole or not at all; False if the key exists."""
        ...

    def get(self, key: str) -> bytes | None:
        """The object, or None if it does not exist."""
        ...

    def list(self, prefix: str) -> list[str]:
        """Keys that begin with `prefix`."""
        ...


def deliver_to_store(store: OutcomeStore, invocation: Invocation, record: OutcomeRecord) -> bool:
    """Write an outcome; whether it stands. Repeating it is harmless and answers the same.

    The first data object of an attempt stays, so that a commit never points at another record.
    """
    commit = CommitRecord(session_id=invocation.session_id, data_key=invocation.data_key)
    data = wire.encode(record)
    data_written = store.put_if_absent(invocation.data_key, data)
    commit_written = store.put_if_absent(invocation.commit_key, wire.encode(commit))
    if (data_written and commit_written) or _stands(store, invocation, record):
        return True
    store.put_if_absent(wire.late_key(invocation.exp_id, invocation.session_id), data)
    return False


def _stands(store: OutcomeStore, invocation: Invocation, record: OutcomeRecord) -> bool:
    commit = read_object(store, invocation.commit_key, CommitRecord)
    if commit is None or commit.fenced:
        return False
    committed = read_object(store, commit.data_key, OutcomeRecord)
    return committed is not None and committed.outcome == record.outcome


def read_object(store: OutcomeStore, key: str, into: type[T]) -> T | None:
    """An object decoded as a struct; None if it does not exist."""
    data = store.get(key)
    return None if data is None else wire.decode(data, into, key)


def committed_record(store: OutcomeStore, commit: CommitRecord) -> OutcomeRecord:
    """The record that a commit names."""
    record = read_object(store, commit.data_key, OutcomeRecord)
    if record is None:
        raise WireError(f"the commit of {commit.session_id} names {commit.data_key}, which is missing")
    return record


# --- a directory ---------------------------------------------------------------------------------

HINTS = "hints.sqlite"
HINTS_BUSY_S = 10.0
HINTS_SCHEMA = """
CREATE TABLE IF NOT EXISTS notices
    (id INTEGER PRIMARY KEY, exp_id TEXT NOT NULL, body TEXT NOT NULL,
     leased_until REAL NOT NULL DEFAULT 0, times INTEGER NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS notices_of ON notices (exp_id, leased_until);
CREATE TABLE IF NOT EXISTS dead
    (id INTEGER PRIMARY KEY, exp_id TEXT NOT NULL, body TEXT NOT NULL,
     reason TEXT NOT NULL, at REAL NOT NULL);
"""


class FileStore:
    """Objects as files; keys are paths below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def put_if_absent(self, key: str, data: bytes) -> bool:
        with self._writing(key):
            return _put_if_absent(self._path(key), data)

    def get(self, key: str) -> bytes | None:
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise TransientError(
                f"cannot read {key} under {self.root}: {error}; is the disk mounted?"
            ) from error

    def list(self, prefix: str) -> list[str]:
        folder = self._path(prefix.rpartition("/")[0])
        keys = (path.relative_to(self.root).as_posix() for path in folder.rglob("*.json"))
        return sorted(key for key in keys if key.startswith(prefix))

    def _path(self, key: str) -> Path:
        return self.root.joinpath(*key.split("/"))

    @contextlib.contextmanager
    def _writing(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TransientError(
                f"cannot write {key} under {self.root}: {error};"
                " the directory must be writable, have space left and allow hard links"
            ) from error


def _put_if_absent(path: Path, data: bytes) -> bool:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        return False
    temporary = path.parent / f"{uuid.uuid4().hex}.tmp"
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)
    return True


def write_hint(root: Path, exp_id: str, body: bytes) -> None:
    """Queue a hint that an attempt is decided. A hint that cannot be written is logged."""
    try:
        with contextlib.closing(open_hints(root)) as db:
            add_hint(db, exp_id, body)
    except sqlite3.Error as error:
        log.warning("hint: %s not written: %s; polling finds the outcome", root / HINTS, error)


def add_hint(db: sqlite3.Connection, exp_id: str, body: bytes) -> None:
    db.execute("INSERT INTO notices (exp_id, body) VALUES (?, ?)", (exp_id, body.decode()))


def open_hints(root: Path, busy_timeout_s: float = HINTS_BUSY_S) -> sqlite3.Connection:
    return sqlite.connect(root / HINTS, HINTS_SCHEMA, busy_timeout_s=busy_timeout_s)


# --- S3 ------------------------------------------------------------------------------------------

AWS_CONNECT_S = 5.0
AWS_READ_S = 30.0
AWS_TRIES = 4
MAX_CONFLICTS = 8
EXISTS = frozenset({"PreconditionFailed", "412"})
CONFLICT = frozenset({"ConditionalRequestConflict", "409"})
NOT_YET = frozenset({"NoSuchKey", "NotFound", "404", "AccessDenied", "403"})
S3_ACTIONS = {"PutObject": "s3:PutObject", "GetObject": "s3:GetObject", "ListObjectsV2": "s3:ListBucket"}
TRANSIENT_STATUS = frozenset({408, 429})
_client_lock = threading.Lock()


def aws_client(service: str, *, endpoint: str | None = None, region: str | None = None, pool: int = 4) -> Any:
    """A boto3 client with bounded retries and timeouts."""
    try:
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise UsageError(f"{service} needs boto3: pip install 'afield[aws]'") from error
    config = Config(
        connect_timeout=AWS_CONNECT_S,
        read_timeout=AWS_READ_S,
        retries={"mode": "standard", "total_max_attempts": AWS_TRIES},
        max_pool_connections=pool,
    )
    try:
        with _client_lock:
            return _session(region).client(service, endpoint_url=endpoint, config=config)
    except ImportError as error:
        raise UsageError(f"{service} needs boto3: pip install 'afield[aws]'") from error
    except (BotoCoreError, ValueError) as error:
        raise UsageError(
            f"cannot create a {service} client: {error}; set AWS_REGION, or give region and endpoint"
        ) from error


@functools.cache
def _session(region: str | None) -> Any:
    """boto3 session of all clients: it caches service models, which load slowly."""
    import boto3

    return boto3.Session(region_name=region)


def load_aws_models() -> None:
    """Load service models, so that forked processes create clients quickly."""
    credentials = {"region_name": "us-east-1", "aws_access_key_id": "-", "aws_secret_access_key": "-"}
    for service in ("s3", "sqs"):
        _session(None).client(service, **credentials)


def call_aws(call: Callable[[], T], action: str) -> T:
    """Call boto3; its errors become Unavailable, or TransientError where a retry may help."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return call()
    except ClientError as error:
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        kind = TransientError if status >= 500 or status in TRANSIENT_STATUS else Unavailable
        raise kind(f"{action}: {error}{_remedy(error)}") from error
    except BotoCoreError as error:
        raise TransientError(f"{action}: {error}; check the endpoint and the credentials") from error


def error_code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _remedy(error: Any) -> str:
    if error_code(error) == "NoSuchBucket":
        return "; create the bucket, or correct its name"
    if error_code(error) in {"AccessDenied", "403"}:
        operation = str(getattr(error, "operation_name", ""))
        action = S3_ACTIONS.get(operation, f"sqs:{operation}")
        return f"; allow {action} in the policy of these credentials"
    return ""


class S3Store:
    """Objects in an S3 bucket; the client is created at the first call."""

    def __init__(
        self, bucket: str, *, endpoint: str | None = None, region: str | None = None, pool: int = 4
    ) -> None:
        self.bucket = bucket
        self._endpoint = endpoint
        self._region = region
        self._pool = pool
        self._client: Any = None
        self._lock = threading.Lock()

    @property
    def location(self) -> str:
        return f"bucket {self.bucket!r}" + (f" at {self._endpoint}" if self._endpoint else "")

    def put_if_absent(self, key: str, data: bytes) -> bool:
        action = f"cannot write {key} to {self.location}"
        for n in range(MAX_CONFLICTS):
            written = call_aws(lambda: self._put(key, data), action)
            if written is not None:
                return written
            # A concurrent write to the same key; S3 decides in a moment which one was first.
            time.sleep(random.uniform(0, 0.05 * 2**n))
        raise TransientError(f"{action}: concurrent writes to the same key did not end")

    def _put(self, key: str, data: bytes) -> bool | None:
        """Whether it was written; None if a concurrent write to the key is undecided."""
        from botocore.exceptions import ClientError

        try:
            self._s3().put_object(
                Bucket=self.bucket, Key=key, Body=data, ContentType="application/json", IfNoneMatch="*"
            )
        except ClientError as error:
            if error_code(error) in EXISTS:
                return False
            if error_code(error) in CONFLICT:
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
                if error_code(error) in NOT_YET:
                    return None
                raise

        return call_aws(fetch, f"cannot read {key} from {self.location}")

    def list(self, prefix: str) -> list[str]:
        def pages() -> list[str]:
            listing = self._s3().get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix)
            return [item["Key"] for page in listing for item in page.get("Contents", ())]

        return call_aws(pages, f"cannot list {prefix} in {self.location}")

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _s3(self) -> Any:
        with self._lock:
            if self._client is None:
                self._client = aws_client("s3", endpoint=self._endpoint, region=self._region, pool=self._pool)
            return self._client
