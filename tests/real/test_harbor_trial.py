"""Harbor's own package runs terminus-2 on tasks through the gateway.

What is trained, what the engine served, and the `rollout_details` that Harbor collected are the same tokens.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from afield.batches.atif import read_atif, write_atif
from afield.client import RolloutClient
from afield.engines.recording import CallStatus, RecordedCall
from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.interfaces.engine import GenerateRequest
from afield.types import FailureKind, Group, Reason, RolloutResult, Split, TurnStatus
from support.gateways import ADMIN, running, vocabulary
from support.harbor_env import harbor_python

pytestmark = [pytest.mark.real, pytest.mark.anyio, pytest.mark.timeout(1800)]
VOCAB = vocabulary()
END = VOCAB.id_of("<|im_end|>") or 0
TOML = """\
schema_version = "1.4"
[agent]
timeout_sec = 170.0
[verifier]
timeout_sec = 60.0
"""
DOCKERFILE = "FROM ubuntu:24.04\nWORKDIR /app\nCOPY numbers.txt .\n"
TESTS = """\
if [ "$(cat /app/sum.txt)" = 10 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
SUMMARY = "You are about to hand off your work"
QUESTIONS = "You are picking up work from a previous"
ANSWERS = "The next agent has a few questions"
MUCH = "seq -s ' ' 1000 3000"
# In tokens as terminus-2 counts them: the first turns fit, the output of MUCH does not.
SMALL = {
    "model_info": {"max_input_tokens": 7000, "max_output_tokens": 2000},
    "proactive_summarization_threshold": 1000,
}
Triple = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]


def harbor_task(folder: Path) -> Path:
    for name in ("environment", "tests", "solution"):
        (folder / name).mkdir(parents=True)
    (folder / "task.toml").write_text(TOML)
    (folder / "instruction.md").write_text("Write the sum of the numbers in numbers.txt to sum.txt – 合計.\n")
    (folder / "environment" / "Dockerfile").write_text(
        "FROM ubuntu:24.04\nWORKDIR /app\nCOPY numbers.txt .\n"
    )
    (folder / "environment" / "numbers.txt").write_text("1\n2\n3\n4\n")
    (folder / "tests" / "test.sh").write_text(f"#!/bin/bash\n{TESTS}")
    (folder / "solution" / "solve.sh").write_text("echo 10 > sum.txt\n")
    return folder


def typed(text: str, *commands: str, complete: bool = False) -> str:
    keys = [{"keystrokes": f"{command}\n", "duration": 0.5} for command in commands]
    body = {"analysis": text, "plan": "Weiter ☂.", "commands": keys, "task_complete": complete}
    return json.dumps(body, ensure_ascii=False)


SOLVED = (
    typed("I look at the numbers.", "cat numbers.txt"),
    typed("The sum is 10.", "echo 10 > sum.txt"),
    typed("Done ✓", complete=True),
    typed("Yes, done.", complete=True),
)
LOOKS_FOR_TESTS = (
    typed("I look for the tests.", "ls -a / /tests /solution > sum.txt 2>&1; cat /tests/* /solution/*"),
    typed("I write a reward.", "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt"),
    typed("Done", complete=True),
    typed("Yes, done.", complete=True),
)
SUMMARISED = (typed("I look at the numbers.", "cat numbers.txt"), typed("Much to read.", MUCH), *SOLVED[1:])
ASIDES = {
    ANSWERS: "1. Go on with sum.txt.",
    SUMMARY: "* The numbers are 1 to 4.",
    QUESTIONS: "1. What is left?",
}


class Model:
    """Replies of each session in order; requests of the summary have replies of their own."""

    def __init__(
        self, replies: tuple[str, ...], fails: Callable[[str, int], bool] = lambda session, call: False
    ) -> None:
        self._replies = replies
        self._fails = fails
        self.given: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()

    def __call__(self, call: GenerateRequest) -> ScriptedReply:
        request = VOCAB.decode(call.prompt_ids).rpartition("<|im_start|>user")[2]
        aside = next((reply for text, reply in ASIDES.items() if text in request), None)
        if aside is not None:
            return self._reply(aside)
        number = self.given[call.session_id]
        if self._fails(call.session_id, number) and not self.failed[call.session_id]:
            self.failed[call.session_id] += 1
            return ScriptedReply(fail="unavailable")
        if self._fails(call.session_id, -1):
            return ScriptedReply(fail="unavailable")
        self.given[call.session_id] += 1
        return self._reply(self._replies[number])

    def _reply(self, text: str) -> ScriptedReply:
        return ScriptedReply(token_ids=(*VOCAB.encode(text), END))


