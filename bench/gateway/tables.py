"""Gateway tables of docs/benchmarks.md, from a saved result of bench/gateway/cost.py."""

from __future__ import annotations

from typing import Any

from bench.gateway.charts import LABELS
from bench.gateway.workload import ANSWER
from bench.report import table, verdict

KINDS = {
    "small": "one answer",
    "stream": "streamed",
    "stream_paced": "streamed slowly",
    "turn_128": "32k history",
}
TURN_PARTS = {
    "turn_us": "in all",
    "reading_us": "reading, parsing and hashing the body",
    "own_us": "the rest",
}


def sections(run: dict[str, Any] | None) -> dict[str, Any]:
    if run is None:
        raise SystemExit("bench/results has no gateway-cost-*.json; run `python -m bench.gateway.cost`")
    servers, summary = run["servers"], run["summary"]
    afield = servers["afield"]
    return {
        "commit": run["commit"],
        "load": run["load_15m"],
        "wall": round(run["wall_s"] / 60, 1),
        "cores": run["machine"]["cores"],
        "python": run["machine"]["python"],
        "rllm": run["peers"]["rllm"],
        "litellm": run["peers"]["litellm"],
        "cpu": _cpu(servers),
        "pace": run["pace_ms"],
        "unknown": f"{afield['history_32k_unknown']['cpu_us']:,}",
        "forks": f"{afield['history_32k_forks']['cpu_us']:,}",
        "verdicts": _verdicts(summary),
        "rates": _rates(servers),
        "bytes": round(afield["turn_128"]["bytes"] / 1000),
        "turns": _turns(summary),
        "sessions": afield["memory"]["sessions"],
        "rss": afield["memory"]["open"],
        "empty": afield["memory"]["empty"],
    }


def _cpu(servers: dict[str, Any]) -> str:
    rows = [
        (label, *(f"{servers[name][kind]['cpu_us']:,}" for kind in KINDS)) for name, label in LABELS.items()
    ]
    return table(("", *KINDS.values()), rows)


def _rates(servers: dict[str, Any]) -> str:
    bare = servers["upstream"]["connections_1"]
    rows = []
    for name, label in LABELS.items():
        server = servers[name]
        rates = [f"{server[f'connections_{n}']['per_s']:,.0f}" for n in (1, 64, 512)]
        added = [f"{server['connections_1'][p] - bare[p]:.2f}" for p in ("p50_ms", "p99_ms")]
        rows.append((label, *rates, server["connections_512"]["errors"], *added))
    head = ("calls/s at 1", "at 64", "at 512", "errors at 512", "added p50, ms", "added p99, ms")
    return table(("", *head), rows)


def _turns(summary: dict[str, Any]) -> str:
    rows = []
    for key, label in TURN_PARTS.items():
        first, last = summary[key]["8"], summary[key]["128"]
        rows.append((label, f"{first:,.0f}", f"{last:,.0f}", f"{last / first:.2f}"))
    return table(("us of CPU", "turn 8", "turn 128", "ratio"), rows)


def requirements(summary: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Each requirement: its name, the measured value and the largest value that meets it."""
    cpu = summary["cpu_us"]
    afield, rllm, litellm, capture = (cpu[name] for name in ("afield", "rllm", "litellm", "capture"))
    return [
        ("one answer / rllm-model-gateway", afield["small"] / rllm["small"], 0.2),
        ("one answer / LiteLLM", afield["small"] / litellm["small"], 0.08),
        ("one answer / bare capture", afield["small"] / capture["small"], 1.5),
        ("streamed / rllm-model-gateway", afield["stream"] / rllm["stream"], 0.5),
        ("us per token streamed slowly", (afield["stream_paced"] - afield["small"]) / ANSWER, 25),
        ("errors with 512 calls in flight", summary["errors_512"], 0),
        ("own work, turn 128 / turn 8", summary["turn128_over_turn8"], 1.5),
        ("MiB with 2,000 sessions", summary["rss_mib_2000"], 1024),
    ]


def _verdicts(summary: dict[str, Any]) -> str:
    rows = [
        (name, f"{measured:.3g}", f"{limit:g}", verdict(measured <= limit))
        for name, measured, limit in requirements(summary)
    ]
    return table(("", "measured", "at most", ""), rows)
