"""Fault injection: failing calls, drawn by a seed.

A draw depends only on the seed, the kind of fault, the session id and the number of earlier draws for both. A
run therefore meets the same faults however its calls interleave.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from typing import get_args

from msgspec import Struct

from afield.agentcore_local.errors import Kind, ServiceError
from afield.errors import UsageError

ANSWERS: dict[str, Kind] = {
    "throttle": "ThrottlingException",
    "error": "InternalServerException",
    "agent": "RuntimeClientError",
    "quota": "ServiceQuotaExceededException",
    "conflict": "RetryableConflictException",
}
assert set(ANSWERS.values()) <= set(get_args(Kind))
KINDS = {
    "throttle": "429, nothing started",
    "error": "500, nothing started",
    "agent": "424, nothing started",
    "quota": "402, nothing started",
    "conflict": "409 retryable, nothing started",
    "hang": "the answer comes after N s (default 3600), though the program has it at once",
    "cut": "the connection breaks instead of the answer, though the program took the payload",
    "die": "the session is killed N s (default 1) after it became ready",
    "lie": "a stop answers 200 and the session lives on",
    "create": "a runtime ends in CREATE_FAILED or UPDATE_FAILED",
}
SECONDS = {"hang": 3600.0, "die": 1.0}


class InjectedFault(Struct, frozen=True):
    """Rate and duration of one kind of fault."""

    rate: float
    """Probability per call, from 0 to 1."""
    seconds: float = 0.0
    """Delay of `hang` and `die` faults in seconds; 0 for all other kinds."""


def parse(specs: Iterable[str]) -> dict[str, InjectedFault]:
    """Parse KIND=RATE or KIND=RATE:SECONDS; raises UsageError if one is invalid."""
    faults: dict[str, InjectedFault] = {}
    for spec in specs:
        kind, equals, numbers = spec.partition("=")
        if kind not in KINDS or not equals:
            raise UsageError(
                f"--fault {spec!r} must be KIND=RATE[:SECONDS] with KIND one of: {', '.join(KINDS)}"
            )
        rate, colon, seconds = numbers.partition(":")
        try:
            fault = InjectedFault(float(rate), float(seconds) if colon else SECONDS.get(kind, 0.0))
        except ValueError as error:
            raise UsageError(f"--fault {spec!r}: {error}; like {kind}=0.05") from error
        if not 0 <= fault.rate <= 1 or not 0 <= fault.seconds < float("inf"):
            raise UsageError(
                f"--fault {spec!r}: the rate is from 0 to 1, seconds are finite and not negative"
            )
        if colon and kind not in SECONDS:
            raise UsageError(f"--fault {spec!r}: {kind} takes no seconds; only {', '.join(SECONDS)} do")
        faults[kind] = fault
    return faults


class FaultInjector:
    """Draws faults and counts the injected ones."""

    def __init__(self, faults: dict[str, InjectedFault], seed: int) -> None:
        self._faults, self._seed = faults, seed
        self._draws: Counter[tuple[str, str]] = Counter()
        self.injected: Counter[str] = Counter()

    def draw(self, kind: str, key: str) -> InjectedFault | None:
        """Draw a fault for a key, usually a session id; None if the call is to succeed."""
        fault = self._faults.get(kind)
        if fault is None or fault.rate == 0:
            return None
        self._draws[kind, key] += 1
        drawn = f"{self._seed}|{kind}|{key}|{self._draws[kind, key]}".encode()
        number = int.from_bytes(hashlib.blake2b(drawn, digest_size=8).digest()) / 2**64
        if number >= fault.rate:
            return None
        self.injected[kind] += 1
        return fault

    def check(self, key: str) -> None:
        """Raise a drawn error for a call that is to fail before it has any effect."""
        for kind, answer in ANSWERS.items():
            if self.draw(kind, key):
                raise ServiceError(answer, f"injected by --fault {kind}")