@asynccontextmanager
async def process(log: Path, *words: str) -> AsyncIterator[str]:
    """A module in an interpreter that has harbor; yields the first line that it prints."""
    python = await asyncio.to_thread(harbor_python)
    with log.open("wb") as output:
        started = await asyncio.create_subprocess_exec(
            *(str(python), "-m", *words),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=output,
            cwd=log.parent,
        )
    try:
        assert started.stdout is not None
        line = await asyncio.wait_for(started.stdout.readline(), 120)
        assert line, f"{words} does not start; see {log}"
        yield line.decode().strip()
    finally:
        started.terminate()
        await started.communicate()


async def collect(
    tmp_path: Path, model: Model, rollouts: int = 1, args: dict[str, Any] | None = None, **kwargs: Any
) -> tuple[list[RolloutResult], list[RecordedCall]]:
    """Rollouts with trials in the agent's process, and the calls that the engine completed."""
    root = ("--outcome-root", str(tmp_path))
    command = ("afield.sdk.serve", "afield.harbor.trial:trial", "--watch-stdin", *root)
    options = {"trials": str(tmp_path / "trials"), "kwargs": kwargs, **(args or {})}
    async with process(tmp_path / "agent.log", *command) as port:
        return await run(tmp_path, model, rollouts, options, runtime=f"served=http://127.0.0.1:{port}")


async def run(
    tmp_path: Path, model: Model, rollouts: int, args: dict[str, Any], **options: Any
) -> tuple[list[RolloutResult], list[RecordedCall]]:
    harbor_task(tmp_path / "tasks" / "sum")
    engine = ScriptedEngine(model, max_context=65536)
    row = {"id": "sum", "instruction": "Add."}
    async with running(engine, tmp_path / "gateway") as up:

        def run_group() -> list[RolloutResult]:
            with RolloutClient.open(
                gateway=up.url,
                admin_key=ADMIN,
                directory=tmp_path / "run",
                exp_id="exp",
                model_id="m",
                agent_args={"tasks": str(tmp_path / "tasks"), **args},
                attempt_timeout_s=170.0,
                **options,
            ) as client:
                [group] = client.run_groups([row], rollouts=rollouts)
                return list(group.finished)

        results = await asyncio.to_thread(run_group)
    return results, [call for call in engine.recorded if call.served is CallStatus.COMPLETE]


def ledger(calls: list[RecordedCall], session: str) -> Counter[Triple]:
    return Counter((c.prompt_ids, c.token_ids, c.logprobs) for c in calls if c.session_id == session)


def recorded(result: RolloutResult) -> Counter[Triple]:
    """Prompts and replies of all complete turns of a rollout."""
    by_id = {turn.id: turn for turn in result.turns}
    triples: Counter[Triple] = Counter()
    for turn in result.turns:
        if turn.status is not TurnStatus.COMMITTED:
            continue
        prompt, above = turn.delta_ids, turn.parent
        while above is not None:
            prompt = by_id[above].delta_ids + by_id[above].token_ids + prompt
            above = by_id[above].parent
        triples[(prompt, turn.token_ids, turn.logprobs)] += 1
    return triples


def trained(result: RolloutResult) -> Counter[Triple]:
    """Prompts and replies that the training sequences have."""
    return Counter(
        (row.token_ids[: t.start], row.token_ids[t.start : t.end], row.logprobs[t.start : t.end])
        for row in result.trajectories
        for t in row.turns
    )


def collected_by_harbor(trial: Path) -> Counter[Triple]:
    """Prompts and replies in the `rollout_details` of a trial."""
    result = json.loads((trial / "result.json").read_text())
    triples: Counter[Triple] = Counter()
    for detail in result["agent_result"]["rollout_details"]:
        columns = (detail["prompt_token_ids"], detail["completion_token_ids"], detail["logprobs"])
        for prompt, tokens, logprobs in zip(*columns, strict=True):
            triples[(tuple(prompt), tuple(tokens), tuple(logprobs))] += 1
    return triples


def assert_same_tokens(result: RolloutResult, calls: list[RecordedCall], trials: Path) -> None:
    session = result.outcome.session_id
    served = ledger(calls, session)
    assert served
    assert recorded(result) == served
    assert trained(result) == served
    assert collected_by_harbor(trials / session) == served


async def test_trained_tokens_are_those_of_engine_and_harbor(tmp_path: Path) -> None:
    """Two rollouts of four turns; in one, a call fails and is repeated."""
    model = Model(SOLVED, fails=lambda session, call: session.endswith("0.1") and call == 1)
    results, calls = await collect(tmp_path, model, rollouts=2)
    assert [r.outcome.reward for r in results] == [1.0, 1.0], [r.outcome.failure for r in results]
    for result in results:
        assert len(recorded(result)) == 4
        assert len(result.trajectories) == 1
        assert_same_tokens(result, calls, tmp_path / "trials")
    assert sum(model.failed.values()) == 1
    check_atif(tmp_path, results)


