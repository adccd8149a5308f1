"""Run directories for tests and benchmarks of the UI, written by the code that writes real ones.

`python -m bench.ui.runs DIR [--rollouts N] [--tokens N]` writes four runs: many rollouts, a rollout of many
tokens, hostile strings, and a run of veRL's manager.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from msgspec.structs import replace

from afield.orchestrator.config import RolloutConfig
from afield.orchestrator.state import RolloutStore, RunDirectory, RunInfo
from afield.trajectories import linear
from afield.turn_tree import TurnTree
from afield.types import (
    Budget,
    Exclusion,
    Failure,
    FailureKind,
    FinishReason,
    Link,
    Message,
    Outcome,
    Reason,
    RefusedCalls,
    Rollout,
    RolloutResult,
    RolloutTimes,
    Sampling,
    Split,
    Task,
    ToolCall,
    Turn,
    TurnStatus,
    VersionSpan,
)

BEGAN = 1_790_000_000.0
"""Wall-clock time at which the runs begin, in seconds."""
VOCABULARY = 600
WAIT_S = 60.0
SAMPLING = Sampling(max_tokens=64)
FAILURES = (
    Failure(FailureKind.POLICY, Reason.BUDGET, "the session's budget of 8 calls is spent"),
    Failure(
        FailureKind.TASK, Reason.RAISED, "KeyError: 'price'", 'Traceback:\n  File "agent.py"\nKeyError\n'
    ),
    Failure(FailureKind.VERIFIER, Reason.TIMEOUT, "the verifier took more than 60 s"),
    Failure(FailureKind.INFRASTRUCTURE, Reason.DIED, "the agent's process ended with signal 9"),
)
SCRIPT = "fetch('/hacked'); globalThis.hacked = 1"
HOSTILE = (
    f"<script>{SCRIPT}</script>",
    f'<img src=x onerror="{SCRIPT}">',
    f"</script><script>{SCRIPT}</script><!--",
    f"javascript:{SCRIPT}//",
    f'"\'><svg onload="{SCRIPT}">',
    "${globalThis.hacked = 1} {{constructor.constructor('globalThis.hacked = 1')()}}",
    "<style>body{display:none}</style><base href=//evil.example/>"
    "<iframe srcdoc='<script>top.hacked=1</script>'>",
    "\x1b]0;title\x07\x00\u202eRTL\u2028 line \ufffd \U0001f600" + "a" * 300,
)


def turn(
    n: int, parent: int | None, prompt: int, sampled: int, at: float, texts: tuple[str, str], **fields: Any
) -> Turn:
    """A turn whose token ids follow from its number, so that equal turns have equal tokens."""
    dice = random.Random(f"{n} {texts[1]}")
    low = fields.pop("version", 0)
    call = fields.pop("call", None)
    calls = (ToolCall(id=f"call_{n}", name=call[0], arguments=call[1]),) if call else ()
    role = "user" if parent is None else "tool"
    return Turn(
        id=f"t{n}",
        root="root",
        parent=f"t{parent}" if parent else None,
        delta_ids=tuple((k * 7 + n) % VOCABULARY for k in range(prompt)),
        token_ids=tuple(int(dice.random() * VOCABULARY) for _ in range(sampled)),
        logprobs=tuple(-(dice.random() ** 4) * 6 for _ in range(sampled)),
        versions=(VersionSpan(0, sampled, low, low),) if sampled else (),
        finish_reason=fields.pop("finish_reason", FinishReason.STOP),
        status=fields.pop("status", TurnStatus.COMMITTED),
        sampling=SAMPLING,
        tier="full" if parent is None else "append",
        dialect="chat",
        messages=(
            Message(role=role, content=texts[0], tool_call_id=f"call_{parent}" if parent else ""),
            Message(role="assistant", content=texts[1], tool_calls=calls),
        ),
        started=at,
        first_token=at + 0.1,
        ended=at + 0.2 + sampled / 200,
        **fields,
    )


def result(rollout: Rollout, turns: list[Turn], **fields: Any) -> RolloutResult:
    """A finished rollout with trajectories and exclusions of its turns."""
    reasons: dict[str, str] = fields.pop("reasons", {})
    assembled = linear(TurnTree(turns), reasons)
    return RolloutResult(
        rollout=rollout,
        trajectories=assembled.trajectories,
        excluded=tuple(Exclusion(e.turn, e.tokens, e.reason) for e in assembled.excluded),
        turns=tuple(turns),
        **fields,
    )


def times(at: float, ended: float) -> RolloutTimes:
    return RolloutTimes(
        submitted=at,
        started=at + 0.05,
        attempted=at + 0.05,
        launched=at + 0.3,
        outcome=ended,
        ended=ended + 0.02,
    )


def small_rollouts(
    step: int, group: str, size: int, dice: random.Random, began: float = BEGAN
) -> list[RolloutResult]:
    """A group of rollouts with tool calls, a retried turn, a sub-agent, failures and refused calls."""
    question = f"How much is item {dice.randrange(1000)} of shop {group}?"
    rollouts: list[RolloutResult] = []
    for k in range(size):
        rollout_id = f"{group}-r{k}"
        at = began + step * 20 + dice.random() * 8
        answer = f"It costs {dice.randrange(3)}."
        turns = [
            turn(
                1,
                None,
                24,
                8,
                at + 0.5,
                (question, ""),
                version=step - 1,
                call=("get_price", '{"item": "mug"}'),
            ),
            turn(2, 1, 8, 6, at + 1.2, (str(dice.randrange(90)), answer), version=step - 1),
        ]
        reasons: dict[str, str] = {}
        if k % 5 == 1:
            links = (Link("retry", "t2"),)
            turns.append(turn(3, 1, 8, 5, at + 1.8, ("again", "It costs more."), version=step, links=links))
            turns.append(turn(4, 3, 6, 9, at + 2.2, ("sure?", "Yes."), version=step))
            reasons["t2"] = "abandoned"
        if k % 7 == 3:
            turns.append(turn(len(turns) + 1, None, 12, 4, at + 1.3, ("Title?", "Mugs"), version=step - 1))
            reasons[f"t{len(turns)}"] = "side:opencode/title"
        failure = FAILURES[(k + step) % 4] if (k * 31 + step * 7) % 11 == 0 else None
        reward = (
            None if failure and failure.kind is not FailureKind.POLICY else float(dice.random() < step / 20)
        )
        refused = (RefusedCalls("context_length_exceeded", 400, 2, "the prompt has 5000 tokens", at, at + 1),)
        rollouts.append(
            result(
                Rollout(
                    id=rollout_id, exp_id="bench", group_id=group, task=Task(group, {"question": question})
                ),
                turns,
                reasons=reasons,
                outcome=Outcome(rollout_id=rollout_id, attempt=1, reward=reward, failure=failure),
                times=times(at, at + 2 + dice.random() * 3),
                refused=refused if failure else (),
                advantage=None if reward is None else reward - step / 20,
            )
        )
    return rollouts


def metrics(step: int, rollouts: list[RolloutResult]) -> dict[str, Any]:
    rewards = [r for f in rollouts if (r := f.outcome.reward_or_floor(0.0)) is not None]
    excluded: dict[str, int] = {}
    for one in rollouts:
        for exclusion in one.excluded:
            excluded[exclusion.reason] = excluded.get(exclusion.reason, 0) + exclusion.tokens
    sampled = sum(len(t.token_ids) for f in rollouts for t in f.turns)
    trainer = {
        "entropy": 1.0 / step,
        "grad_norm": 0.1,
        "ratio_mean": 1.0,
        "sampler_trainer_logprob_diff_max": 3e-6,
        "sampler_trainer_logprob_diff_max.append": 3e-6,
        "sampler_trainer_logprob_diff_max.full": 1e-6,
    }
    return {
        "step": step,
        "version": step,
        "reward": math.fsum(rewards) / max(len(rewards), 1),
        "rollouts": len(rollouts),
        "trained": len(rewards),
        "failed": len(rollouts) - len(rewards),
        "failures": {},
        "retried": 0,
        "dropped_groups": {},
        "turns_per_rollout": 2.2,
        "tool_calls_per_rollout": 1.0,
        "sampled_tokens": sampled,
        "trained_tokens": sampled - sum(excluded.values()),
        "excluded_tokens": excluded,
        "excluded_share": 0.0,
        "untrained_tokens": {},
        "wasted_tokens": 0,
        "staleness": 1,
        "staleness_mean": 0.5,
        "collect_s": 12.0,
        "train_s": 3.0,
        "agent": {},
        "trainer": trainer,
    }


def begin(path: Path, **settings: Any) -> RunDirectory:
    run = RunDirectory(path)
    run.path.mkdir(parents=True, exist_ok=True)
    config = {"agent": "agent.py:agent", "model": "", "steps": 20, "mode": "async", "runtime": "process"}
    run.config.write_text(json.dumps({**config, **settings}))
    return run


def write_step(run: RunDirectory, step: int, rollouts: list[RolloutResult]) -> None:
    run.write_rollouts(step, rollouts)
    with (run.path / "events.jsonl").open("a") as file:
        for kind, at, seconds in (("trained", 14.0, 3.0), ("published", 17.0, 0.5)):
            line = {"t": BEGAN + step * 20 + at, "seconds": seconds, "kind": kind, "value": step}
            file.write(json.dumps(line) + "\n")
    run.append_metrics(metrics(step, rollouts))


def write_many(
    path: Path, rollouts: int, *, steps: int = 20, group_size: int = 16, **settings: Any
) -> RunDirectory:
    """A run of many small rollouts, a validation, and rollouts that wait for the next step."""
    run = begin(path, steps=steps, **settings)
    dice = random.Random(0)
    for step in range(1, steps + 1):
        groups = math.ceil(rollouts / steps / group_size)
        results = [r for g in range(groups) for r in small_rollouts(step, f"s{step}-g{g}", group_size, dice)]
        write_step(run, step, results)
    validated = small_rollouts(steps, "val-g0", 4, dice)
    val = [_replace_split(r) for r in validated]
    run.write_validation({"step": steps, "reward": 0.5, "rollouts": len(val)}, val)
    store = RolloutStore(run.rollout_store, index=run.index)
    for pending in small_rollouts(steps + 1, "pending-g0", 4, dice):
        store.put(pending)
    run.index.close()
    return run


def _replace_split(rollout: RolloutResult) -> RolloutResult:
    return replace(rollout, rollout=replace(rollout.rollout, split=Split.VAL), advantage=None)


def write_evaluation(path: Path, *, tasks: int = 4, attempts: int = 4, seed: int = 0) -> RunDirectory:
    """A run of `afield eval`: attempts without training steps."""
    run = RunDirectory(path)
    run.path.mkdir(parents=True, exist_ok=True)
    run.write_info(RunInfo(kind="eval", agent="agent.py:agent", attempts=attempts))
    dice = random.Random(seed)
    for task in range(tasks):
        rollouts = map(_replace_split, small_rollouts(10, f"task-{task}", attempts, dice))
        run.append_rollouts(None, rollouts)
    run.index.close()
    return run


class ReplayedFuture:
    """Future of a rollout that has ended."""

    def __init__(self, result: RolloutResult) -> None:
        self._result = result

    def finished(self) -> RolloutResult:
        return self._result

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        callback(self)


class ReplayedClient:
    """Rollout client for veRL's manager whose rollouts have ended when they begin."""

    config = RolloutConfig(exp_id="verl", model_id="policy")

    def __init__(self, run: RunDirectory) -> None:
        self.rundir = run
        self.step = 1
        self._dice = random.Random(0)

    def begin(self, rollout: Rollout) -> ReplayedFuture:
        size = int(rollout.id.rpartition("-")[2]) + 1
        began = time.time() - 20 * self.step - 12
        one = small_rollouts(self.step, rollout.group_id, size, self._dice, began)[-1]
        outcome = replace(one.outcome, rollout_id=rollout.id)
        return ReplayedFuture(replace(one, rollout=rollout, outcome=outcome, advantage=None))

    def close(self) -> None:
        self.rundir.index.close()


