"""Gateway charts of docs/benchmarks.md, from a saved result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.report import COLOURS, figure, save_figure

SERVER_COLOURS = dict(zip(("afield", "rllm", "litellm", "capture"), COLOURS.values(), strict=True))
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


def draw(run: dict[str, Any], folder: Path) -> None:
    servers = {name: run["servers"][name] for name in LABELS if name in run["servers"]}
    _cost(servers, folder / "gateway-cpu.svg")
    _rates(servers, folder / "gateway-rate.svg")
    _turns(servers, run["summary"]["reading_us"], folder / "gateway-turns.svg")


def _cost(servers: dict[str, Any], path: Path) -> None:
    drawing, axes = figure()
    width = 0.8 / len(servers)
    for n, (name, result) in enumerate(servers.items()):
        positions = [k + (n - (len(servers) - 1) / 2) * width for k in range(len(KINDS))]
        values = [result[kind]["cpu_us"] / 1000 for kind in KINDS]
        bars = axes.bar(positions, values, width, color=SERVER_COLOURS[name], label=LABELS[name])
        axes.bar_label(bars, [f"{value:.3g}" for value in values], fontsize=8, padding=2)
    axes.set_xticks(range(len(KINDS)), KINDS.values())
    axes.set(yscale="log", ylabel="CPU per call, ms (log scale)", title="What a call costs the gateway")
    _save(drawing, axes, path)


def _rates(servers: dict[str, Any], path: Path) -> None:
    drawing, axes = figure()
    for name, result in servers.items():
        loads = [n for n in (1, 64, 512) if f"connections_{n}" in result]
        rates = [result[f"connections_{n}"]["per_s"] for n in loads]
        axes.plot(range(len(loads)), rates, marker="o", color=SERVER_COLOURS[name], label=LABELS[name])
    axes.set_xticks(range(3), ["1", "64", "512"])
    axes.set(yscale="log", xlabel="connections", ylabel="calls per second (log scale)", title="Throughput")
    _save(drawing, axes, path)


def _turns(servers: dict[str, Any], reading: dict[str, float], path: Path) -> None:
    drawing, axes = figure()
    for name, result in servers.items():
        costs = {turn: result[f"turn_{turn}"]["cpu_us"] / 1000 for turn in (8, 32, 64, 96, 128)}
        axes.plot(
            list(costs), list(costs.values()), marker="o", color=SERVER_COLOURS[name], label=LABELS[name]
        )
    mine = servers["afield"]
    own = {int(turn): (mine[f"turn_{turn}"]["cpu_us"] - us) / 1000 for turn, us in reading.items()}
    label = "afield, without reading what is re-sent"
    axes.plot(
        list(own), list(own.values()), linestyle=":", marker="o", color=SERVER_COLOURS["afield"], label=label
    )
    axes.set_xticks([8, 32, 64, 96, 128])
    axes.set(yscale="log", xlabel="turn of a conversation", ylabel="CPU per call, ms (log scale)")
    axes.set_title("A growing conversation: 250 more tokens every turn")
    _save(drawing, axes, path)


def _save(drawing: Any, axes: Any, path: Path) -> None:
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8, frameon=False)
    save_figure(drawing, path)
