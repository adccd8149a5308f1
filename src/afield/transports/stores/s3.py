"""S3 outcome store for collectors, with SQS hints.

Opening it writes, reads and lists a probe object, so that missing permissions are reported at the start.
Without permission to list, sweeps read single keys.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from afield.errors import Unavailable, UsageError
from afield.sdk.stores import S3Store, TransientError
from afield.transports.notifiers.base import Notifier
from afield.transports.notifiers.sqs import SqsNotifier
from afield.transports.stores.base import TransportSpec
from afield.transports.stores.memory import MemoryNotifier

log = logging.getLogger(__name__)

FORMS: tuple[str, ...] = ("s3://BUCKET?sqs=URL", "s3://BUCKET?queues=PREFIX")
OPTIONS: tuple[str, ...] = ("sqs", "queues", "dead", "endpoint", "sqs_endpoint", "region", "threads")
QUEUE_OPTIONS: tuple[str, ...] = ("sqs", "queues", "dead")
THREADS = 32
PAGE = 1000
PROBE = "afield.probe"


class S3CollectorStore(S3Store):
    """Outcome store in an S3 bucket, with concurrent calls."""

    foreign = True

    def __init__(
        self,
        bucket: str,
        *,
        endpoint: str | None = None,
        region: str | None = None,
        threads: int = THREADS,
        probe: str = PROBE,
    ) -> None:
        super().__init__(bucket, endpoint=endpoint, region=region, pool=threads)
        self.threads = threads
        self.page = PAGE
        self._probe = probe

    @property
    def address(self) -> dict[str, Any]:
        return {"s3_bucket": self.bucket}

    def open(self) -> None:
        self.put_if_absent(self._probe, b"{}")
        if self.get(self._probe) is None:
            raise Unavailable(
                f"{self._probe} in {self.location} was written but cannot be read;"
                " allow s3:GetObject in the policy of these credentials"
            )
        try:
            self.list(self._probe)
        except TransientError:
            raise
        except Unavailable as error:
            log.warning("s3: %s cannot be listed, polling reads single keys: %s", self.location, error)
            self.page = 0


def from_spec(spec: TransportSpec, root: Path) -> tuple[S3CollectorStore, Notifier]:
    if not spec.host or spec.path.strip("/"):
        raise UsageError(
            f"transport {spec.text!r} must be a bucket without a path: s3://BUCKET?sqs=URL;"
            " objects are stored under the experiment's id"
        )
    options = spec.options
    endpoint, region = options.get("endpoint"), options.get("region")
    threads = spec.positive_int("threads", THREADS)
    store = S3CollectorStore(spec.host, endpoint=endpoint, region=region, threads=threads)
    queue_options = [name for name in QUEUE_OPTIONS if name in options]
    if "notify" in options and queue_options:
        raise UsageError(
            f"transport {spec.text!r} has both notify= and {queue_options[0]}=; choose one queue"
        )
    if "sqs" not in options and "queues" not in options:
        return store, MemoryNotifier()
    return store, SqsNotifier(
        options.get("sqs"),
        queue_prefix=options.get("queues"),
        dead_url=options.get("dead"),
        endpoint=options.get("sqs_endpoint", endpoint),
        region=region,
    )
