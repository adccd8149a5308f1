"""Groups, validation and whole runs under bad luck: restarts, shared gateways, wrong commands."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.orchestrator.test_groups import Run

from afield.cli.main import main
from afield.cli.train import save_config
from afield.errors import UsageError
from afield.orchestrator.groups import (
    GroupRunner,
    GroupScheduler,
    GroupSpec,
    Mode,
    Schedule,
    StalenessWindow,
    Validation,
    wait_for_own_weights,
)
from afield.orchestrator.state import RolloutStore, RunDirectory
from afield.ratelimit import RateLimits, SharedLimiter
from afield.sdk.agent import Context
from afield.settings.train import train_config
from afield.types import Attempt, Outcome, Policy, Rollout, RolloutResult, Sampling, Split, Task
from support.gateways import POLICY
from support.in_process_collection import collection, good
from support.processes import AGENTS, write_tasks

pytestmark = pytest.mark.anyio


def rollout(name: str) -> Rollout:
    return Rollout(id=name, exp_id="exp", group_id="g", task=Task("t0", {"n": 0}))


def outcome(name: str) -> Outcome:
    return Outcome(rollout_id=name, attempt=1, reward=1.0)


# --- a run on disk -------------------------------------------------------------------------------


def test_what_a_collector_has_collected_survives_a_wrong_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AFIELD_ADMIN_KEY", raising=False)
    write_tasks(tmp_path / "tasks.jsonl", [{"id": "q"}])
    made = ["train", f"{AGENTS / 'slow_agent.py'}:agent", "--tasks", "tasks.jsonl", "--model", str(POLICY)]
    made += ["--run", "one", "--gateway", "http://127.0.0.1:9"]
    assert main([*made, "--role", "collect"]) == 2  # no admin key
    run = RunDirectory(tmp_path / "runs" / "one")
    RolloutStore(run.rollout_store).put(
        RolloutResult(rollout=rollout("one-e0-q-r0"), outcome=outcome("one-e0-q-r0"))
    )
    assert main([*made]) == 2
    assert "AFIELD_ADMIN_KEY" in capsys.readouterr().err
    assert len(RolloutStore(run.rollout_store)) == 1


@pytest.mark.parametrize(
    ("more", "gone", "says"),
    [
        (("--runtime", "container"), None, "runtime container needs an image"),
        (("--runtime", "inline", "--set", "container.image=x"), None, "--set container.image has no effect"),
        (("--runtime", "kubernetes=IMAGE"), None, "agents on kubernetes cannot reach a gateway"),
        ((), "agent.py", "there is no file"),
        ((), "val.jsonl", "val.jsonl"),
    ],
)
def test_errors_of_a_resumed_run_are_reported_before_anything_starts(
    more: tuple[str, ...],
    gone: str | None,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDirectory(tmp_path / "runs" / "one")
    (tmp_path / "agent.py").write_text((AGENTS / "slow_agent.py").read_text())
    write_tasks(tmp_path / "val.jsonl", [{"id": "v"}])
    named = {"agent": f"{tmp_path / 'agent.py'}:agent", "val_tasks": str(tmp_path / "val.jsonl")}
    run.path.mkdir(parents=True)
    run.write_tasks([Task("q", {})])
    save_config(run, train_config(None, named, model=str(POLICY)))
    kept = run.config.read_bytes()
    if gone:
        (tmp_path / gone).unlink()
    assert main(["train", "--resume", "one", *more]) == 2
    assert says in capsys.readouterr().err
    assert run.config.read_bytes() == kept and not run.has_begun


# --- groups and validation -----------------------------------------------------------------------


async def test_a_group_whose_baseline_failed_is_dropped_with_a_reason(tmp_path: Path) -> None:
    async def agent(task: dict[str, Any], context: Context) -> float:
        if context.rollout_id.endswith("baseline"):
            raise OSError("no space left")
        return await good(task, context)

    spec = GroupSpec("exp-e0-t0", Task("t0", {"n": 0}), 0)
    async with collection(tmp_path, agent) as b, b.runner(baseline=True) as (plan, runner):
        ended = await GroupRunner(plan, runner, b.rollout_store).start_group(spec)
    assert ended.drop_reason and ended.drop_reason.startswith("its baseline carries no reward (task")


async def test_stragglers_of_a_validation_group_are_not_cancelled(tmp_path: Path) -> None:
    async def agent(task: dict[str, Any], context: Context) -> float:
        await asyncio.sleep(0.0 if context.rollout_id.endswith(("r0", "r1")) else 1.0)
        return 1.0

    limits: dict[str, Any] = {"extra": 1, "straggler_s": 0.1, "val_rollouts": 4}
    spec = GroupSpec("exp-val0-t0", Task("t0", {"n": 0}), 0, Split.VAL)
    async with collection(tmp_path, agent) as b, b.runner(**limits) as (plan, runner):
        (group,) = await GroupRunner(plan, runner, b.rollout_store).collect([spec])
    assert [f.outcome.reward for f in group.finished] == [1.0] * 4


async def test_a_validation_that_was_reported_is_not_done_again(tmp_path: Path) -> None:
    reports: list[int] = []

    def report(step: int, finished: list[RolloutResult]) -> None:
        reports.append(step)

    validation = Validation(
        tasks=[Task("v", {"n": 0})],
        every=1,
        sampling=Sampling(),
        report=report,
        reported=lambda step: step in reports,
    )
    window, schedule = StalenessWindow(mode="sync", groups=0, batch=1), Schedule([Task("t", {})], "exp")
    async with collection(tmp_path, good) as b:
        for _ in range(2):
            async with b.runner() as (plan, runner):
                collector = GroupRunner(plan, runner, b.rollout_store)
                parts = {
                    "group_runner": collector,
                    "run_state": b.run_state,
                    "rollout_store": b.rollout_store,
                }
                await GroupScheduler(window, schedule, validation=validation, **parts).run()
            left = RolloutResult(rollout=rollout("exp-val0-v-r0"), outcome=outcome("exp-val0-v-r0"))
            b.rollout_store.put(left)  # as a kill leaves it that came before everything was tidied up
        assert reports == [0]
        assert [f.rollout.id for f in b.seen.finished] == ["exp-val0-v-r0"]
        async with b.runner() as (plan, runner):
            parts = {
                "group_runner": GroupRunner(plan, runner, b.rollout_store),
                "run_state": b.run_state,
                "rollout_store": b.rollout_store,
            }
            await GroupScheduler(window, schedule, validation=validation, **parts).run()
        assert len(b.rollout_store) == 0


# --- a gateway that others use too ---------------------------------------------------------------


async def test_agents_never_begin_under_the_weights_of_another_run(tmp_path: Path) -> None:
    async with collection(tmp_path, good) as b:
        await wait_for_own_weights(
            b.run_state, b.up.client, frozen=False
        )  # a fresh gateway serves what runs begin with
        await b.up.client.publish(Policy("another", 7), "somewhere")
        waiting = asyncio.create_task(wait_for_own_weights(b.run_state, b.up.client, frozen=False))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        b.run_state.base_version = 8
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await b.up.client.publish(Policy("ours", 8), "somewhere")
        await asyncio.wait_for(waiting, 60)
        b.run_state.published_step = 3
        waiting = asyncio.create_task(wait_for_own_weights(b.run_state, b.up.client, frozen=False))
        await asyncio.sleep(0.3)
        assert not waiting.done()  # a gateway that has gone back to older weights
        await wait_for_own_weights(b.run_state, b.up.client, frozen=True)
        await b.up.client.publish(Policy("ours", 12), "somewhere")  # and has not noted it yet
        await asyncio.wait_for(waiting, 60)


async def test_a_run_continues_after_another_one_used_its_gateway(tmp_path: Path) -> None:
    async with collection(tmp_path, good) as b:
        run = Run(b, tmp_path / "run", "sync", groups=4)
        await run.both(rollouts=2)
        assert [line.version for line in run.lines] == [1, 2]
        await b.up.client.publish(Policy("another", 50), "somewhere")
        run.window = StalenessWindow(mode="sync", groups=8, batch=2)
        await run.both(rollouts=2)
        assert [line.version for line in run.lines] == [1, 2, 52, 53]
        assert await b.up.client.version() == 53
        assert not any(line.dropped_groups for line in run.lines[3:])


# --- runs that are made shorter, and names that are too long -------------------------------------


@pytest.mark.parametrize(("mode", "bound"), [("one-step-off", 1), ("async", 2)])
async def test_resumed_run_with_fewer_steps_launches_nothing_beyond_them(
    tmp_path: Path, mode: Mode, bound: int
) -> None:
    launched: set[str] = set()

    async def agent(task: dict[str, Any], context: Context) -> float:
        launched.add(context.rollout_id)
        return await good(task, context)

    async with collection(tmp_path, agent) as b:
        schedule = Schedule([Task(f"t{i}", {"n": 0}) for i in range(8)], "exp")
        for position in range(6):  # as a kill in the second step leaves it
            b.run_state.begin_group(schedule.group_spec(position).id, position, 0)
        b.run_state.published_step = 2
        async with b.runner() as (plan, runner):
            parts = {
                "group_runner": GroupRunner(plan, runner, b.rollout_store),
                "run_state": b.run_state,
                "rollout_store": b.rollout_store,
            }
            window = StalenessWindow(mode=mode, groups=4, batch=2, staleness=bound)
            await GroupScheduler(window, schedule, **parts).run()
    assert not launched


def test_a_name_too_long_for_its_rollouts_is_refused_at_the_start() -> None:
    with pytest.raises(UsageError, match="at most 64"):
        Schedule([Task("t", {})], "x" * 65)
    spec = Schedule([Task("t" * 40, {})], "x" * 64).group_spec(999_999)
    Attempt(f"{spec.id}-baseline", 99)


async def test_a_broken_limiter_file_frees_its_slot(tmp_path: Path) -> None:
    limiter = SharedLimiter(RateLimits(starting=1), tmp_path / "limiter.sqlite")
    async with limiter.launch_slot():
        pass
    with closing(sqlite3.connect(tmp_path / "limiter.sqlite", isolation_level=None)) as other:
        other.execute("ALTER TABLE controllers RENAME TO away")
        with pytest.raises(UsageError, match="limiter"):
            async with limiter.launch_slot():
                pass
        other.execute("ALTER TABLE away RENAME TO controllers")
    async with asyncio.timeout(60), limiter.launch_slot():
        pass
    limiter.close()
