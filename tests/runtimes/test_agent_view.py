"""What a sandboxed agent sees of a project in the documented layout: its own code and its task, no more."""

from __future__ import annotations

import json
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from afield.cli.main import main
from afield.errors import UsageError
from afield.gateway.store import GatewayStore
from afield.local_sandbox.imports import import_closure
from afield.local_sandbox.messages import Program
from afield.types import Attempt, Rollout, Task
from afield.wire import Submission, build_payload, invocation_for
from support.gateways import POLICY
from support.processes import afield, write_tasks
from support.sandboxes import fork_server, needs_bubblewrap, write_program

AGENT = """
import os

import afield
import helper


@afield.agent
def agent(task):
    here = os.path.dirname(os.path.abspath(__file__))
    seen = [os.path.join(at, name) for at, _, names in os.walk(here) for name in names]
    return {"seen": [os.path.relpath(path, here) for path in seen], "task": sorted(task), "said": helper.SAID}
"""
VERIFIER = """
import afield


@afield.agent
def grade(payload):
    told = payload["submission"]
    good = sorted(told["seen"]) == ["agent.py", "helper.py"] and told["said"] == 1
    good = good and told["task"] == ["id", "question"] and payload["hidden"] == {"answer": 42}
    return {"reward": float(good), "metrics": {"seen": len(told["seen"])}, "told": repr(told)}
"""


@pytest.fixture
def project() -> Iterator[Path]:
    """Its path is short, because of sockets in it."""
    folder = Path(tempfile.mkdtemp(prefix="project-"))
    write_program(folder, AGENT)
    write_program(folder, "SAID = 1\n", "helper.py")
    write_program(folder, VERIFIER, "verify.py")
    write_program(folder, "what the grader knows", "answers.txt")
    yield folder
    shutil.rmtree(folder)


@needs_bubblewrap
@pytest.mark.anyio
async def test_an_agent_in_the_documented_layout_sees_its_code_and_its_question(project: Path) -> None:
    async with GatewayStore(project / "gateway-store" / "gateway.sqlite"):
        pass
    tasks = write_tasks(project / "tasks.jsonl", [{"id": "q", "question": "?", "hidden": {"answer": 42}}])
    script = project / "script.jsonl"
    script.write_text(json.dumps({"match": "x", "text": "y"}) + "\n")
    words = ["train", "agent.py:agent", "--verifier", "verify.py:grade", "--tasks", tasks, "--model", POLICY]
    words += ["--engine", f"scripted={script}", "--freeze-weights", "--steps", 1, "--tasks-per-step", 1]
    words += ["--rollouts", 2, "--runtime", "sandbox", "--json", "--run", "r"]
    code, _, err = afield(project, *words)
    assert code == 0, err
    lines = (project / "runs/r/rollouts/step-0001.jsonl").read_text().splitlines()
    assert [json.loads(line)["outcome"]["reward"] for line in lines] == [1.0, 1.0], lines


def test_hidden_fields_go_to_the_verifier_alone() -> None:
    task = Task("t", {"question": "?", "hidden": {"answer": 42}})
    rollout = Rollout(id="r", exp_id="e", group_id="g", task=task)
    where = {"base_url": "http://g", "api_key": "k", "model_id": "m", "outcome_url": "http://g/outcome"}
    for role in ("agent", "judged"):
        payload = build_payload(task, invocation_for(rollout, Attempt("r", 1), role=role, **where))
        assert set(payload) == {"question", "_rollout"}
    verifier = invocation_for(rollout, Attempt("r", 1), role="verifier", **where)
    assert build_payload(task, verifier, Submission())["hidden"] == {"answer": 42}


def test_hidden_fields_without_a_verifier_are_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = write_tasks(project / "tasks.jsonl", [{"id": "q", "hidden": {"answer": 42}}])
    script = project / "script.jsonl"
    script.write_text(json.dumps({"match": "x", "text": "y"}) + "\n")
    words = ["train", "agent.py:agent", "--tasks", tasks, "--model", POLICY, "--engine", f"scripted={script}"]
    monkeypatch.chdir(project)
    assert main([*map(str, words), "--freeze-weights", "--steps", "1"]) == 2
    err = capsys.readouterr().err
    assert "'hidden'" in err and "--verifier" in err, err


def test_a_hidden_field_that_is_no_object_is_refused() -> None:
    with pytest.raises(ValueError, match="must be an object"):
        Task("t", {"hidden": "42"})


def test_the_closure_has_modules_imported_anywhere_and_nothing_else(tmp_path: Path) -> None:
    agent = write_program(
        tmp_path, "import one\ndef f():\n    from tools.deep import a\n    import json.tool\n"
    )
    write_program(tmp_path, "import two", "one.py")
    write_program(tmp_path, "", "two.py")
    write_program(tmp_path, "", "verify.py")
    write_program(tmp_path / "tools", "", "__init__.py")
    write_program(tmp_path / "tools", "from . import wide\nfrom ..outside import x", "deep.py")
    write_program(tmp_path / "data", "", "words.txt")
    closure = import_closure(agent)
    names = [Path(path).name for path in closure.files]
    assert sorted(names) == ["agent.py", "one.py", "tools", "two.py"]
    assert {"one", "two", "tools.deep", "tools.wide", "json.tool"} <= set(closure.modules)
    assert not any("outside" in name for name in closure.modules)


@needs_bubblewrap
@pytest.mark.anyio
async def test_an_agent_that_imports_its_verifier_is_refused(tmp_path: Path, project: Path) -> None:
    agent = write_program(project, "import verify\n", "peeking.py")
    program = Program(script=str(agent), port=0, hidden=(str(project / "verify.py"),))
    with pytest.raises(UsageError, match=r"imports the verifier verify\.py"):
        async with fork_server(tmp_path, program):
            pass


CONNECT = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])"


@needs_bubblewrap
@pytest.mark.anyio
async def test_stores_and_later_sockets_in_a_mounted_folder_are_out_of_reach(
    tmp_path: Path, project: Path
) -> None:
    async with GatewayStore(project / "gateway-store" / "gateway.sqlite"):
        pass
    program = Program(mounts=(str(project),), hidden=(str(project / "verify.py"),))
    async with fork_server(tmp_path, program) as server:
        sandbox = await server.start("s")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(project / "late.sock"))
            listener.listen()
            reached = await sandbox.exec(["python3", "-c", CONNECT, str(project / "late.sock")])
            assert "ConnectionRefusedError" in reached.stderr, reached
        shown = await sandbox.exec(["find", str(project), "-type", "f", "-size", "+0"])
        found = {str(Path(path).relative_to(project)) for path in shown.stdout.split()}
        assert found == {"agent.py", "helper.py", "answers.txt"}
        assert not (await sandbox.exec(["cat", str(project / "verify.py")])).stdout
