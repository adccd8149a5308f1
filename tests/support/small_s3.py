"""A small S3 in this process: conditional puts, gets, listings in pages, and refusals on demand.

What it cannot show (races between servers' replicas, authentication) is tested on real servers.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

PAGE = 1000
Refusal = tuple[int, str] | None


class SmallS3(ThreadingHTTPServer):
    """`refuse(operation, key)` answers with a status and an error code, or None to go on."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.asked: list[tuple[str, str]] = []
        self.refuse: Callable[[str, str], Refusal] = lambda operation, key: None
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: SmallS3
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        key = self._key()
        if self._refused("PutObject", key):
            return
        with self.server.lock:
            there = key in self.server.objects
            if not (there and self.headers.get("if-none-match") == "*"):
                self.server.objects[key] = body
                there = False
        self._error(412, "PreconditionFailed") if there else self._say(200, b"")

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        if "list-type" in query:
            prefix = query.get("prefix", [""])[0]
            if not self._refused("ListObjectsV2", prefix):
                self._list(prefix, query.get("continuation-token", [""])[0])
            return
        key = self._key()
        if self._refused("GetObject", key):
            return
        found = self.server.objects.get(key)
        self._error(404, "NoSuchKey") if found is None else self._say(200, found)

    def _list(self, prefix: str, after: str) -> None:
        with self.server.lock:
            keys = sorted(key for key in self.server.objects if key.startswith(prefix) and key > after)
        page, more = keys[:PAGE], len(keys) > PAGE
        items = "".join(f"<Contents><Key>{escape(key)}</Key></Contents>" for key in page)
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        said = f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{items}"
        self._say(200, f"<ListBucketResult>{said}</ListBucketResult>".encode())

    def _key(self) -> str:
        return unquote(urlsplit(self.path).path).partition("/")[2].partition("/")[2]

    def _refused(self, operation: str, key: str) -> bool:
        self.server.asked.append((operation, key))
        refusal = self.server.refuse(operation, key)
        if refusal is not None:
            self._error(*refusal)
        return refusal is not None

    def _error(self, status: int, code: str) -> None:
        self._say(status, f"<Error><Code>{code}</Code><Message>said so</Message></Error>".encode())

    def _say(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def small_s3() -> Iterator[SmallS3]:
    with SmallS3() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(20)
