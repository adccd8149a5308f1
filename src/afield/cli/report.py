"""Summary of a run: numbers, reward curve as PNG and as text."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from afield.jobs.tracking import read_states
from afield.orchestrator.state import RunDirectory, RunState
from afield.runs.cost import first_and_last_reward
from afield.runs.token_account import TokenAccount, listed
from afield.settings.train import TrainConfig


class Summary(Struct, frozen=True, kw_only=True):
    """Totals of a run; means are over rollouts."""

    run: str
    """Path of the run directory."""
    seed: int
    """Seed of the run."""
    agent: str
    """Agent, as FILE.py:NAME."""
    first: float | None
    """Mean reward of the first two steps, or of the first if there are fewer than four; None without
    rewards."""
    last: float | None
    """Mean reward of the last three steps, without the steps of `first`; None without rewards."""
    steps: int
    """Completed steps."""
    rollouts: int
    """Rollouts of these steps."""
    trained: int
    """Rollouts that were trained on."""
    failed: int
    """Rollouts that failed."""
    retried: int
    """Attempts that were retried."""
    turns_per_rollout: float
    """Mean number of turns per rollout."""
    tool_calls_per_rollout: float
    """Mean number of tool calls per rollout."""
    sampled_tokens: int
    """Tokens of the attempts that count: trained, excluded or untrained."""
    trained_tokens: int
    """Tokens in the loss."""
    excluded_tokens: dict[str, int]
    """Tokens of turns that are kept out of the loss, by reason."""
    excluded_share: float
    """Excluded tokens as a share of the sampled ones, from 0 to 1."""
    untrained_tokens: dict[str, int]
    """Tokens of rollouts that contribute no gradient, by reason."""
    wasted_tokens: int
    """Tokens sampled by attempts that do not count."""
    dropped_groups: int
    """Groups that were not trained on."""
    staleness: int
    """Greatest staleness of a step, in policy versions."""
    late: int
    """Outcomes that were refused because their attempt had been given up."""
    tracker_failures: dict[str, int]
    """Failures of each experiment tracker that had one; trackers.json has the last error."""
    wall_s: float
    """Wall time, in seconds."""


def summarise(run: RunDirectory, config: TrainConfig, *, wall_s: float) -> Summary:
    """Build the summary from metrics.jsonl and the run state."""
    lines = run.read_metrics()
    rollouts = sum(line["rollouts"] for line in lines)
    first, last = first_and_last_reward(lines)
    account = account_of(lines)

    def per_rollout(name: str) -> float:
        return round(sum(line[name] * line["rollouts"] for line in lines) / max(rollouts, 1), 3)

    return Summary(
        run=str(run.path),
        seed=config.seed,
        agent=config.agent,
        first=first,
        last=last,
        steps=len(lines),
        rollouts=rollouts,
        trained=sum(line["trained"] for line in lines),
        failed=sum(line["failed"] for line in lines),
        retried=sum(line["retried"] for line in lines),
        turns_per_rollout=per_rollout("turns_per_rollout"),
        tool_calls_per_rollout=per_rollout("tool_calls_per_rollout"),
        sampled_tokens=account.sampled,
        trained_tokens=account.trained,
        excluded_tokens=dict(account.excluded),
        excluded_share=round(account.excluded_share, 6),
        untrained_tokens=dict(account.untrained),
        wasted_tokens=sum(line["wasted_tokens"] for line in lines),
        dropped_groups=sum(len(line["dropped_groups"]) for line in lines),
        staleness=max((line["staleness"] for line in lines), default=0),
        late=_late(run),
        tracker_failures={
            name: state.failed for name, state in read_states(run.path).items() if state.failed
        },
        wall_s=round(wall_s, 1),
    )


def account_of(lines: Iterable[Mapping[str, Any]]) -> TokenAccount:
    """Sum of the token accounts of lines of metrics.jsonl."""
    account = TokenAccount()
    for line in lines:
        account += TokenAccount(
            trained=line.get("trained_tokens", line["sampled_tokens"]),
            excluded=line.get("excluded_tokens", {}),
            untrained=line.get("untrained_tokens", {}),
        )
    return account


def describe_tokens(account: TokenAccount) -> str:
    """Token account in one line: sampled, trained, excluded and untrained tokens."""
    text = f"{account.sampled} tokens sampled, {account.trained} trained ({account.trained_share:.1%})"
    text += f", {sum(account.excluded.values())} excluded ({account.excluded_share:.1%}"
    text += f": {listed(account.excluded)})" if account.excluded else ")"
    untrained = f", {sum(account.untrained.values())} in rollouts that were not trained"
    return text + (f"{untrained} ({listed(account.untrained)})" if account.untrained else "")


def _late(run: RunDirectory) -> int:
    if not run.run_state.exists():
        return 0
    with RunState(run.run_state) as state:
        return state.late_outcomes


def draw(run: RunDirectory) -> None:
    """Write rewards.png: mean reward by training step; nothing for fewer than two steps."""
    lines = [line for line in run.read_metrics() if line["reward"] is not None]
    if len(lines) < 2:
        return
    from matplotlib.figure import Figure  # not pyplot, which takes half a second to import
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4), dpi=120)
    axes = figure.subplots()
    axes.plot(
        [line["step"] for line in lines], [line["reward"] for line in lines], marker="o", color="#2563eb"
    )
    low = min([0.0, *(line["reward"] for line in lines)])
    high = max([1.0, *(line["reward"] for line in lines)])
    axes.set(xlabel="training step", ylabel="mean reward", ylim=(low - 0.02, high + 0.02), title=run.id)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(run.plot)


def chart(rewards: list[float], *, steps: int, height: int = 8, width: int = 60) -> list[str]:
    """Draw the reward curve with block characters, one bar per step; the newest steps if not all fit."""
    column = max(1, min(4, width // max(steps, len(rewards), 1)))
    newest = rewards[-(width // column) :]
    low, high = min([0.0, *newest]), max([1.0, *newest])
    eighths, axis = (" ▁▂▃▄▅▆▇█", "┤") if _encodable("▁█┤") else (" ..::--##", "|")
    rows: list[str] = []
    for row in range(height, 0, -1):
        cells: list[str] = []
        for reward in newest:
            filled = (reward - low) / (high - low) * height - (row - 1)
            cells.append(eighths[max(0, min(8, round(filled * 8)))] * column)
        label = {height: f"{high:5.2f}", 1: f"{low:5.2f}"}.get(row, " " * 5)
        rows.append(f"{label} {axis}{''.join(cells)}")
    return rows


def _encodable(text: str) -> bool:
    """Whether the standard output can show a text."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def me() -> str:
    """Name of this program as it was called, so that printed commands can be pasted."""
    return short(sys.argv[0]) if sys.argv[0].endswith("/afield") else "afield"


def short(path: Path | str) -> str:
    """Path relative to the working directory, if it is below it."""
    return str(path).removeprefix(f"{Path.cwd()}/")
