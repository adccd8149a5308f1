"""The engine's load over time, mode by mode, with the steps of the trainer below."""

from __future__ import annotations

from pathlib import Path

from sim.run import Result

SHOWN = ("async", "one step off", "sync")


def draw(results: dict[str, Result], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    end = max(results[name].seconds for name in SHOWN)
    figure, panels = pyplot.subplots(len(SHOWN), 1, sharex=True, figsize=(9, 5), dpi=110)
    for axes, name in zip(panels, SHOWN, strict=True):
        run = results[name]
        share = [100 * tokens / run.setting.total for tokens in run.served]
        axes.fill_between(range(len(share)), share, step="post", color="#2563eb", alpha=0.75, linewidth=0)
        steps = [(step.at, run.setting.step_s) for step in run.steps]
        axes.broken_barh(steps, (-16, 12), facecolors="#d97706", edgecolor="white", linewidth=0.5)
        axes.axvline(run.limit_s, color="#6b7280", linestyle="--", linewidth=1)
        axes.set(ylim=(-20, 105), xlim=(0, end), yticks=(0, 50, 100), ylabel="engine, %")
        told = f"{name}: {run.seconds:.0f} s, engine {run.busy:.0%} busy, staleness {run.stalest}"
        axes.set_title(told, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("simulated seconds (bars below: training steps; dashed: the engine never idle)")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
