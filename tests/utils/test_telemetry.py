"""OpenTelemetry traces of a real run, as a receiver decodes them with the protocol's own classes."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from tests.cli.conftest import RunCommand, run_command  # noqa: F401 - a fixture

from afield.gateway.calls import Calls
from afield.utils.telemetry import SpanIds, hashed_ids, parse_traceparent
from support.client_gateway import threaded_gateway
from support.gateways import POLICY
from support.processes import AGENTS, train_arguments, unlearned

ROWS = [{"id": f"q{i}", "question": f"Question {i}?", "seconds": 0} for i in range(2)]
AGENT_TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Receiver:
    """OTLP receiver over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        received = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.path == "/v1/traces"
                received.take(ExportTraceServiceRequest.FromString(body))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def take(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            self.services |= {
                a.value.string_value for a in resource.resource.attributes if a.key == "service.name"
            }
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]

    def named(self, start: str) -> list[Any]:
        return [span for span in self.spans if span.name.startswith(start)]


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    thread = threading.Thread(target=receiver.server.serve_forever)
    thread.start()
    yield receiver
    receiver.server.shutdown()
    receiver.server.server_close()
    thread.join()


def trained(
    tmp_path: Path,
    run_command: RunCommand,  # noqa: F811
    agent: str,
    *more: object,
) -> None:
    options = (*unlearned(tmp_path), "--tasks-per-step", 2, "--rollouts", 2, "--steps", 1, "--run", "r")
    code, _, err = run_command(*train_arguments(tmp_path, agent, ROWS, *options, *more))
    assert code == 0, err


def test_a_run_sends_spans_of_rollouts_calls_steps_and_weights_in_shared_traces(
    tmp_path: Path,
    run_command: RunCommand,  # noqa: F811
    receiver: Receiver,
) -> None:
    trained(tmp_path, run_command, "slow_agent.py", "--otel-endpoint", receiver.url)
    assert receiver.services == {"afield", "afield-gateway"}
    agents, calls = receiver.named("invoke_agent"), receiver.named("chat")
    assert len(receiver.named("rollout")) == len(agents) == 4 and len(calls) == 8
    parents = {span.span_id: span for span in [*receiver.named("rollout"), *agents]}
    for span in [*agents, *calls]:  # calls are the gateway's process, agents the collector's
        assert parents[span.parent_span_id].trace_id == span.trace_id
        assert span.start_time_unix_nano <= span.end_time_unix_nano
    values = attributes(calls[0])
    assert values["gen_ai.operation.name"] == "chat" and values["gen_ai.request.model"] == POLICY.name
    assert values["gen_ai.usage.input_tokens"] > 0 and values["gen_ai.usage.output_tokens"] > 0
    assert [v.string_value for v in values["gen_ai.response.finish_reasons"].values] == ["stop"]
    assert values["gen_ai.response.id"].startswith("chatcmpl-")
    assert not [key for key in values if key.endswith("messages")]  # no content unless it is asked for
    [run], [step], published = (receiver.named(name) for name in ("run ", "step 1", "publish"))
    assert {span.parent_span_id for span in (step, *published)} == {run.span_id} and published
    assert attributes(step)["afield.rollouts"] == 4


def test_the_agents_own_trace_is_continued_and_content_is_opt_in(
    tmp_path: Path,
    run_command: RunCommand,  # noqa: F811
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    agent = (AGENTS / "slow_agent.py").read_text()
    sent = f'"content-type": "application/json", "traceparent": "{AGENT_TRACE}"'
    (tmp_path / "traced.py").write_text(agent.replace('"content-type": "application/json"', sent))
    trained(tmp_path, run_command, str(tmp_path / "traced.py"), "--otel-content")
    calls = receiver.named("chat")
    assert len(calls) == 8
    own = parse_traceparent(AGENT_TRACE)
    attempts = {span.span_id for span in receiver.named("invoke_agent")}
    for call in calls:
        assert int.from_bytes(call.trace_id) == own.trace_id
        assert int.from_bytes(call.parent_span_id) == own.span_id
        assert {link.span_id for link in call.links} <= attempts and len(call.links) == 1
    assert "Question" in attributes(calls[0])["gen_ai.input.messages"]
    assert '"role": "assistant"' in attributes(calls[0])["gen_ai.output.messages"]


def test_a_collector_that_is_down_does_not_end_the_run(
    tmp_path: Path,
    run_command: RunCommand,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    trained(tmp_path, run_command, "slow_agent.py", "--otel-endpoint", "http://127.0.0.1:1")


def test_a_gateway_without_traces_uses_the_plain_classes(tmp_path: Path) -> None:
    with threaded_gateway(tmp_path) as gateway:
        assert type(gateway._up.gateway.calls) is Calls


def test_ids_are_the_same_in_every_process_and_differ_between_runs() -> None:
    ids = hashed_ids("run", "rollout", "session")
    assert ids == hashed_ids("run", "rollout", "session") != hashed_ids("run2", "rollout", "session")
    assert ids.trace_id == hashed_ids("run", "rollout", "other").trace_id
    assert parse_traceparent(ids.traceparent) == ids


@pytest.mark.parametrize(
    "text", ["", "00-0-0-01", "x" * 55, AGENT_TRACE[:-1], f"00-{'0' * 32}-b7ad6b7169203331-01"]
)
def test_an_invalid_traceparent_is_ignored(text: str) -> None:
    assert parse_traceparent(text) is None


def test_an_unsampled_parent_is_read() -> None:
    assert parse_traceparent(f"{AGENT_TRACE[:-1]}0") == SpanIds(
        int("0af7651916cd43dd8448eb211c80319c", 16), int("b7ad6b7169203331", 16), False
    )
