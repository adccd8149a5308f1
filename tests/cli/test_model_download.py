"""Models named as on the Hugging Face hub, with a stand-in for the hub."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from support.gateways import POLICY

pytest.importorskip("huggingface_hub")
COMMIT = "c" * 40
FILES = {file.name: file.read_bytes() for file in POLICY.iterdir() if file.suffix in (".json", ".jinja")}
FILES |= {"model.safetensors": b"weights", "pytorch_model.bin": b"not wanted"}


class Hub(BaseHTTPRequestHandler):
    """Serves the repository acme/tiny."""

    def do_GET(self) -> None:
        self.reply(body=True)

    def do_HEAD(self) -> None:
        self.reply(body=False)

    def reply(self, *, body: bool) -> None:
        digests = {name: hashlib.sha1(data).hexdigest() for name, data in FILES.items()}
        headers, data, status = {}, b"{}", 200
        if "/tree/" in self.path:
            entries = [
                {"type": "file", "path": n, "size": len(d), "oid": digests[n]} for n, d in FILES.items()
            ]
            data = json.dumps(entries).encode()
        elif self.path.startswith("/api/models/acme/tiny"):
            siblings = [{"rfilename": name} for name in FILES]
            data = json.dumps({"id": "acme/tiny", "sha": COMMIT, "siblings": siblings}).encode()
        elif self.path.startswith("/acme/tiny/resolve/"):
            name = self.path.rpartition("/")[2]
            data, headers = FILES[name], {"ETag": f'"{digests[name]}"', "X-Repo-Commit": COMMIT}
        else:
            status, headers = 404, {"X-Error-Code": "RepoNotFound"}
        self.send_response(status)
        for header, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(header, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


SCRIPT = """
import sys
from afield.cli.main import main
for model in sys.argv[1:]:
    print(model, main(["inspect-template", model]), flush=True)
"""


def inspect(cwd: Path, *models: str, **environment: str) -> tuple[dict[str, str], str]:
    """Exit codes by model, and stderr, of a process: the hub's client reads its variables once."""
    variables = {**os.environ, "HF_HOME": str(cwd / "home"), "HF_HUB_DISABLE_TELEMETRY": "1", **environment}
    command = [sys.executable, "-c", SCRIPT, *models]
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, check=True)
    words = [line.split() for line in done.stdout.splitlines()]
    return {line[0]: line[1] for line in words if line and line[0] in models}, done.stderr


def test_a_model_of_the_hub_is_downloaded_once(tmp_path: Path, hub: str) -> None:
    (tmp_path / "models").mkdir()
    codes, err = inspect(tmp_path, "acme/tiny", "acme/tiny", "acme/other", "models/main", HF_ENDPOINT=hub)
    assert codes == {"acme/tiny": "0", "acme/other": "2", "models/main": "2"}, err
    assert err.count("downloading acme/tiny from the Hugging Face hub to acme/tiny") == 1
    found = {file.name for file in (tmp_path / "acme/tiny").iterdir() if file.is_file()}
    assert found == FILES.keys() - {"pytorch_model.bin"}
    assert "hf download acme/other --local-dir acme/other (acme/other cannot be downloaded: 404" in err
    assert "downloading models/main" not in err  # a misspelt path is not looked up
    assert [path.name for path in (tmp_path / "acme").iterdir()] == ["tiny"]


def test_without_a_network_the_command_of_the_download_is_named(tmp_path: Path) -> None:
    codes, err = inspect(tmp_path, "acme/tiny", HF_HUB_OFFLINE="1")
    assert codes == {"acme/tiny": "2"}
    assert "hf download acme/tiny --local-dir acme/tiny (acme/tiny cannot be downloaded: " in err
    assert not (tmp_path / "acme").exists()
