"""A hostile agent among honest ones: a whole run in sandboxes, as a user starts it, with every attack in it.

An attack has failed when the agent says so, when nothing outside has changed, and when a log tells of it.
That these can be seen at all is shown by the same attacks where nothing is kept apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from afield.engines.scripted import ScriptedEngine
from afield.errors import InfrastructureFailure
from afield.interfaces import SessionSpec
from afield.local_sandbox import cgroups
from afield.local_sandbox.cgroups import PREFIX
from afield.local_sandbox.messages import Program
from afield.runtimes import invocations
from afield.runtimes.sandbox import resolve_target
from afield.types import Attempt
from support.canaries import Canaries, watched
from support.gateways import POLICY, running
from support.paths import TESTS
from support.processes import afield, alive, command, summary, write_tasks
from support.sandboxes import all_command_lines, fork_server, leftover_groups, needs_bubblewrap, write_program

AGENTS = TESTS / "agents"
LIMITS = {"memory_mb": 128, "pids": 32, "disk_mb": 16, "files": 1024}
SAID = {
    "secrets": r"\[sandbox\] (ptrace|process_vm_readv) \(call \d+\) was denied",
    "network": r"\[sandbox\] 127\.0\.0\.1:PORT is not an allowed address",
    "connections": r"\[sandbox\] 512 concurrent connections are allowed; \d+ more were closed",
    "reward_file": r"\[sandbox\] '.*hostile\.py' cannot be written",
    "forks": r"\[sandbox\] limit pids reached",
    "memory": r"\[sandbox\] out of memory",
    "memory_of_its_own": r"\[sandbox\] out of memory",
    "disk": r"\[sandbox\] limit disk_mb reached",
    "noise": r"bytes left out",
    "outside": r"\[sandbox\] '/etc/cron\.d/x' cannot be written",
    "kernel": r"\[sandbox\] mount \(call \d+\) was denied",
    "signals": r"\[sandbox\] signal 19 for process \d+: no such process in the sandbox",
    "outlive": r"\[sandbox\] killed 3 (other )?process\(es\)",
}
SAID_BY_GATEWAY = [
    ("gateway", r"GET /sessions/SESSION/turns: 401"),
    ("gateway", r"POST /s/other\.1/v1/chat/completions: 401"),
    ("gateway", r"POST /s/SESSION/v1/chat/completions: 413"),
    ("rewards", r"session SESSION: reward by the agent refused reward=9\.0"),
    ("rewards", r"POST /s/SESSION/outcome: 409 session SESSION already has another outcome"),
]
# Without control groups nobody counts what sockets and files in memory hold, or tells of a fork too many.
LIMITED = cgroups.find_groups().kinds
for kind, names in {"memory": ["memory", "memory_of_its_own"], "pids": ["forks"]}.items():
    if kind not in LIMITED:
        SAID = {attack: said for attack, said in SAID.items() if attack not in names}
ATTACKS = [*SAID, "gateway", "rewards"]


class Run:
    """What `afield train` made of these attacks, in the agents' own folder. Everything about it is kept."""

    def __init__(self, canaries: Canaries, attacks: list[str], *more: object) -> None:
        folder = canaries.folder / "agent"
        for path in AGENTS.glob("hostile*.py"):
            shutil.copy(path, folder)
        script = canaries.folder / "script.jsonl"
        script.write_text(json.dumps({"match": "honest", "text": "Yes."}) + "\n")
        rows = [{"id": attack, "attack": attack, **canaries.row(), **LIMITS} for attack in ("none", *attacks)]
        tasks = write_tasks(canaries.folder / "tasks.jsonl", rows)
        words = [
            "train",
            "hostile.py:agent",
            "--verifier",
            "hostile.py:grade",
            "--tasks",
            tasks,
            "--run",
            "r",
        ]
        words += ["--model", POLICY, "--engine", f"scripted={script}", "--freeze-weights", "--json"]
        words += ["--steps", 1, "--tasks-per-step", len(rows), "--rollouts", 2]
        words += ["--set", "retries_infrastructure=0", "--set", "retries_task=0", *more]
        env = os.environ | {"AFIELD_ADMIN_KEY": canaries.secret, "AWS_SECRET_ACCESS_KEY": canaries.secret}
        pipe = subprocess.PIPE
        process = subprocess.Popen(command(*words), cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True)
        canaries.watch(process.pid)
        self.out, self.err = process.communicate(timeout=700)
        self.code, self.pid = process.returncode, process.pid
        self.path = folder / "runs" / "r"
        self.gateway_log = (self.path / "logs" / "gateway.log").read_text()

    def outcomes(self, attack: str) -> list[dict[str, Any]]:
        text = (self.path / "rollouts" / "step-0001.jsonl").read_text()
        found = [json.loads(line) for line in text.splitlines()]
        return [r["outcome"] for r in found if r["rollout"]["task"]["id"] == attack]

    def loot(self, attack: str) -> list[list[str]]:
        """What the agents handed in, as their verifiers saw it."""
        paths = [*(self.path / "outcomes").rglob(f"*-{attack}-*.json")]
        records = [json.loads(path.read_text()) for path in paths]
        return [r["payload"]["submission"]["got"] for r in records if r.get("payload")]

    def logs(self, attack: str) -> dict[str, str]:
        found = sorted((self.path / "logs").glob(f"*-{attack}-*.log"))
        return {path.stem: path.read_text(errors="replace") for path in found}