class DiscardingQueue:
    """TransferQueue that keeps only the status of each prompt."""

    def __init__(self) -> None:
        self.status: dict[str, str] = {}
        self._changed = threading.Condition()

    def put(self, entries: Sequence[Any], partition: str) -> None:
        pass

    def mark(self, uid: str, partition: str, status: str) -> None:
        with self._changed:
            self.status[uid] = status
            self._changed.notify_all()

    def wait(self, uids: Sequence[str]) -> None:
        """Wait until veRL could train on these prompts."""
        with self._changed:
            ended = self._changed.wait_for(
                lambda: all(self.status.get(uid) in ("finished", "failure") for uid in uids), WAIT_S
            )
        assert ended, self.status


def verl_batch(step: int, uids: Sequence[str], split: Split = Split.TRAIN) -> Any:
    """Prompts as veRL gives them to its manager."""
    from tensordict import NonTensorData, NonTensorStack, TensorDict

    tasks = [{"task_id": uid, "task": json.dumps({"question": f"What is {uid}?"})} for uid in uids]
    columns = {"uid": NonTensorStack(*uids), "extra_info": NonTensorStack(*tasks)}
    common = {"global_steps": NonTensorData(step), "validate": NonTensorData(split is Split.VAL)}
    return TensorDict({**columns, **common}, batch_size=[len(uids)])


