"""OpenTelemetry traces: span ids that processes agree on, and an OTLP exporter.

1. Ids of rollouts and attempts are hashes of the run and the session, so that collector and gateway give
   their spans the same trace without talking to each other.
2. `SpanExporter` builds finished spans and hands them to the SDK's batch processor, whose thread sends them
   by OTLP over HTTP. The SDK reads its own variables: OTEL_SERVICE_NAME, OTEL_EXPORTER_OTLP_HEADERS, ...

Only `SpanExporter` needs the package opentelemetry-sdk.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

SCOPE = "afield"
FLUSH_TIMEOUT_S = 10.0
"""Seconds to send the spans that are left when a process ends."""
TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
Kind = Literal["internal", "client"]


class SpanIds(Struct, frozen=True):
    """Position of a span: its trace and itself."""

    trace_id: int
    """Trace id, 128 bits."""
    span_id: int
    """Span id, 64 bits."""
    sampled: bool = True
    """Whether the trace is recorded."""

    @property
    def traceparent(self) -> str:
        """Value of the W3C header `traceparent`."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"


def parse_traceparent(text: str) -> SpanIds | None:
    """Span that a `traceparent` header names; None without a valid one."""
    match = TRACEPARENT.fullmatch(text.strip().lower())
    if match is None:
        return None
    ids = SpanIds(int(match[1], 16), int(match[2], 16), bool(int(match[3], 16) & 1))
    return ids if ids.trace_id and ids.span_id else None


def hashed_ids(seed: str, trace: str, span: str) -> SpanIds:
    """Ids of a span that every process computes alike: `seed` names the run, `trace` the rollout."""
    return SpanIds(_number(f"{seed}\0{trace}", 16), _number(f"{seed}\0{trace}\0{span}", 8))


def attempt_ids(seed: str, rollout_id: str, session_id: str) -> SpanIds:
    """Ids of an attempt's span."""
    return hashed_ids(seed, rollout_id, session_id)


def _number(text: str, size: int) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:size], "big") or 1


class SpanLink(Struct, frozen=True):
    """Span that another one refers to, in a trace of its own."""

    ids: SpanIds
    """The other span."""
    what: str
    """Meaning of the link."""


class SpanExporter:
    """Sends finished spans by OTLP over HTTP, from a thread of its own; `close` sends what is left."""

    def __init__(self, endpoint: str, service: str, *, content: bool = False) -> None:
        """`endpoint` is the collector's base address; empty takes the SDK's own variables."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self.content = content
        address = f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None
        resource = Resource.create()
        if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: service}))
        self._resource = resource
        self._sampler = TracerProvider(resource=resource, shutdown_on_exit=False).sampler
        self._scope = InstrumentationScope(SCOPE)
        self._processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=address))

    def child_of(self, parent: SpanIds | None) -> SpanIds:
        """Ids of a new span: in the trace of `parent`, or in a new one."""
        trace_id = parent.trace_id if parent else secrets.randbits(128) or 1
        return SpanIds(trace_id, secrets.randbits(64) or 1, parent.sampled if parent else True)

    def emit(
        self,
        name: str,
        ids: SpanIds,
        parent: SpanIds | None,
        *,
        start: float,
        end: float,
        attributes: Mapping[str, Any],
        kind: Kind = "internal",
        error: str = "",
        links: Sequence[SpanLink] = (),
    ) -> None:
        """Send a finished span; times are wall-clock seconds. `error` is the description of a failure."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.trace.sampling import Decision
        from opentelemetry.trace import Link, NonRecordingSpan, SpanKind, set_span_in_context
        from opentelemetry.trace.status import Status, StatusCode

        above = _context(parent) if parent else None
        around = set_span_in_context(NonRecordingSpan(above)) if above else None
        result = self._sampler.should_sample(around, ids.trace_id, name)
        if result.decision is not Decision.RECORD_AND_SAMPLE:
            return
        values = {key: value for key, value in attributes.items() if value is not None}
        self._processor.on_end(
            ReadableSpan(
                name,
                context=_context(ids),
                parent=above,
                resource=self._resource,
                attributes=values,
                links=[Link(_context(link.ids), {"afield.link": link.what}) for link in links],
                kind=SpanKind.CLIENT if kind == "client" else SpanKind.INTERNAL,
                status=Status(StatusCode.ERROR, error) if error else Status(StatusCode.UNSET),
                start_time=int(start * 1e9),
                end_time=int(max(start, end) * 1e9),
                instrumentation_scope=self._scope,
            )
        )

    def close(self) -> None:
        self._processor.force_flush(int(FLUSH_TIMEOUT_S * 1000))
        self._processor.shutdown()


def _context(ids: SpanIds) -> Any:
    from opentelemetry.trace import SpanContext, TraceFlags

    return SpanContext(
        ids.trace_id, ids.span_id, is_remote=True, trace_flags=TraceFlags(1 if ids.sampled else 0)
    )