@pytest.fixture(scope="module")
def canaries() -> Iterator[Canaries]:
    with watched() as made:
        yield made


@pytest.fixture(scope="module")
def run(canaries: Canaries) -> Run:
    limits = [word for name, value in LIMITS.items() for word in ("--set", f"sandbox.limits.{name}={value}")]
    return Run(canaries, ATTACKS, "--runtime", "sandbox", *limits)


# --- all of them in one run ----------------------------------------------------------------------


@needs_bubblewrap
@pytest.mark.timeout(800)
def test_a_run_with_hostile_agents_continues_and_honest_ones_get_their_rewards(run: Run) -> None:
    assert run.code == 0, run.err
    assert [outcome["reward"] for outcome in run.outcomes("none")] == [1.0, 1.0]
    told = summary(run.out)
    assert told["rollouts"] == 2 * (len(ATTACKS) + 1)
    assert told["failed"] == 2 * ("memory_of_its_own" in ATTACKS)


@needs_bubblewrap
@pytest.mark.parametrize("attack", [attack for attack in ATTACKS if attack != "memory_of_its_own"])
def test_an_attack_gets_nothing(run: Run, attack: str) -> None:
    assert run.loot(attack) == [[], []], run.loot(attack)
    assert [outcome["reward"] for outcome in run.outcomes(attack)] == [0.0, 0.0]


@needs_bubblewrap
@pytest.mark.skipif("memory" not in LIMITED, reason="no control group for memory can be made here")
def test_agent_that_exhausts_memory_is_an_infrastructure_failure_without_reward(run: Run) -> None:
    for outcome in run.outcomes("memory_of_its_own"):
        assert outcome["reward"] is None
        assert outcome["failure"]["kind"] == "infrastructure"
        assert "out of memory: limit memory_mb reached" in outcome["failure"]["message"]


@needs_bubblewrap
@pytest.mark.parametrize("attack", SAID)
def test_an_attack_is_reported_in_the_log_of_its_session(run: Run, canaries: Canaries, attack: str) -> None:
    if attack == "outlive" and "pids" not in LIMITED:
        pytest.skip("who is killed from outside is counted in control groups only")
    logs = run.logs(attack)
    assert len(logs) == 2
    for log in logs.values():
        assert re.search(SAID[attack].replace("PORT", str(canaries.port)), log), log[-3000:]
        assert len(log) < 1_200_000


@needs_bubblewrap
@pytest.mark.parametrize(("attack", "said"), SAID_BY_GATEWAY)
def test_an_attack_on_the_gateway_is_reported_in_its_log(run: Run, attack: str, said: str) -> None:
    for session in run.logs(attack):
        assert re.search(said.replace("SESSION", re.escape(session)), run.gateway_log), said
    assert max(map(len, run.gateway_log.splitlines())) < 2000


@needs_bubblewrap
def test_nothing_outside_was_reached_or_changed(run: Run, canaries: Canaries) -> None:
    assert canaries.harm() == []
    assert not list(canaries.folder.glob("reward.json"))
    assert sorted(path.name for path in (canaries.folder / "agent").iterdir()) == [
        *("canary.sock", "hostile.py", "hostile_machine.py", "runs"),
    ]
    for path in [*run.path.rglob("*.log"), *(run.path / "outcomes").rglob("*.json")]:
        assert canaries.secret not in path.read_text(errors="replace"), path


def left_of(pid: int) -> list[object]:
    """Control groups and folders that a controller's supervisor created."""
    return [*leftover_groups(pid), *Path(tempfile.gettempdir()).glob(f"{PREFIX}{pid}-*")]