def write_verl(path: Path, *, steps: int = 4, groups: int = 2, model: str = "") -> RunDirectory:
    """A run that veRL's manager wrote: synchronous steps, and a validation after the last one."""
    from afield.integrations.verl.clients import GatewayConnection
    from afield.integrations.verl.manager import Manager
    from afield.integrations.verl.settings import VerlRun, VerlSettings, VerlTrainer

    trainer = VerlTrainer(
        name="verl",
        folder=str(path),
        backend="afield",
        model=model,
        rollouts=8,
        val_rollouts=2,
        sampling=SAMPLING,
        val_sampling=SAMPLING,
        budget=Budget(),
        estimator="grpo",
        loss_agg_mode="token-mean",
        mode="sync",
        hybrid=True,
        refills=False,
    )
    run = RunDirectory(path)
    run.path.mkdir(parents=True, exist_ok=True)
    run.write_info(RunInfo(kind="verl", agent="agent.py:agent", model=model, attempts=8))
    client: Any = ReplayedClient(run)
    gateway = GatewayConnection("http://127.0.0.1:1", "key")
    queue = DiscardingQueue()
    settings = VerlRun(VerlSettings(agent="agent.py:agent"), trainer)
    manager = Manager(settings, client, cast(Any, queue), gateway)
    for step in range(1, steps + 1):
        client.step = step
        uids = [f"s{step}g{g}" for g in range(groups)]
        manager.generate_sequences(verl_batch(step, uids))
        queue.wait(uids)
    manager.generate_sequences(verl_batch(steps, ["val0", "val1"], Split.VAL))
    queue.wait(["val0", "val1"])
    manager.close()
    return run