def check_atif(tmp_path: Path, results: list[RolloutResult]) -> None:
    """Harbor accepts our ATIF files, and its own give the same training sequences."""
    first = results[0].rollout
    group = Group(
        id=first.group_id, task_id=first.task.id, epoch=0, split=Split.TRAIN, finished=tuple(results)
    )
    write_atif(tmp_path / "atif", [group], agent="terminus-2", version="0.24.0", model="m")
    files = sorted((tmp_path / "atif").iterdir())
    assert len(files) == len(results)
    for file in files:
        command = [str(harbor_python()), "-m", "harbor.utils.trajectory_validator", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
    harbors = read_atif(tmp_path / "trials")
    assert harbors.left_out == ()
    assert [record.score for record in harbors.batch.rollouts] == [1.0] * len(results)
    ours = Counter((row.token_ids, row.loss_mask, row.logprobs) for r in results for row in r.trajectories)
    theirs = Counter((r.token_ids, r.trajectory.loss_mask, r.trajectory.logprobs) for r in harbors.batch.rows)
    assert theirs == ours


@pytest.mark.long
async def test_summaries_are_trained_and_equal(tmp_path: Path) -> None:
    """Terminus-2 hands over to itself: three calls of the summary, then a new conversation."""
    [result], calls = await collect(tmp_path, Model(SUMMARISED), **SMALL)
    assert result.outcome.reward == 1.0, result.outcome.failure
    assert len(result.trajectories) == 3
    assert_same_tokens(result, calls, tmp_path / "trials")
    trial = json.loads((tmp_path / "trials" / result.outcome.session_id / "result.json").read_text())
    assert trial["agent_result"]["metadata"]["summarization_count"] == 1
    assert len(calls) == len(SUMMARISED) + 3
    harbors = read_atif(tmp_path / "trials")
    assert sum(row.owned for row in harbors.batch.rows) == sum(t.owned for t in result.trajectories)


@pytest.mark.long
async def test_server_runs_rollouts_with_the_same_tokens(tmp_path: Path) -> None:
    """The reference server runs the trials; the client uploads the task once and polls."""
    state = ("--directory", str(tmp_path / "state"), "--port", "0")
    async with process(tmp_path / "server.log", "afield.harbor.server", *state) as url:
        args = {"url": url, "poll_interval_s": 0.2}
        agent = "afield.harbor.server_client:run"
        results, calls = await run(tmp_path, Model(SOLVED), 2, args, agent=agent, runtime="process")
    assert [r.outcome.reward for r in results] == [1.0, 1.0], [r.outcome.failure for r in results]
    assert len(list((tmp_path / "state" / "tasks").iterdir())) == 1
    for result in results:
        assert_same_tokens(result, calls, tmp_path / "state" / "trials")


@pytest.mark.long
async def test_attempt_without_a_model_is_retried(tmp_path: Path) -> None:
    model = Model(SOLVED, fails=lambda session, call: session.endswith(".1") and call == -1)
    [result], calls = await collect(tmp_path, model)
    assert (result.attempts, result.outcome.reward) == (2, 1.0), result.outcome.failure
    assert_same_tokens(result, calls, tmp_path / "trials")
    first = json.loads((tmp_path / "trials" / f"{result.rollout.id}.1" / "result.json").read_text())
    assert first["exception_info"]["exception_type"] in ("InternalServerError", "ServiceUnavailableError")
    assert first["verifier_result"] is None


@pytest.mark.long
async def test_agent_finds_no_tests_and_cannot_write_its_reward(tmp_path: Path) -> None:
    [result], _ = await collect(tmp_path, Model(LOOKS_FOR_TESTS))
    assert result.outcome.reward == 0.0
    assert result.outcome.failure is None
    terminal = "".join(m.content for turn in result.turns for m in turn.messages if m.role == "user")
    assert "/tests" in terminal
    assert "reward.txt; fi" not in terminal
    assert "cannot access '/tests'" in terminal or "cat: '/tests/*'" in terminal


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"harnes": "terminus-2"}, "agent_args: Object contains unknown field `harnes`"),
        ({"tasks": "gone"}, "no directory"),
    ],
)
async def test_wrong_argument_is_a_task_failure(tmp_path: Path, args: dict[str, Any], message: str) -> None:
    [result], calls = await collect(tmp_path, Model(SOLVED), args=args)
    failure = result.outcome.failure
    assert failure is not None
    assert (failure.kind, failure.reason) == (FailureKind.TASK, Reason.LAUNCH)
    assert message in failure.message
    assert not calls
