"""Plot of engine load and training steps over time, per mode."""

from __future__ import annotations

from pathlib import Path

from bench.collect.simulation.run import Result
from bench.report import COLOURS, figure, save_figure

MODES = ("async", "one step off", "sync")


def draw(results: dict[str, Result], path: Path) -> None:
    end = max(results[name].seconds for name in MODES)
    drawing, panels = figure(len(MODES), (9, 5))
    for axes, name in zip(panels, MODES, strict=True):
        run = results[name]
        share = [100 * tokens / run.setting.total for tokens in run.served]
        axes.fill_between(
            range(len(share)), share, step="post", color=COLOURS["blue"], alpha=0.75, linewidth=0
        )
        steps = [(step.at, run.setting.step_s) for step in run.steps]
        axes.broken_barh(steps, (-16, 12), facecolors=COLOURS["orange"], edgecolor="white", linewidth=0.5)
        axes.axvline(run.limit_s, color=COLOURS["grey"], linestyle="--", linewidth=1)
        axes.set(ylim=(-20, 105), xlim=(0, end), yticks=(0, 50, 100), ylabel="engine, %")
        title = f"{name}: {run.seconds:.0f} s, engine {run.busy:.0%} busy, staleness {run.stalest}"
        axes.set_title(title, loc="left", fontsize=10)
    panels[-1].set_xlabel("simulated seconds (bars below: training steps; dashed: the engine never idle)")
    save_figure(drawing, path)