def long_turns(tokens: int) -> Iterator[Turn]:
    """Turns of one conversation with this number of tokens, four fifths of them sampled."""
    turns = 40
    prompt = tokens // turns // 5
    for n in range(1, turns + 1):
        sampled = tokens // turns - prompt
        texts = ("result of the tool\n" * (prompt // 4), "thought and answer " * (sampled // 3))
        yield turn(
            n, n - 1 or None, prompt, sampled, BEGAN + 60 * n, texts, call=("run", '{"command": "make"}')
        )


def write_long(path: Path, tokens: int, **settings: Any) -> RunDirectory:
    """A run with one rollout of many tokens."""
    run = begin(path, steps=1, **settings)
    rollout = Rollout(
        id="long", exp_id="bench", group_id="long-g", task=Task("long", {"question": "Build it."})
    )
    outcome = Outcome(rollout_id="long", attempt=1, reward=1.0)
    turns = list(long_turns(tokens))
    done = result(rollout, turns, outcome=outcome, times=times(BEGAN, BEGAN + 2500), advantage=0.7)
    write_step(run, 1, [done])
    run.index.close()
    return run


def write_hostile(path: Path, **settings: Any) -> RunDirectory:
    """A run whose tasks, messages, tool calls, failures, metrics and settings are hostile strings."""
    run = begin(path, steps=1, agent=HOSTILE[1], mode=HOSTILE[0], runtime=HOSTILE[4], **settings)
    rollouts: list[RolloutResult] = []
    for k, text in enumerate(HOSTILE):
        rollout_id = f"hostile-r{k}"
        at = BEGAN + k
        turns = [
            turn(1, None, 20, 8, at, (text, text), call=(text[:200], json.dumps({"x": text})), tags=(text,)),
            turn(2, 1, 8, 6, at + 1, (text, text)),
        ]
        failure = Failure(FailureKind.TASK, Reason.RAISED, text, text) if k % 2 else None
        outcome = Outcome(
            rollout_id=rollout_id,
            attempt=1,
            reward=None if failure else 1.0,
            failure=failure,
            stop_reason=text,
            metrics={text: 1.0},
            rewards={} if failure else {text: 1.0},
        )
        rollouts.append(
            result(
                Rollout(
                    id=rollout_id,
                    exp_id="bench",
                    group_id="hostile-g",
                    task=Task(text, {"question": text, text: text}),
                ),
                turns,
                outcome=outcome,
                times=times(at, at + 4),
                refused=(RefusedCalls(text[:60], 400, 1, text, at, at + 1),),
            )
        )
    write_step(run, 1, rollouts)
    run.index.close()
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    args = parser.parse_args()
    write_many(args.directory / "many", args.rollouts)
    write_long(args.directory / "long", args.tokens)
    write_hostile(args.directory / "hostile")
    write_verl(args.directory / "verl")


if __name__ == "__main__":
    main()
