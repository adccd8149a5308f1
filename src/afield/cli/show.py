"""`afield show`: print a run, its rollouts, or one rollout's turns."""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from afield.cli.report import account_of, chart, describe_tokens, me, summarise
from afield.cli.runs import open_run
from afield.cli.tables import print_table, printable, printable_lines
from afield.cli.train import saved_config
from afield.errors import NotFound, UsageError
from afield.orchestrator.state import RunDirectory, RunState
from afield.runs.cost import cost_of, describe_cost
from afield.runs.index import STAGES, RolloutRow
from afield.types import FailureKind, RolloutResult, Split, Turn

COLUMNS = (
    *("step", "split", "rollout", "task", "reward", "failure", "attempts", "turns", "sampled_tokens"),
    *("excluded_tokens", "refused", "seconds", "question"),
)
SORTABLE = {
    "reward": "reward",
    "seconds": "seconds",
    "turns": "turns",
    "tokens": "sampled_tokens",
    "excluded": "excluded_tokens",
    "refused": "refused_calls",
    "attempts": "attempts",
    "step": "step",
    "task": "task_id",
    "model_s": "model_s",
    "tool_s": "tool_s",
    "queue_s": "queue_s",
    "launch_s": "launch_s",
}
"""Columns by which rollouts are sorted, by the names of `--sort`."""
SHOWN_RETURNED = 300
"""Characters of a returned value that are printed."""
LISTING = {"sort": None, "failed": False, "reward": None, "split": None, "limit": None}
"""Options that list rollouts without --rollouts, with their values when they are not given."""
CONDITION = re.compile(r"(<=|>=|<|>|=)?([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)")


