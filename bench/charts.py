"""Charts of a saved run, as SVG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLOURS = {"afield": "#2563eb", "rllm": "#d97706", "litellm": "#9333ea", "capture": "#6b7280"}
LABELS = {
    "afield": "afield",
    "rllm": "rllm-model-gateway",
    "litellm": "LiteLLM proxy",
    "capture": "bare capture proxy",
}
KINDS = {
    "small": "one answer\n(600 in, 200 out)",
    "stream": "streamed\n(200 tokens)",
    "turn_128": "32k-token history\n(one answer)",
}


def draw(run: dict[str, Any], into: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "afield"  # the same numbers give the same file
    into.mkdir(exist_ok=True)
    servers = {name: run["servers"][name] for name in LABELS if name in run["servers"]}
    _cost(servers, into / "gateway-cpu.svg")
    _rates(servers, into / "gateway-rate.svg")
    _turns(servers, run["summary"]["reading_us"], into / "gateway-turns.svg")


def _cost(servers: dict[str, Any], path: Path) -> None:
    figure, axes = _figure()
    width = 0.8 / len(servers)
    for n, (name, told) in enumerate(servers.items()):
        at = [k + (n - (len(servers) - 1) / 2) * width for k in range(len(KINDS))]
        values = [told[kind]["cpu_us"] / 1000 for kind in KINDS]
        bars = axes.bar(at, values, width, color=COLOURS[name], label=LABELS[name])
        axes.bar_label(bars, [f"{value:.3g}" for value in values], fontsize=8, padding=2)
    axes.set_xticks(range(len(KINDS)), KINDS.values())
    axes.set(yscale="log", ylabel="CPU per call, ms (log scale)", title="What a call costs the gateway")
    _save(figure, axes, path)


def _rates(servers: dict[str, Any], path: Path) -> None:
    figure, axes = _figure()
    for name, told in servers.items():
        loads = [n for n in (1, 64, 512) if f"connections_{n}" in told]
        rates = [told[f"connections_{n}"]["per_s"] for n in loads]
        axes.plot(range(len(loads)), rates, marker="o", color=COLOURS[name], label=LABELS[name])
    axes.set_xticks(range(3), ["1", "64", "512"])
    axes.set(yscale="log", xlabel="connections", ylabel="calls per second (log scale)", title="Throughput")
    _save(figure, axes, path)


def _turns(servers: dict[str, Any], reading: dict[str, float], path: Path) -> None:
    figure, axes = _figure()
    for name, told in servers.items():
        costs = {turn: told[f"turn_{turn}"]["cpu_us"] / 1000 for turn in (8, 32, 64, 96, 128)}
        axes.plot(list(costs), list(costs.values()), marker="o", color=COLOURS[name], label=LABELS[name])
    mine = servers["afield"]
    own = {int(turn): (mine[f"turn_{turn}"]["cpu_us"] - us) / 1000 for turn, us in reading.items()}
    label = "afield, without reading what is re-sent"
    axes.plot(list(own), list(own.values()), linestyle=":", marker="o", color=COLOURS["afield"], label=label)
    axes.set_xticks([8, 32, 64, 96, 128])
    axes.set(yscale="log", xlabel="turn of a conversation", ylabel="CPU per call, ms (log scale)")
    axes.set_title("A growing conversation: 250 more tokens every turn")
    _save(figure, axes, path)


def _figure() -> tuple[Any, Any]:
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(8, 4.5))


def _save(figure: Any, axes: Any, path: Path) -> None:
    from matplotlib import pyplot

    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
