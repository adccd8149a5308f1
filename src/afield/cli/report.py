"""What a run came to: the summary as numbers, and the reward curve as a picture."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from afield.orchestrator.state import RunDirectory, RunState
from afield.settings.train import TrainConfig
from afield.token_account import TokenAccount, listed


class Summary(Struct, frozen=True, kw_only=True):
    """`first` is the mean reward of the first two steps, `last` of the last three, or fewer where these would
    be the same ones. `staleness` is the greatest, in policy versions; `late` outcomes came after their
    attempt had been given up.
    """

    run: str
    seed: int
    agent: str
    first: float | None
    last: float | None
    steps: int
    rollouts: int
    trained: int
    failed: int
    retried: int
    turns_per_rollout: float
    tool_calls_per_rollout: float
    sampled_tokens: int
    """Tokens of the attempts that count: trained, excluded or untrained."""
    trained_tokens: int
    """Tokens in the loss."""
    excluded_tokens: dict[str, int]
    """Tokens of turns that are kept out of the loss, by reason."""
    excluded_share: float
    """Excluded tokens, of those sampled."""
    untrained_tokens: dict[str, int]
    """Tokens of rollouts that train nothing, by reason."""
    wasted_tokens: int
    dropped_groups: int
    staleness: int
    late: int
    wall_s: float


def summarise(run: RunDirectory, config: TrainConfig, *, wall_s: float) -> Summary:
    lines = run.read_metrics()
    rollouts = sum(line["rollouts"] for line in lines)
    begin = min(2, len(lines) // 2)
    account = account_of(lines)

    def per_rollout(name: str) -> float:
        return round(sum(line[name] * line["rollouts"] for line in lines) / max(rollouts, 1), 3)

    return Summary(
        run=str(run.path),
        seed=config.seed,
        agent=config.agent,
        first=_mean(lines[: begin or 1]),
        last=_mean(lines[begin:][-3:]),
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
        wall_s=round(wall_s, 1),
    )


def account_of(lines: Iterable[Mapping[str, Any]]) -> TokenAccount:
    """What became of the sampled tokens of these steps; of lines of metrics.jsonl."""
    account = TokenAccount()
    for line in lines:
        account += TokenAccount(
            trained=line.get("trained_tokens", line["sampled_tokens"]),
            excluded=line.get("excluded_tokens", {}),
            untrained=line.get("untrained_tokens", {}),
        )
    return account


def told_tokens(account: TokenAccount) -> str:
    """What became of the sampled tokens, in one line."""
    told = f"{account.sampled} tokens sampled, {account.trained} trained ({account.trained_share:.1%})"
    told += f", {sum(account.excluded.values())} excluded ({account.excluded_share:.1%}"
    told += f": {listed(account.excluded)})" if account.excluded else ")"
    idle = f", {sum(account.untrained.values())} of rollouts that train nothing"
    return told + (f"{idle} ({listed(account.untrained)})" if account.untrained else "")


def _late(run: RunDirectory) -> int:
    if not run.run_state.exists():
        return 0
    with RunState(run.run_state) as ledger:
        return ledger.late_outcomes


def _mean(lines: list[dict[str, Any]]) -> float | None:
    """Over rollouts, not over steps."""
    counted = [
        (line["reward"], line["rollouts"] - line["failed"]) for line in lines if line["reward"] is not None
    ]
    total = sum(n for _, n in counted)
    return round(math.fsum(reward * n for reward, n in counted) / total, 4) if total else None


def draw(run: RunDirectory) -> None:
    """rewards.png: the mean reward of every step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    lines = [line for line in run.read_metrics() if line["reward"] is not None]
    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=120)
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
    pyplot.close(figure)


def chart(rewards: list[float], *, steps: int, height: int = 8, width: int = 60) -> list[str]:
    """The curve in a terminal: a column of eighths per step, the newest steps when there are too many."""
    column = max(1, min(4, width // max(steps, len(rewards), 1)))
    shown = rewards[-(width // column) :]
    low, high = min([0.0, *shown]), max([1.0, *shown])
    eighths = " ▁▂▃▄▅▆▇█"
    rows: list[str] = []
    for row in range(height, 0, -1):
        cells: list[str] = []
        for reward in shown:
            filled = (reward - low) / (high - low) * height - (row - 1)
            cells.append(eighths[max(0, min(8, round(filled * 8)))] * column)
        label = {height: f"{high:5.2f}", 1: f"{low:5.2f}"}.get(row, " " * 5)
        rows.append(f"{label} ┤{''.join(cells)}")
    return rows


def me() -> str:
    """This program as it was called, so that what is printed can be pasted."""
    return short(sys.argv[0]) if sys.argv[0].endswith("/afield") else "afield"


def short(path: Path | str) -> str:
    """As a person would write it: from here, if it is below here."""
    return str(path).removeprefix(f"{Path.cwd()}/")
