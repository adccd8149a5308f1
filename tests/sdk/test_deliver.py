"""Delivery to HTTP endpoints and to S3 with SQS, against small real servers."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from afield.errors import Unavailable
from afield.sdk.deliver import RETRY_DELAYS_S, deliver
from agents.invoking import invocation, record

Answer = tuple[int, bytes]


class Server(ThreadingHTTPServer):
    """Keeps what it was sent, and answers what `answer` says."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.answer: Callable[[str, str, dict[str, str], bytes], Answer] = lambda *_: (200, b"{}")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self.rfile.read(int(headers.get("content-length", 0)))
        self.server.requests.append((self.command, self.path, headers, body))
        status, said = self.server.answer(self.command, self.path, headers, body)
        self.send_response(status)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def do_PUT(self) -> None:
        self.do_POST()

    def do_GET(self) -> None:
        self.do_POST()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join(20)


def answers(*statuses: int) -> Callable[..., Answer]:
    left = list(statuses)
    return lambda *_: (left.pop(0) if len(left) > 1 else left[0], b'{"error": "said so"}')


def no_sleep(seconds: float) -> None:
    pass


# --- http ----------------------------------------------------------------------------------------


def test_an_outcome_is_posted_with_the_sessions_key(server: Server) -> None:
    one = invocation(outcome_url=f"{server.url}/s/r.1/outcome")
    assert deliver(one, record(one, 0.5))
    [(method, path, headers, body)] = server.requests
    assert (method, path) == ("POST", "/s/r.1/outcome")
    assert headers["authorization"] == "Bearer secret-key"
    assert json.loads(body)["outcome"]["reward"] == 0.5


def test_an_attempt_decided_before_is_no_error(server: Server) -> None:
    server.answer = answers(409)
    one = invocation(outcome_url=server.url)
    assert not deliver(one, record(one))


def test_what_may_pass_is_tried_again(server: Server) -> None:
    server.answer = answers(503, 500, 429, 200)
    one = invocation(outcome_url=server.url)
    slept: list[float] = []
    assert deliver(one, record(one), sleep=slept.append)
    assert slept == list(RETRY_DELAYS_S[:3]) and len(server.requests) == 4


def test_delivery_gives_up_after_six_attempts(server: Server) -> None:
    server.answer = answers(503)
    one = invocation(outcome_url=server.url)
    with pytest.raises(Unavailable, match=r"no delivery after 6 attempts.*503.*r\.1.*said so"):
        deliver(one, record(one), sleep=no_sleep)
    assert len(server.requests) == 6


def test_a_refusal_is_not_tried_again(server: Server) -> None:
    server.answer = answers(403)
    one = invocation(outcome_url=server.url)
    with pytest.raises(Unavailable, match=r"403.*said so"):
        deliver(one, record(one), sleep=no_sleep)
    assert len(server.requests) == 1


def test_a_redirect_is_not_taken_for_a_delivery(server: Server) -> None:
    server.answer = answers(302)
    one = invocation(outcome_url=server.url)
    with pytest.raises(Unavailable, match="302"):
        deliver(one, record(one), sleep=no_sleep)


def test_delivery_to_a_closed_port_raises_unavailable_with_the_address() -> None:
    with Server() as gone:
        url = gone.url
    one = invocation(outcome_url=url)
    with pytest.raises(Unavailable, match=url):
        deliver(one, record(one), sleep=no_sleep)


# --- S3 and SQS ----------------------------------------------------------------------------------

MISSING = b"<Error><Code>NoSuchKey</Code><Message>missing</Message></Error>"
EXISTS = b"<Error><Code>PreconditionFailed</Code><Message>exists</Message></Error>"


@pytest.fixture
def aws(server: Server, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """boto3 pointed at the server, which keeps objects and enforces If-None-Match."""
    objects: dict[str, bytes] = {}

    def answer(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        if method == "POST":
            return 200, b'{"MessageId": "1", "MD5OfMessageBody": ""}'
        if method == "GET":
            return (200, objects[path]) if path in objects else (404, MISSING)
        if headers.get("if-none-match") == "*" and path in objects:
            return 412, EXISTS
        objects[path] = body
        return 200, b""

    server.answer = answer
    for name, value in {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-west-2",
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        "AWS_MAX_ATTEMPTS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    return objects


def test_s3_gets_the_data_then_the_commit_then_sqs_the_hint(server: Server, aws: dict[str, bytes]) -> None:
    queue = f"{server.url}/1/queue"
    one = invocation(outcome_url=None, s3_bucket="bucket", sqs_url=queue, input_id="a/b c")
    assert deliver(one, record(one, 0.5))
    paths = [path for method, path, *_ in server.requests if method == "PUT"]
    assert paths == ["/bucket/exp/a%252Fb%2520c/r.1.json", "/bucket/exp/commits/r.1.json"]
    assert json.loads(aws[paths[0]])["outcome"]["reward"] == 0.5
    assert json.loads(aws[paths[1]])["data_key"] == one.data_key
    method, _, _, message = server.requests[-1]
    assert method == "POST" and b"r.1" in message


def test_the_first_commit_in_s3_wins(server: Server, aws: dict[str, bytes]) -> None:
    one = invocation(outcome_url=None, s3_bucket="bucket")
    assert deliver(one, record(one, 1.0))
    kept = dict(aws)
    assert not deliver(one, record(one, 0.0))
    late = aws.pop("/bucket/exp/late/r.1.json")
    assert aws == kept and json.loads(late)["outcome"]["reward"] == 0.0


def test_the_same_outcome_again_stands_already(server: Server, aws: dict[str, bytes]) -> None:
    one = invocation(outcome_url=None, s3_bucket="bucket")
    assert deliver(one, record(one, 1.0))
    kept = dict(aws)
    assert deliver(one, record(one, 1.0))
    assert aws == kept


def test_writers_at_the_same_key_at_the_same_moment_are_tried_again(
    server: Server, aws: dict[str, bytes]
) -> None:
    conflict = b"<Error><Code>ConditionalRequestConflict</Code><Message>busy</Message></Error>"
    answer, left = server.answer, [2]

    def busy(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        if method == "PUT" and left[0]:
            left[0] -= 1
            return 409, conflict
        return answer(method, path, headers, body)

    server.answer = busy
    one = invocation(outcome_url=None, s3_bucket="bucket")
    assert deliver(one, record(one, 1.0))
    assert "/bucket/exp/commits/r.1.json" in aws


def test_a_queue_that_is_gone_costs_the_hint_only(
    server: Server, aws: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    answer = server.answer
    server.answer = lambda method, *rest: (400, b"{}") if method == "POST" else answer(method, *rest)
    one = invocation(outcome_url=None, s3_bucket="bucket", sqs_url=f"{server.url}/1/queue")
    assert deliver(one, record(one, 1.0))
    assert "polling finds the outcome" in caplog.text


def test_a_bucket_that_refuses_is_an_error(server: Server, aws: dict[str, bytes]) -> None:
    denied = b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
    server.answer = lambda *_: (403, denied)
    one = invocation(outcome_url=None, s3_bucket="bucket")
    with pytest.raises(Unavailable, match="AccessDenied"):
        deliver(one, record(one), sleep=no_sleep)
