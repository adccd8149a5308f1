"""docs/results.md and its plot, from a saved result of bench/training/result.py."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bench.report import COLOURS, figure, save_figure, table, verdict

UNMEASURED = "Not measured yet; run the command below on a machine with a GPU."
RISE, SHARE, BUSY, TARGET = 0.30, 0.5, 0.85, 0.8
"""Required rise, required share of TRL's time, required share of engine time in mode async, and the success
whose time is compared."""
LABELS = {
    "embedded": "afield, embedded engine",
    "vllm": "afield, vLLM",
    "embedded-async": "afield, embedded engine, async",
    "vllm-async": "afield, vLLM, async",
    "frozen": "frozen control",
    "trl": "stock TRL",
}
COLOUR = {
    "embedded": COLOURS["blue"],
    "vllm": COLOURS["purple"],
    "embedded-async": COLOURS["blue"],
    "vllm-async": COLOURS["purple"],
    "frozen": COLOURS["grey"],
    "trl": COLOURS["orange"],
}


class Criterion(NamedTuple):
    """A requirement and what was measured."""

    name: str
    """What is required of which part."""
    measured: str
    """Measured value, formatted."""
    ok: bool
    """Whether it is met."""
    required: str
    """Required value, formatted."""


def sections(result: dict[str, Any] | None) -> dict[str, str]:
    """Parts of docs/results.md."""
    if result is None:
        return {"origin": UNMEASURED, "success": "", "requirements": "", "times": ""}
    rows = [(c.name, c.measured, c.required, verdict(c.ok)) for c in criteria(result)]
    return {
        "origin": _origin(result),
        "success": f"{_success(result)}\n\n![held-out success by step and by time](img/result.svg)",
        "requirements": "## Requirements\n\n" + table(("", "measured", "required", ""), rows),
        "times": f"## Time\n\n{_times(result)}",
    }


def runs(result: Mapping[str, Any], *names: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Part, seed and line of each run; of all parts without names."""
    for part in LABELS:
        for seed, line in result["parts"].get(part, {}).items():
            if not names or part in names:
                yield part, seed, line


def seconds_to(line: Mapping[str, Any], target: float) -> float | None:
    """Training time until the first evaluation that reaches the target; None if none does."""
    timed = (each for each in line["evaluations"] if each["seconds"] is not None)
    return next((each["seconds"] for each in timed if each["success"] >= target), None)


def time_to_target(result: Mapping[str, Any], part: str) -> float | None:
    """Median over the runs that had the machine for themselves; None if one of them misses the target."""
    times = [seconds_to(line, TARGET) for _, _, line in runs(result, part) if line["parallel"] == 1]
    known = [value for value in times if value is not None]
    return statistics.median(known) if known and len(known) == len(times) else None


def criteria(result: Mapping[str, Any]) -> list[Criterion]:
    found: list[Criterion] = []
    for part, seed, line in runs(result, "embedded", "vllm"):
        first, last = line["evaluations"][0], line["evaluations"][-1]
        rise = last["success"] - first["success"]
        name = f"{LABELS[part]}, seed {seed}: held-out success rises"
        ok = rise >= RISE and last["low"] > first["high"]
        found.append(Criterion(name, f"{rise:+.3f}", ok, f">= {RISE}, intervals apart"))
    for part, seed, line in runs(result, "frozen"):
        first, last = line["evaluations"][0], line["evaluations"][-1]
        flat = first["low"] <= last["success"] <= first["high"]
        measured = f"{last['success'] - first['success']:+.3f}"
        name = f"{LABELS[part]}, seed {seed}: held-out success changes"
        found.append(Criterion(name, measured, flat, "within the interval"))
    theirs = time_to_target(result, "trl")
    for part in (name for name in LABELS if name not in ("frozen", "trl")):
        ours = time_to_target(result, part)
        if ours is not None and theirs is not None:
            share = ours / theirs
            name = f"{LABELS[part]}: time to {TARGET} held-out success, as a share of TRL's"
            found.append(Criterion(name, f"{share:.2f}", share <= SHARE, f"<= {SHARE}"))
    for part, seed, line in runs(result, "embedded-async", "vllm-async"):
        busy = line["busy"]["sampling"]
        name = f"{LABELS[part]}, seed {seed}: engine busy"
        found.append(Criterion(name, f"{100 * busy:.1f} %", busy >= BUSY, f">= {100 * BUSY:.0f} %"))
    return found


def _origin(result: Mapping[str, Any]) -> str:
    sizes = result["settings"]
    machine = next(line["machine"] for _, _, line in runs(result))
    return (
        f"One {machine['device']} with {machine['cores']} cores, commit `{result['commit'][:12]}`, torch"
        f" {machine['torch']}, transformers {machine['transformers']}, vLLM {machine['vllm']}, TRL"
        f" {machine['trl']}, langgraph {machine['langgraph']}. {sizes['steps']} steps of"
        f" {sizes['tasks_per_step'] * sizes['group']} rollouts in groups of {sizes['group']}, learning rate"
        f" {sizes['lr']:g}, {sizes['held_out']} held-out tasks, a warm start of"
        f" {result['warm_start']['conversations']} demonstrations."
    )


def _estimate(each: Mapping[str, Any]) -> str:
    return f"{each['success']:.3f} ({each['low']:.3f} to {each['high']:.3f})"


def _success(result: Mapping[str, Any]) -> str:
    rows = [
        (LABELS[part], seed, _estimate(line["evaluations"][0]), _estimate(line["evaluations"][-1]))
        for part, seed, line in runs(result)
    ]
    return table(("", "seed", "before", "after"), rows)


def _times(result: Mapping[str, Any]) -> str:
    rows = []
    for part, seed, line in runs(result):
        reached = seconds_to(line, TARGET)
        shares = ["", "", "", "", ""]
        if "span_s" in line:
            shares = [f"{100 * value / line['span_s']:.0f} %" for value in line["seconds"].values()]
        time = "" if reached is None else f"{reached:.0f} s"
        rows.append((LABELS[part], seed, line["parallel"], time, f"{line['wall_s'] / 60:.1f} min", *shares))
    activities = ("sampling", "training", "weights", "tools", "idle")
    return table(("", "seed", "runs at once", f"to {TARGET}", "in all", *activities), rows)


def draw(result: Mapping[str, Any], folder: Path) -> None:
    """Held-out success by step, and by seconds of training."""
    drawing, axes = figure(2, (8, 7), share_x=False)
    by_step, by_time = axes
    labelled: set[str] = set()
    for part, _, line in runs(result):
        style = {"color": COLOUR[part], "linestyle": "--" if part.endswith("async") else "-", "marker": "."}
        label = None if part in labelled else LABELS[part]
        labelled.add(part)
        each = line["evaluations"]
        by_step.plot([e["step"] for e in each], [e["success"] for e in each], label=label, **style)
        by_step.fill_between(
            [e["step"] for e in each],
            [e["low"] for e in each],
            [e["high"] for e in each],
            color=COLOUR[part],
            alpha=0.08,
        )
        timed = [e for e in each if e["seconds"] is not None and line["parallel"] == 1]
        by_time.plot([e["seconds"] for e in timed], [e["success"] for e in timed], **style)
    by_step.set(xlabel="step", ylabel="held-out success", ylim=(0, 1))
    by_time.set(xlabel="seconds of training", ylabel="held-out success", ylim=(0, 1))
    by_step.legend(frameon=False)
    save_figure(drawing, folder / "result.svg")
