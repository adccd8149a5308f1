"""Outcomes in an S3 bucket, as a collector sees it: the store agents write, with many calls at once.

Entering writes, reads and lists a probe, so that a permission that is missing is named at the start and is
not mistaken for "no outcome yet" later. Without permission to list, sweeps ask for single keys.
"""

from __future__ import annotations

import logging
from typing import Any

from afield.errors import Unavailable
from afield.sdk.outcomes import Passing
from afield.sdk.s3_store import S3Store

log = logging.getLogger("afield.transports")

THREADS = 32
PAGE = 1000
PROBE = "afield.probe"


class S3Outcomes(S3Store):
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
                f"{self._probe} was written to {self.place} and cannot be read;"
                " allow s3:GetObject in the policy of these credentials"
            )
        try:
            self.list(self._probe)
        except Passing:
            raise
        except Unavailable as error:
            log.warning("sweeps ask for single keys, and late outcomes cannot be listed: %s", error)
            self.page = 0