def add(commands: Any) -> None:
    command = commands.add_parser(
        "show",
        help="show a run or a rollout",
        description="Show a run of any kind, its rollouts, or the turns of one rollout.",
    )
    command.add_argument(
        "name",
        nargs="?",
        default="latest",
        metavar="RUN",
        help="run id, path, latest, or the directory of a gateway's store (default: latest)",
    )
    command.add_argument(
        "session", nargs="?", metavar="SESSION", help="rollout or session id; shows its turns"
    )
    command.add_argument("--rollouts", action="store_true", help="print one line per rollout")
    command.add_argument(
        "--sort",
        metavar="COLUMN[:asc]",
        help="list rollouts by a column, largest first, or smallest first with :asc; one of "
        + ", ".join(SORTABLE),
    )
    command.add_argument("--failed", action="store_true", help="list rollouts with a failure")
    command.add_argument(
        "--reward", metavar="CONDITION", help="list rollouts with this reward, such as 0, '<0.5' or '>=1'"
    )
    command.add_argument(
        "--split", choices=[str(split) for split in Split], help="list rollouts of training or of validation"
    )
    command.add_argument("--limit", type=int, metavar="N", help="list at most N rollouts")
    command.add_argument(
        "--tokens", action="store_true", help="print every sampled token with its log-probability"
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.limit is not None and args.limit < 0:
        raise UsageError(f"--limit {args.limit} must be 0 or positive")
    run_path = open_run(args.name)
    with run_path.index as index:
        index.refresh()
        if args.session:
            show_rollout(run_path, args)
        elif args.rollouts or any(getattr(args, name) is not LISTING[name] for name in LISTING):
            print_table(map(brief, selected(run_path, args)), COLUMNS, as_json=args.json)
        else:
            show_run(run_path, args)
    return 0


# --- a run -----------------------------------------------------------------------------------------


def show_run(run: RunDirectory, args: argparse.Namespace) -> None:
    info = run.info
    lines = [line for line in run.read_metrics() if "reward" in line]
    if args.json:
        print(json.dumps(run_as_json(run, lines)))
        return
    print(f"run      {run.path}\nkind     {info.kind}, {run.status}")
    print(f"agent    {info.agent}\nmodel    {info.model}")
    if info.steps is not None:
        print(f"steps    {len(lines)} of {info.steps}")
    if rewards := [line["reward"] for line in lines if line["reward"] is not None]:
        print("\n".join(chart(rewards, steps=info.steps or len(rewards))))
    for text in (*map(describe_step, lines[-5:]), *map(describe_total, totals(run)), *costs(run)):
        print(text)
    if lines:
        account = account_of(lines)
        print(f"tokens   {describe_tokens(account)}")
        if warning := account.warning():
            print(f"warning  {warning}")
    print(f"failures {', '.join(f'{kind} {count}' for kind, count in failures(run).items()) or 'none'}")
    if refused := refused_calls(run):
        print(
            f"refused  {', '.join(f'{code} {count}' for code, count in refused.items())}:"
            f" {printable(last_refusal(run))}"
        )
    for line in run.read_validation():
        when = f"after step {line['step']}" if line["step"] else "before training"
        print(f"validation {when}: reward {number(line['reward'])} of {line['rollouts']} rollouts")
    if example := suggestion(run):
        print(f"turns of a rollout: {me()} show {run.id} {example}")


def run_as_json(run: RunDirectory, lines: list[dict[str, Any]]) -> dict[str, Any]:
    document: dict[str, Any] = {**msgspec.to_builtins(run.info), "status": run.status}
    if run.info.kind in ("train", "demo"):
        document |= msgspec.to_builtins(summarise(run, saved_config(run), wall_s=0.0))
        del document["wall_s"]
    return {
        **document,
        "metrics": lines,
        "validation": run.read_validation(),
        "totals": totals(run),
        "failures": failures(run),
        "refused": refused_calls(run),
        "cost": msgspec.to_builtins(cost_of(run.path, run.info.kind, run.index.query)),
    }


def totals(run: RunDirectory) -> list[dict[str, Any]]:
    """Rollouts of each split that no step has taken, or that belong to a run without steps."""
    return run.index.query(
        "SELECT split, count(*) AS rollouts, count(DISTINCT task_id) AS tasks, avg(reward) AS reward,"
        " sum(reward IS NULL) AS failed, sum(sampled_tokens) AS sampled_tokens, avg(seconds) AS seconds"
        " FROM rollouts WHERE step IS NULL GROUP BY split ORDER BY split"
    )


def describe_step(line: dict[str, Any]) -> str:
    refused = f"  refused calls {sum(line['refused'].values())}" if line.get("refused") else ""
    return (
        f"step {line['step']:4d}  reward {number(line['reward'])}  rollouts {line['rollouts']}"
        f"  failed {line['failed']}  tokens {line['sampled_tokens']}"
        f"  excluded {line.get('excluded_share', 0.0):.1%}{refused}"
    )


def number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def describe_total(total: dict[str, Any]) -> str:
    seconds = "" if total["seconds"] is None else f"  seconds {total['seconds']:.1f}"
    return (
        f"{total['split']:8s} rollouts {total['rollouts']}  tasks {total['tasks']}"
        f"  reward {number(total['reward'])}"
        f"  failed {total['failed']}  tokens {total['sampled_tokens']}{seconds}"
    )


def costs(run: RunDirectory) -> list[str]:
    """Line of the cost; empty without prices."""
    cost = cost_of(run.path, run.info.kind, run.index.query)
    return [f"cost     {describe_cost(cost, run.info.kind)}"] if cost else []


def failures(run: RunDirectory) -> dict[str, int]:
    """Failed rollouts by kind and reason."""
    sql = (
        "SELECT failure_kind || '/' || failure_reason AS what, count(*) AS n FROM rollouts"
        " WHERE failure_kind IS NOT NULL GROUP BY 1 ORDER BY 2 DESC, 1"
    )
    return {row["what"]: row["n"] for row in run.index.query(sql)}


def refused_calls(run: RunDirectory) -> dict[str, int]:
    """Refused model calls by class of error."""
    counts: Counter[str] = Counter()
    for row in run.index.query("SELECT refused FROM rollouts WHERE refused_calls > 0"):
        counts.update(json.loads(row["refused"]))
    return dict(counts.most_common())


def last_refusal(run: RunDirectory) -> str:
    rows = run.index.query("SELECT refusal FROM rollouts WHERE refused_calls > 0 ORDER BY seq DESC LIMIT 1")
    return rows[0]["refusal"]


def suggestion(run: RunDirectory) -> str | None:
    """Id of a rollout to look at: a failed one if there is one, else the newest."""
    order = "failure_kind IS NULL, refused_calls = 0, seq DESC"
    rows = run.index.rollouts("removed=0", order=order, limit=1)
    return rows[0].id if rows else None


# --- rollouts --------------------------------------------------------------------------------------


def selected(run: RunDirectory, args: argparse.Namespace) -> list[RolloutRow]:
    """Rows that the options select."""
    where, values = ["1"], []
    if args.failed:
        where.append("failure_kind IS NOT NULL")
    if args.split:
        where.append("split = ?")
        values.append(args.split)
    if args.reward is not None:
        match = CONDITION.fullmatch(args.reward.replace(" ", ""))
        if match is None:
            raise UsageError(
                f"--reward {args.reward!r} must be a number after one of < <= = >= >, such as '<0.5'"
            )
        where.append(f"reward {match[1] or '='} ?")
        values.append(float(match[2]))
    order = "coalesce(step, 1e18), seq"
    if args.sort:
        name, _, direction = args.sort.partition(":")
        if name not in SORTABLE or direction not in ("", "asc", "desc"):
            raise UsageError(f"--sort {args.sort!r} must be one of {', '.join(SORTABLE)}, or one with :asc")
        order = f"{SORTABLE[name]} IS NULL, {SORTABLE[name]} {direction or 'desc'}, seq"
    limit = -1 if args.limit is None else args.limit
    return run.index.rollouts(" AND ".join(where), *values, order=order, limit=limit)


def brief(row: RolloutRow) -> dict[str, Any]:
    """A rollout in one line."""
    return {
        "step": row.step,
        "split": row.split,
        "rollout": row.id,
        "task": row.task_id,
        "reward": row.reward,
        "failure": f"{row.failure_kind}/{row.failure_reason}" if row.failure_kind else None,
        "attempts": row.attempts,
        "turns": row.turns,
        "sampled_tokens": row.sampled_tokens,
        "trained_tokens": row.trained_tokens,
        "excluded_tokens": row.excluded,
        "untrained_tokens": row.untrained,
        "refused": row.refused,
        "seconds": row.seconds,
        "question": row.question,
        "removed": bool(row.removed),
    }


# --- one rollout -----------------------------------------------------------------------------------


def show_rollout(run: RunDirectory, args: argparse.Namespace) -> None:
    row, finished = find_rollout(run, args.session)
    if args.json:
        print(msgspec.json.encode(finished).decode())
        return
    outcome = finished.outcome
    show_attempts(run, finished)
    where = "" if row.step is None else f"step {row.step}, "
    print(f"rollout  {finished.rollout.id}  ({where}attempt {outcome.attempt} of {finished.attempts})")
    print(f"task     {printable_lines(json.dumps(finished.rollout.task.input, ensure_ascii=False))}")
    if row.seconds is not None:
        stages = ((name.removesuffix("_s"), getattr(row, name)) for name in STAGES)
        parts = ", ".join(f"{name} {value:.2f}" for name, value in stages if value)
        print(f"seconds  {row.seconds:.2f} ({parts})")
    print_outcome(finished)
    decode = decoder(run) if args.tokens else None
    for turn in finished.turns:
        print_turn(turn, decode)
    if outcome.reward_pending:
        print("\ntrained  nothing yet: the reward is still to be given")
    elif outcome.reward_or_floor(0.0) is None:
        print("\ntrained  nothing: a failure of this kind has no reward")
    elif finished.rollout.split is Split.TRAIN:
        for trajectory in finished.trajectories:
            owned = sum(trajectory.loss_mask)
            print(f"\ntrained  {owned} of {len(trajectory.token_ids)} tokens, weight {trajectory.weight:g}")
    for excluded in finished.excluded:
        print(f"excluded {excluded.turn}: {excluded.tokens} tokens, {excluded.reason}")


def print_outcome(finished: RolloutResult) -> None:
    outcome = finished.outcome
    if outcome.failure:
        message = printable_lines(outcome.failure.message)
        print(f"failure  {outcome.failure.kind}/{outcome.failure.reason}: {message}")
        print(printable_lines(outcome.failure.traceback), end="")
        if outcome.failure.kind is FailureKind.POLICY and outcome.reward is None:
            print("reward   0.0 (default reward of a policy failure, which is trained)")
    if outcome.reward_pending:
        print(f"reward   still to be given, with RolloutClient.reward  {outcome.metrics or ''}".rstrip())
    if outcome.reward is not None:
        print(f"reward   {outcome.reward}  {outcome.rewards or ''} {outcome.metrics or ''}".rstrip())
    for name, value in finished.returned.items():
        text = json.dumps(value, ensure_ascii=False)
        more = f" ... ({len(text)} characters; --json prints all)" if len(text) > SHOWN_RETURNED else ""
        print(f"returned {printable(name)}: {printable(text[:SHOWN_RETURNED])}{more}")
    for name, size in finished.returned_left_out.items():
        print(f"returned {printable(name)}: left out, {size} bytes")
    for refused in finished.refused:
        calls = "1 call" if refused.count == 1 else f"{refused.count} calls"
        print(f"refused  {calls} with {refused.status} {refused.code}: {printable_lines(refused.message)}")


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
            print(
                f"failed   {record.attempt.session_id}  {printable(error)} ({record.tokens} tokens sampled)"
            )


def find_rollout(run: RunDirectory, id: str) -> tuple[RolloutRow, RolloutResult]:
    try:
        row = run.index.find(id)
    except NotFound as error:
        raise UsageError(f"run {error}; list its rollouts with: afield show {run.id} --rollouts") from None
    return row, run.index.read(row)


def decoder(run: RunDirectory) -> Any:
    """Function that decodes token ids with the tokenizer of the run's model."""
    from afield import factory

    model = Path(run.info.model)
    if not model.is_dir():
        raise UsageError(f"--tokens needs the model's directory, and run {run.id} has only its name: {model}")
    return factory.chat_tokenizer(model).decode


def print_turn(turn: Turn, decode: Any) -> None:
    versions = ", ".join(
        sorted({f"v{s.low}" if s.low == s.high else f"v{s.low}-v{s.high}" for s in turn.versions})
    )
    seconds = f", {turn.ended - turn.started:.2f} s" if turn.ended is not None and turn.started else ""
    sampled = f"{len(turn.token_ids)} tokens sampled by {versions or 'none'}, {turn.finish_reason}{seconds}"
    print(f"\n--- {turn.id} ({turn.tier}, {turn.dialect}, {turn.status}): {sampled}")
    for message in turn.messages:
        print(f"[{message.role}] {printable_lines(message.content)}".rstrip())
        for call in message.tool_calls:
            print(f"    calls {printable(call.name)}({printable_lines(call.arguments)})")
    if decode:
        for token_id, logprob in zip(turn.token_ids, turn.logprobs, strict=True):
            print(f"    {token_id:7d}  {logprob:9.4f}  {decode([token_id])!r}")
