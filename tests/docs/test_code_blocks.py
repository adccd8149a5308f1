"""Code blocks of README and docs run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import types
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path

import pytest

from afield import Context, RolloutClient
from support.gateways import ADMIN, POLICY
from support.pages import DOCS, PAGES, README, blocks, names, page_name
from support.paths import ROOT
from support.processes import afield, finish, start, summary, unlearned

LIVE = [
    DOCS / "reference" / "http-api.md",
    DOCS / "how-to" / "clients.md",
]  # blocks that use one gateway in order
ELSEWHERE = [DOCS / "how-to" / "rollout-client.md"]  # tests/client/test_connect.py runs its blocks
RECIPES = [ROOT / "CONTRIBUTING.md"]  # test_recipes.py runs its blocks
ADDRESS = "http://127.0.0.1:8400"
PYTHON = [
    (page, code)
    for page in PAGES
    if page not in [*LIVE, *ELSEWHERE, *RECIPES]
    for code in blocks(page, "python")
    if ADDRESS not in code
]


@pytest.mark.parametrize(
    ("page", "code"), PYTHON, ids=[f"{page_name(page)}-{number}" for number, (page, _) in enumerate(PYTHON)]
)
def test_python_block_runs(page: Path, code: str) -> None:
    module = types.ModuleType("documented")
    module.__file__ = str(page)
    sys.modules["documented"] = module
    exec(compile(code, str(page), "exec"), module.__dict__)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a gateway with a scripted engine."""
    folder = tmp_path_factory.mktemp("gateway")
    arguments = ("--model", POLICY, "--port", 0, "--admin-key", ADMIN, "--json")
    process = start(folder, "gateway", *arguments, *unlearned(folder)[:2])
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        finish(process)


def run_with_gateway(gateway: str, words: list[str], code: str, folder: Path | None = None) -> str:
    environment = os.environ | {"AFIELD_ADMIN_KEY": ADMIN, "NO_PROXY": "127.0.0.1"}
    command = [*words, code.replace(ADDRESS, gateway)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def is_installed(code: str) -> bool:
    """Whether the package in the comment `# needs PACKAGE` is there; without the comment, True."""
    needs = re.match(r"# needs ([\w-]+)\n", code)
    return needs is None or any(d.metadata["Name"] == needs[1] for d in metadata.distributions())


@pytest.mark.parametrize("page", LIVE, ids=page_name)
def test_blocks_about_the_gateway_run_against_a_gateway(page: Path, gateway: str) -> None:
    code = [block for block in blocks(page, "python") if is_installed(block)]
    assert code
    run_with_gateway(gateway, [sys.executable, "-c"], "\n".join(code))
    for block in blocks(page, "sh"):
        assert '"error"' not in run_with_gateway(gateway, ["bash", "-ec"], block)


def test_readme_agent_gives_rollouts_to_the_readme_program(gateway: str, tmp_path: Path) -> None:
    agent, program = blocks(README, "python")
    rows = blocks(README, "json")[0]
    (tmp_path / "my_agent.py").write_text(agent)
    (tmp_path / "tasks.jsonl").write_text(rows)
    lines = run_with_gateway(gateway, [sys.executable, "-c"], program, tmp_path).splitlines()
    assert len(lines) == 8 * len(rows.splitlines())
    assert {line.split()[0] for line in lines} == {json.loads(row)["id"] for row in rows.splitlines()}
    assert all(int(line.split()[-1]) > 0 for line in lines)


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node.js on this machine")
def test_an_agent_in_another_language_gives_rollouts(gateway: str, tmp_path: Path) -> None:
    page = DOCS / "how-to" / "own-environment.md"
    (tmp_path / "agent.py").write_text(blocks(page, "python")[0])
    (tmp_path / "agent.mjs").write_text(blocks(page, "javascript")[0])
    names = {"gateway": gateway, "admin_key": ADMIN, "directory": tmp_path / "run", "workers": 1}
    with RolloutClient.open(agent=f"{tmp_path / 'agent.py'}:agent", **names) as client:
        finished = client.submit({"question": "Is it?", "answer": ""}).result(60)
    assert (finished.outcome.reward, len(finished.turns)) == (1.0, 1), finished.outcome.failure


class EmptyReply(BaseHTTPRequestHandler):
    """Model server whose message has no content, as when a model only calls tools."""

    def do_POST(self) -> None:
        message = {"role": "assistant", "content": None}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        reply = {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        body = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize("page", [README, DOCS / "how-to" / "agent.md", DOCS / "tutorial.md"], ids=page_name)
def test_a_message_without_content_is_a_wrong_answer(page: Path) -> None:
    code = next(block for block in blocks(page, "python") if "def agent(" in block)
    module = types.ModuleType("documented_agent")
    exec(compile(code, str(page), "exec"), module.__dict__)
    server = ThreadingHTTPServer(("127.0.0.1", 0), EmptyReply)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        ids = dict.fromkeys(("session_id", "rollout_id", "group_id", "input_id", "exp_id", "model_id"), "m")
        rollout = Context(base_url=url, openai_base_url=f"{url}/v1", api_key="k", attempt=1, **ids)
        task = {"question": "?", "answer": "yes", "shop": {}}
        assert module.__dict__["agent"](task, rollout) == 0.0
    finally:
        server.shutdown()
        serving.join(30)
        server.server_close()


def test_readme_commands_train_and_show_a_run(tmp_path: Path) -> None:
    (tmp_path / "my_agent.py").write_text(blocks(README, "python")[0])
    (tmp_path / "tasks.jsonl").write_text(blocks(README, "json")[0])
    demo, show, train = (line.partition("#")[0].split() for line in blocks(README, "console")[0].splitlines())
    assert demo == ["$", "make", "demo"]
    arguments = [str(POLICY) if word == "path/to/hf-model" else word for word in train[2:]]
    sizes = ("--steps", 1, "--tasks-per-step", 2, "--rollouts", 2, "--json", *unlearned(tmp_path))
    code, out, err = afield(tmp_path, *arguments, *sizes)
    assert code == 0, err
    assert summary(out)["rollouts"] == 4
    code, out, err = afield(tmp_path, *show[2:])
    assert code == 0, err


def test_inspect_template_prints_the_documented_lines() -> None:
    page = DOCS / "concepts" / "tokens.md"
    (block,) = [block for block in blocks(page, "console") if "afield inspect-template" in block]
    command, _, expected = block.partition("\n")
    code, out, err = afield(ROOT, *command.removeprefix("$ afield ").split())
    assert (code, out) == (0, expected), err


def test_gateway_page_lists_every_metric_and_no_other(gateway: str) -> None:
    request = urllib.request.Request(f"{gateway}/metrics", headers={"authorization": f"Bearer {ADMIN}"})
    with urllib.request.urlopen(request) as answer:
        served = re.findall(r"# TYPE (\w+)", answer.read().decode())
    assert set(names(DOCS / "how-to" / "gateway.md", "Metrics")) == set(served)


def test_the_page_on_trl_shows_lines_of_its_examples() -> None:
    scripts = (ROOT / "examples" / "trl").glob("*.py")
    known = {line.strip() for script in scripts for line in script.read_text().splitlines()}
    shown = [
        line.strip() for block in blocks(DOCS / "how-to" / "trl.md", "py") for line in block.splitlines()
    ]
    assert len(shown) > 10
    assert [line for line in shown if line not in known] == []
