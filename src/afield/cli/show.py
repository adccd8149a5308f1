"""`afield show`: print a run, its rollouts, or one rollout's turns."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from afield.cli.report import account_of, chart, describe_tokens, me, summarise
from afield.cli.train import saved_config
from afield.errors import UsageError
from afield.orchestrator.state import RunDirectory, RunState, find_run
from afield.settings.environment import Environment
from afield.token_account import count_tokens, listed
from afield.types import FailureKind, RolloutResult, Turn


def add(commands: Any) -> None:
    command = commands.add_parser(
        "show", help="show a run or a rollout", description="Show a run, or the turns of one rollout."
    )
    command.add_argument(
        "name", nargs="?", default="latest", metavar="RUN", help="run id, path, or latest (default: latest)"
    )
    command.add_argument(
        "session", nargs="?", metavar="SESSION", help="rollout or session id; shows its turns"
    )
    command.add_argument("--rollouts", action="store_true", help="print one line per rollout")
    command.add_argument(
        "--tokens", action="store_true", help="print every sampled token with its log-probability"
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    run_path = find_run(Environment.read().runs, args.name)
    if args.session:
        show_rollout(run_path, args)
    elif args.rollouts:
        list_rollouts(run_path, as_json=args.json)
    else:
        show_run(run_path, args)
    return 0


def show_run(run: RunDirectory, args: argparse.Namespace) -> None:
    config = saved_config(run)
    lines = run.read_metrics()
    if args.json:
        summary = msgspec.to_builtins(summarise(run, config, wall_s=0.0))
        del summary["wall_s"]
        print(json.dumps({**summary, "metrics": lines}))
        return
    print(f"run      {run.path}\nagent    {config.agent}\nmodel    {config.model}")
    print(f"steps    {len(lines)} of {config.steps}")
    rewards = [line["reward"] for line in lines if line["reward"] is not None]
    if rewards:
        print("\n".join(chart(rewards, steps=config.steps)))
    for line in lines[-5:]:
        reward = "none" if line["reward"] is None else f"{line['reward']:.3f}"
        share = line.get("excluded_share", 0.0)
        print(
            f"step {line['step']:4d}  reward {reward}  rollouts {line['rollouts']}  failed {line['failed']}"
            f"  tokens {line['sampled_tokens']}  excluded {share:.1%}"
        )
    account = account_of(lines)
    print(f"tokens   {describe_tokens(account)}")
    if warning := account.warning():
        print(f"warning  {warning}")
    failures: Counter[str] = Counter()
    for line in lines:
        failures.update(line["failures"])
    counts = ", ".join(f"{kind} {count}" for kind, count in failures.items())
    print(f"failures {counts or 'none'}")
    for line in run.read_validation():
        reward = "none" if line["reward"] is None else f"{line['reward']:.3f}"
        print(f"validation after step {line['step']}: reward {reward} of {line['rollouts']} rollouts")
    if steps := run.steps():
        example = run.read_rollouts(steps[-1])[0].rollout.id
        print(f"turns of a rollout: {me()} show {run.id} {example}")


def list_rollouts(run: RunDirectory, *, as_json: bool) -> None:
    """Print one line per rollout, in the order of training steps."""
    for step in run.steps():
        for finished in run.read_rollouts(step):
            line = brief(step, finished)
            if as_json:
                print(json.dumps(line))
                continue
            result = f"reward {line['reward']:g}" if line["reward"] is not None else line["failure"]
            attempts = f"  {line['attempts']} attempts" if line["attempts"] > 1 else ""
            excluded = f"  excluded {listed(line['excluded_tokens'])}" if line["excluded_tokens"] else ""
            print(f"step {step:4d}  {line['rollout']}  {result}  {line['turns']} turns{attempts}{excluded}")


def brief(step: int, finished: RolloutResult) -> dict[str, Any]:
    outcome, failure = finished.outcome, finished.outcome.failure
    account = count_tokens([finished])
    return {
        "step": step,
        "rollout": finished.rollout.id,
        "task": finished.rollout.task.id,
        "reward": outcome.reward_or_floor(0.0),
        "failure": f"{failure.kind}/{failure.reason}" if failure else None,
        "attempts": finished.attempts,
        "turns": len(finished.turns),
        "sampled_tokens": account.sampled,
        "trained_tokens": account.trained,
        "excluded_tokens": dict(account.excluded),
        "untrained_tokens": dict(account.untrained),
    }


def show_rollout(run: RunDirectory, args: argparse.Namespace) -> None:
    step, finished = find_rollout(run, args.session)
    if args.json:
        print(msgspec.json.encode(finished).decode())
        return
    outcome = finished.outcome
    show_attempts(run, finished)
    print(f"rollout  {finished.rollout.id}  (step {step}, attempt {outcome.attempt} of {finished.attempts})")
    print(f"task     {json.dumps(finished.rollout.task.input, ensure_ascii=False)}")
    if outcome.failure:
        print(f"failure  {outcome.failure.kind}/{outcome.failure.reason}: {outcome.failure.message}")
        print(outcome.failure.traceback, end="")
        if outcome.failure.kind is FailureKind.POLICY and outcome.reward is None:
            print("reward   0.0 (default reward of a policy failure, which is trained)")
    if outcome.reward is not None:
        print(f"reward   {outcome.reward}  {outcome.rewards or ''} {outcome.metrics or ''}".rstrip())
    decode = decoder(run) if args.tokens else None
    for turn in finished.turns:
        print_turn(turn, decode)
    if outcome.reward_or_floor(0.0) is None:
        print("\ntrained  nothing: a failure of this kind has no reward")
    else:
        for trajectory in finished.trajectories:
            owned = sum(trajectory.loss_mask)
            print(f"\ntrained  {owned} of {len(trajectory.token_ids)} tokens, weight {trajectory.weight:g}")
    for excluded in finished.excluded:
        print(f"excluded {excluded.turn}: {excluded.tokens} tokens, {excluded.reason}")


def show_attempts(run: RunDirectory, finished: RolloutResult) -> None:
    """Print the failed attempts of a rollout. The gateway's store has their turns."""
    if finished.attempts < 2 or not run.run_state.exists():
        return
    with RunState(run.run_state) as state:
        records = state.attempts(finished.rollout.id)
    for record in records:
        if failure := record.failure:
            first_line = (failure.message.strip().splitlines() or ["no message"])[0]
            error = f"{failure.kind}/{failure.reason}: {first_line}"
            print(f"failed   {record.attempt.session_id}  {error} ({record.tokens} tokens sampled)")


