"""Traces from settings and OTEL_* variables."""

from __future__ import annotations

import logging
from importlib.util import find_spec

from afield.errors import UsageError
from afield.factory.registry import needs
from afield.settings.environment import Environment
from afield.settings.gateway import GatewaySettings
from afield.settings.train import TrainConfig
from afield.utils.telemetry import SpanExporter

log = logging.getLogger(__name__)


def traces_wanted(settings: GatewaySettings | TrainConfig) -> bool:
    """Whether traces are sent; raises UsageError if the setting asks for them and the library is missing.

    The variables may be meant for the agent's own traces: without the library they are ignored.
    """
    if not (settings.otel_endpoint or Environment.read().otel_endpoint):
        return False
    try:
        installed = find_spec("opentelemetry.exporter.otlp.proto.http.trace_exporter") is not None
    except ModuleNotFoundError:
        installed = False
    if not installed and settings.otel_endpoint:
        raise UsageError("the OTLP exporter is not installed: pip install 'afield[otel]'")
    if not installed:
        log.info("traces: off, since the OTLP exporter is not installed (pip install 'afield[otel]')")
    return installed


def span_exporter(settings: GatewaySettings | TrainConfig, service: str) -> SpanExporter | None:
    """Exporter of traces; None if they are off."""
    if not traces_wanted(settings):
        return None
    content = settings.otel_content or Environment.read().otel_content
    with needs("otel"):
        return SpanExporter(settings.otel_endpoint, service, content=content)