@needs_bubblewrap
def test_nothing_is_left_behind(run: Run, canaries: Canaries) -> None:
    assert canaries.seen, "the daemons were never there, so their end proves nothing"
    assert [pid for pid in canaries.born if alive(pid)] == []
    assert not any(canaries.mark.encode() in line for line in all_command_lines())
    ours = (run.pid, *canaries.born)
    deadline = time.monotonic() + 60  # a supervisor cleans up after its controller has ended
    while any(map(left_of, ours)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [left for pid in ours for left in left_of(pid)] == []
    assert str(canaries.folder) not in Path("/proc/self/mountinfo").read_text()


# --- that these checks can fail ------------------------------------------------------------------


@pytest.mark.timeout(800)
def test_without_isolation_the_same_attacks_succeed() -> None:
    attacks = ["secrets", "network", "outside", "signals", "forks", "disk", "reward_file"]
    with watched() as canaries:
        run = Run(canaries, attacks, "--runtime", "process", "--verifier-runtime", "process")
        assert run.code == 0, run.err
        for attack in attacks:
            assert all(run.loot(attack)), attack
        assert any("secret in /proc/PID/environ" in loot for loot in run.loot("secrets"))
        assert all("tcp to 127.0.0.1" in loot and "udp to 127.0.0.1" in loot for loot in run.loot("network"))
        assert all(f"unix socket {address}" in run.loot("network")[0] for address in canaries.sockets)
        assert {outcome["reward"] for outcome in run.outcomes("reward_file")} == {9.0}
        harm = " ".join(canaries.harm())
        assert "the file" in harm and "the victim" in harm and "somebody" in harm


# --- what got through once -------------------------------------------------------------------------


SHORT = """
import http.client
for n in range(700):
    link = http.client.HTTPConnection("127.0.0.1", PORT, timeout=30)
    link.request("GET", "/", headers={"Connection": "close"})
    assert link.getresponse().read() == b"ok"
    link.close()
print("all answered")
"""


async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
    await writer.drain()
    writer.close()


@needs_bubblewrap
@pytest.mark.anyio
async def test_connections_that_have_ended_do_not_count(tmp_path: Path) -> None:
    async with await asyncio.start_server(answered, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        script = write_program(tmp_path / "program", SHORT.replace("PORT", str(port)))
        async with fork_server(tmp_path, Program(script=str(script), port=0)) as server:
            sandbox = await server.start("s", allow=[("127.0.0.1", port)])
            ended = await sandbox.ended()
            assert ended.clean, ended
            assert ended.log == "all answered"


async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 500 No\r\nConnection: close\r\n\r\n")
    with contextlib.suppress(ConnectionError):
        for _ in range(64):
            writer.write(b"x" * 2**20)
            await writer.drain()
    writer.close()


@pytest.mark.anyio
async def test_an_endless_answer_of_an_agent_is_cut() -> None:
    tracemalloc.start()
    try:
        async with (
            await asyncio.start_server(endless, "127.0.0.1", 0) as server,
            aiohttp.ClientSession() as http,
        ):
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            with pytest.raises(InfrastructureFailure, match=r"refused the payload of r\.1 with 500"):
                await invocations.post(http, url, Attempt("r", 1), {})
        assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
    finally:
        tracemalloc.stop()


@needs_bubblewrap
@pytest.mark.anyio
async def test_runs_are_hidden_wherever_they_would_be_visible(tmp_path: Path) -> None:
    """Not only in the agent's own folder: a mount, or a project that is on Python's path, may hold them."""
    source = "import afield\n\n@afield.agent\ndef agent(task):\n    return 1.0\n"
    target = write_program(tmp_path / "project" / "agents", source)
    for name in ("runs/other/gateway/secret", "runs/mine/gateway/secret", "runs/mine/run.json", "data"):
        write_program(tmp_path / "project" / Path(name).parent, "what a pity", Path(name).name)
    project = tmp_path / "project"
    logs = project / "runs" / "mine" / "verifiers" / "logs"
    logs.mkdir(parents=True)
    _, hidden = resolve_target(f"{target}:agent", logs)
    program = Program(mounts=(str(project),), hidden=hidden)
    async with fork_server(tmp_path, program) as server:
        sandbox = await server.start("s")
        shown = await sandbox.exec(["find", str(project), "-type", "f"])
        assert sorted(shown.stdout.split()) == [str(target), str(project / "data")]


STEERING = """
import afield


@afield.agent
def agent(task):
    raise RuntimeError("wrong \\x1b]2;title\\x07\\x1b[2J\\x9b31m colour\\x00")
"""


def test_what_an_agent_says_does_not_steer_the_terminal(tmp_path: Path) -> None:
    script = write_program(tmp_path, '{"match": "x", "text": "y"}\n', "script.jsonl")
    tasks = write_tasks(tmp_path / "tasks.jsonl", [{}])
    words = [
        "train",
        f"{write_program(tmp_path / 'agent', STEERING)}:agent",
        "--tasks",
        tasks,
        "--model",
        POLICY,
    ]
    words += ["--engine", f"scripted={script}", "--freeze-weights", "--steps", 1, "--tasks-per-step", 1]
    code, out, err = afield(tmp_path, *words, "--rollouts", 2, "--json", "--set", "retries_task=0")
    assert code == 1 and "RuntimeError: wrong" in err, err
    assert all(c.isprintable() or c == "\n" for c in out + err)


@pytest.mark.anyio
async def test_tools_that_cannot_fit_are_refused_without_counting_their_tokens(tmp_path: Path) -> None:
    """Counting twenty million of them took the gateway gigabytes, and seconds in which it served nobody."""
    function = {"name": "f", "description": "d " * 2**18, "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}]
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": tools}
    async with running(ScriptedEngine([]), tmp_path) as up:
        ticket = await up.client.open(SessionSpec(id="s.1"))
        status, answer = await up.ask("POST", "/s/s.1/v1/chat/completions", body, ticket.api_key)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    told = int(re.findall(r"the request has (\d+)", answer["error"]["message"])[0])
    assert told < 2**15