def find_rollout(run: RunDirectory, id: str) -> tuple[int, RolloutResult]:
    for step in run.steps():
        for finished in run.read_rollouts(step):
            if id in (finished.rollout.id, finished.outcome.session_id):
                return step, finished
    raise UsageError(
        f"run {run.id} has no finished rollout {id!r}; afield show {run.id} --rollouts lists them"
    )


def decoder(run: RunDirectory) -> Any:
    """Function that decodes token ids with the tokenizer of the run's model."""
    from afield import factory

    config = saved_config(run)
    return factory.chat_tokenizer(Path(config.model)).decode


def print_turn(turn: Turn, decode: Any) -> None:
    versions = ", ".join(
        sorted({f"v{s.low}" if s.low == s.high else f"v{s.low}-v{s.high}" for s in turn.versions})
    )
    sampled = f"{len(turn.token_ids)} tokens sampled by {versions or 'none'}, {turn.finish_reason}"
    print(f"\n--- {turn.id} ({turn.tier}, {turn.dialect}, {turn.status}): {sampled}")
    for message in turn.messages:
        print(f"[{message.role}] {message.content}".rstrip())
        for call in message.tool_calls:
            print(f"    calls {call.name}({call.arguments})")
    if decode:
        for token_id, logprob in zip(turn.token_ids, turn.logprobs, strict=True):
            print(f"    {token_id:7d}  {logprob:9.4f}  {decode([token_id])!r}")
