"""Progress display of a training run: live chart or log lines."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from msgspec import structs
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from afield.cli.report import Summary, account_of, chart, describe_tokens, me, short
from afield.jobs.tracking import describe_failures, read_states
from afield.orchestrator.state import RunDirectory
from afield.orchestrator.training_loop import StepMetrics
from afield.runs.token_account import ExclusionWatch, TokenAccount, listed
from afield.settings.train import TrainConfig
from afield.types import FailureKind, Outcome, Rollout, RolloutResult

SHOWN_FAILURES = 5
"""Distinct failure messages printed per kind and reason."""
SHOWN_WIDTH = 200
"""Length of a printed failure message, in characters."""
EQUAL = 1e-4
"""Mean sampler-trainer difference of log-probabilities that float32 on both sides explains."""


class Screen:
    """Prints the progress of a run; a watcher of rollouts and steps."""

    def __init__(self, config: TrainConfig, run: RunDirectory, *, to_stderr: bool) -> None:
        self._config = config
        self._run = run
        self._console = Console(file=sys.stderr if to_stderr else sys.stdout, highlight=False)
        lines = run.read_metrics()
        self._rewards = [line["reward"] for line in lines if line["reward"] is not None]
        self._steps_done = len(lines)
        self._tokens = ExclusionWatch(account_of(lines))
        self._updated = any(_has_updated(line["trainer"]) for line in lines)
        self._in_step = 0
        self._finished = 0
        self._failures: Counter[str] = Counter()
        self._printed: set[str] = set()
        self._failed = ""  # id of a failed rollout, suggested for `afield show`
        self._began = time.monotonic()
        self._live: Live | None = None

    def __enter__(self) -> Self:
        agent = short(self._config.agent or self._config.runtime)
        self._say(f"[bold]afield[/] run [cyan]{self._run.id}[/]  agent {agent}")
        if self._steps_done:
            self._say(f"resuming after step {self._steps_done} of {self._config.steps}")
        if self._run.summary.exists() and self._steps_done >= self._config.steps:
            self._say("this run is finished: --steps continues it, and another --run starts a new one")
        self._say("starting gateway, engine, agents and trainer ...")
        return self

    def ready(self, transfer: str = "") -> None:
        """Print the startup time and the way of weights to engines; start the chart on a terminal."""
        took = time.monotonic() - self._began
        per_step = self._config.tasks_per_step * self._config.rollouts
        steps = "1 step" if self._config.steps == 1 else f"{self._config.steps} steps"
        rollouts = "1 rollout" if per_step == 1 else f"{per_step} rollouts"
        self._say(f"ready after {took:.1f} s; {steps} of {rollouts}")
        if transfer:
            self._say(escape(transfer))
        if self._console.is_terminal:
            self._live = Live(self._view(), console=self._console, refresh_per_second=4, transient=True)
            self._live.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()
            self._console.print(self._view())

    # --- watcher -------------------------------------------------------------------------------

    def attempt_ended(self, rollout: Rollout, outcome: Outcome, will_retry: bool) -> None:
        failure = outcome.failure
        if failure is None:
            return
        kind = f"{failure.kind}/{failure.reason}"
        self._failures[kind] += 1
        self._failed = self._failed if will_retry else rollout.id
        message = f"{kind}: {_first_line(failure.message)}"
        if message in self._printed or sum(text.startswith(kind) for text in self._printed) == SHOWN_FAILURES:
            return
        self._printed.add(message)
        then = "retried" if will_retry else "trained" if failure.kind is FailureKind.POLICY else "left out"
        self._say(
            f"[yellow]{escape(f'{outcome.session_id}: {message} ({then}; repetitions are only counted)')}[/]"
        )

    def rollout_finished(self, result: RolloutResult) -> None:
        self._in_step += 1
        self._finished += 1
        self._refresh()

    def step_done(self, line: StepMetrics) -> None:
        self._steps_done = line.step
        self._in_step = 0 if line.step < self._config.steps else self._in_step
        self._updated = self._updated or _has_updated(line.trainer)
        self._warn_of_exclusions(line)
        for warning in self._warnings(line):
            if warning not in self._printed:
                self._printed.add(warning)
                self._say(f"[red]{warning}[/]")
        if line.reward is not None:
            self._rewards.append(line.reward)
        self._say(escape(describe(line, self._config.steps)))
        self._refresh()

    def validated(self, line: Mapping[str, Any]) -> None:
        """Print a validation."""
        when = f"after step {line['step']}" if line["step"] else "before training"
        self._say(
            f"validation {when}: reward {_number(line['reward'])} of {line['rollouts']} rollouts,"
            f" {line['failed']} failed"
        )

    def _warnings(self, line: StepMetrics) -> Iterator[str]:
        called = line.failed < line.rollouts and FailureKind.POLICY not in line.failures
        if line.turns_per_rollout == 0 and line.refused:
            refusal = escape(_first_line(line.refusal))
            yield f"every model call was refused ({listed(line.refused)}): {refusal}"
        elif line.turns_per_rollout == 0 and (called or self._failures["infrastructure/engine"]):
            yield (
                "no model calls reached the gateway: agents must call rollout.openai_base_url"
                " with rollout.api_key"
            )
        elif line.trained and not self._updated and not self._config.freeze_weights:
            yield (
                "no updates so far: the rewards within each group are equal."
                " Check the reward, or try more rollouts per task, a higher temperature or other tasks"
            )

    def _warn_of_exclusions(self, line: StepMetrics) -> None:
        """Print a warning once, and again when tokens are excluded for a new reason."""
        if warning := self._tokens.add(account_of([structs.asdict(line)])):
            self._say(f"[red]{escape(warning)}[/]")

    def collected(self) -> None:
        """Print the summary of a process that collects rollouts without training."""
        failed = sum(self._failures.values())
        self._say(f"collecting is complete: {self._finished} rollouts here, {failed} failed attempts")

    def finished(self, summary: Summary) -> None:
        """Print the summary of a finished run, warnings and further commands."""
        say = self._say
        begin = max(1, min(2, summary.steps // 2))
        end = min(3, summary.steps - min(2, summary.steps // 2))
        say(
            f"mean reward {_number(summary.first)} (first {_steps(begin)}) -> {_number(summary.last)}"
            f" (last {_steps(end)}) in {_steps(summary.steps)},"
            f" {summary.rollouts} rollouts, {summary.failed} failed, {summary.wall_s:.0f} s"
        )
        account = TokenAccount(
            trained=summary.trained_tokens,
            excluded=summary.excluded_tokens,
            untrained=summary.untrained_tokens,
        )
        say(escape(describe_tokens(account)))
        if warning := account.warning():
            say(f"[red]{escape(warning)}[/]")
        for number, what in (
            (summary.dropped_groups, f"groups were dropped; {short(self._run.metrics)} says why"),
            (summary.late, "outcomes were refused: they arrived after their attempt had ended"),
        ):
            if number:
                say(f"[yellow]{number} {what}[/]")
        for failure in describe_failures(read_states(self._run.path)):
            say(f"[yellow]tracker {escape(failure)}[/]")
        if self._failed:
            say(f"traceback of a failure: {me()} show {self._run.id} {self._failed}")
        say(f"run directory {short(self._run.path)}")
        if self._run.plot.exists():
            say(f"  curve      {short(self._run.plot)}")
        say(f"  details    {me()} show {self._run.id}")
        if self._run.id.startswith("demo"):
            say(f"  next       {me()} train my_agent.py:agent --tasks tasks.jsonl --model DIR")

    def _say(self, text: str) -> None:
        """Print without hard wrapping, so that paths can be copied and searched."""
        self._console.print(text, soft_wrap=True)

    # --- drawing ---------------------------------------------------------------------------------

    def _refresh(self) -> None:
        if self._live:
            self._live.update(self._view())

    def _view(self) -> Panel:
        per_step = self._config.tasks_per_step * self._config.rollouts
        width = min(100, self._console.width)
        bars = Table.grid(padding=(0, 1))
        bars.add_row(
            "steps",
            ProgressBar(self._config.steps, self._steps_done, width=30),
            f"{self._steps_done}/{self._config.steps}",
        )
        bars.add_row(
            "rollouts", ProgressBar(per_step, self._in_step, width=30), f"{self._in_step}/{per_step}"
        )
        parts = [
            Text("\n".join(chart(self._rewards, steps=self._config.steps, width=width - 14)), style="blue"),
            bars,
        ]
        return Panel(Group(*parts), title="mean reward per step", width=width)


def describe(line: StepMetrics, steps: int) -> str:
    """Metrics of a step in one line."""
    trained = line.failures.get(FailureKind.POLICY, 0)
    kinds = ", ".join(f"{k} {count}" for k, count in line.failures.items() if k != FailureKind.POLICY)
    failed = f"  failed {line.failed} ({kinds})" if kinds else ""
    failed += f"  policy failures {trained}" if trained else ""
    failed += f"  refused calls {sum(line.refused.values())} ({listed(line.refused)})" if line.refused else ""
    failed += f"  refilled groups {line.refilled_groups}" if line.refilled_groups else ""
    failed += f"  too long to train {line.too_long}" if line.too_long else ""
    excluded = f" ({line.excluded_share:.1%}: {listed(line.excluded_tokens)})" if line.excluded_tokens else ""
    return (
        f"step {line.step:3d}/{steps}  reward {_number(line.reward)}  rollouts {line.rollouts}"
        f"  turns {line.turns_per_rollout:.2f}  tool calls {line.tool_calls_per_rollout:.2f}"
        f"  tokens {line.sampled_tokens}  excluded {sum(line.excluded_tokens.values())}{excluded}"
        f"  collect {line.collect_s:.1f} s  train {line.train_s:.1f} s{precision(line.trainer)}{failed}"
    )


def precision(measures: Mapping[str, float]) -> str:
    """Describe the sampler-trainer difference, also as a multiple of the difference that the engine's dtype
    explains, and the share of the update that reached the engine. Empty if both agree without rounding."""
    text = ""
    if not measures.get("logprob_diff", 0.0) <= EQUAL:  # so that NaN is shown
        text += f"  logprob diff {measures['logprob_diff']:.1e}"
        if "logprob_diff_times_control" in measures:
            text += f" ({measures['logprob_diff_times_control']:.2g}x expected)"
    if measures.get("update_kept", 1.0) != 1.0:
        text += f"  update kept {measures['update_kept']:.0%}"
    return text


def _has_updated(measures: Mapping[str, float]) -> bool:
    """Whether the step made an update; a step without advantages has no gradient norm."""
    return "grad_norm" in measures


def _first_line(message: str) -> str:
    first = _printable((message.strip().splitlines() or ["no message"])[0])
    return first if len(first) <= SHOWN_WIDTH else f"{first[: SHOWN_WIDTH - 4]} ..."


def _printable(text: str) -> str:
    """Replace unprintable characters, so that agent output cannot control the terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _steps(number: int) -> str:
    return "1 step" if number == 1 else f"{number} steps"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
