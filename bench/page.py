"""docs/benchmarks.md, written from saved runs so that it says what was measured: `python bench/page.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import collected
import placed
import trained
from charts import LABELS

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PAGE = HERE.parent / "docs" / "benchmarks.md"


def rewrite() -> None:
    write(saved(), PAGE)


def saved() -> dict[str, Any]:
    return json.loads((RESULTS / "gateway.json").read_text())


def write(run: dict[str, Any], path: Path) -> None:
    path.write_text(text(run))


def text(run: dict[str, Any]) -> str:
    """The whole page: this run of the gateway's benchmark, and the newest saved ones of the other parts."""
    collecting = (HERE / "collection.md").read_text().format(**collected.sections(_newest("collect")))
    places = (HERE / "places.md").read_text().format(**placed.sections(_newest("runtimes"), _newest("crowd")))
    lines = trained.sections(*map(_newest, ("trainers", "tree", "engine", "publish", "smollm")))
    return _gateway(run) + collecting + places + (HERE / "training.md").read_text().format(**lines)


def _newest(part: str) -> dict[str, Any] | None:
    """A run that does not say when it ended is older than one that does."""
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"{part}-*.json"))]
    return max(found, key=lambda one: one.get("ended", ""), default=None)


def _gateway(run: dict[str, Any]) -> str:
    servers, line = run["servers"], run["summary"]
    mine = servers["afield"]
    return (
        (HERE / "page.md")
        .read_text()
        .format(
            commit=run["commit"],
            load=run["load_15m"],
            wall=round(run["wall_s"] / 60, 1),
            cores=run["machine"]["cores"],
            python=run["machine"]["python"],
            rllm=run["peers"]["rllm"],
            litellm=run["peers"]["litellm"],
            cpu=_cpu(servers),
            pace=run["pace_ms"],
            unknown=f"{mine['history_32k_unknown']['cpu_us']:,}",
            forks=f"{mine['history_32k_forks']['cpu_us']:,}",
            verdicts=_verdicts(servers, line),
            rates=_rates(servers),
            bytes=round(mine["turn_128"]["bytes"] / 1000),
            turns=_turns(line),
            sessions=mine["memory"]["sessions"],
            rss=mine["memory"]["open"],
            empty=mine["memory"]["empty"],
        )
    )


def _cpu(servers: dict[str, Any]) -> str:
    kinds = {"small": "one answer", "stream": "streamed", "stream_paced": "streamed slowly"}
    kinds["turn_128"] = "32k history"
    rows = [f"| | {' | '.join(kinds.values())} |", "| --- " * (len(kinds) + 1) + "|"]
    for name, label in LABELS.items():
        rows.append(f"| {label} | " + " | ".join(f"{servers[name][k]['cpu_us']:,}" for k in kinds) + " |")
    return "\n".join(rows)


def _rates(servers: dict[str, Any]) -> str:
    head = "| | calls/s at 1 | at 64 | at 512 | errors at 512 | added p50, ms | added p99, ms |"
    rows = [head, "| --- " * 7 + "|"]
    bare = servers["upstream"]["connections_1"]
    for name, label in LABELS.items():
        told = servers[name]
        one = told["connections_1"]
        rates = [f"{told[f'connections_{n}']['per_s']:,.0f}" for n in (1, 64, 512)]
        added = [f"{one[p] - bare[p]:.2f}" for p in ("p50_ms", "p99_ms")]
        errors = str(told["connections_512"]["errors"])
        rows.append(f"| {label} | {' | '.join([*rates, errors, *added])} |")
    return "\n".join(rows)


def _turns(line: dict[str, Any]) -> str:
    parts = {"turn_us": "in all", "reading_us": "reading, parsing and hashing the body", "own_us": "the rest"}
    rows = []
    for key, label in parts.items():
        first, last = line[key]["8"], line[key]["128"]
        rows.append(f"| {label} | {first:,.0f} | {last:,.0f} | {last / first:.2f} |")
    return "\n".join(rows)


def verdicts(line: dict[str, Any]) -> list[tuple[str, float, float]]:
    """What was aimed at: a name, what was seen, and the most that was wanted."""
    cpu = line["cpu_us"]
    mine, rllm, litellm, capture = (cpu[name] for name in ("afield", "rllm", "litellm", "capture"))
    return [
        ("one answer / rllm-model-gateway", mine["small"] / rllm["small"], 0.2),
        ("one answer / LiteLLM", mine["small"] / litellm["small"], 0.08),
        ("one answer / bare capture", mine["small"] / capture["small"], 4),
        ("streamed / rllm-model-gateway", mine["stream"] / rllm["stream"], 0.5),
        ("us per streamed token", line["us_per_streamed_token"], 40),
        ("errors with 512 calls in flight", line["errors_512"], 0),
        ("own work, turn 128 / turn 8", line["turn128_over_turn8"], 1.5),
        ("MiB with 2,000 sessions", line["rss_mib_2000"], 1024),
    ]


def _verdicts(servers: dict[str, Any], line: dict[str, Any]) -> str:
    rows = ["", "| | seen | at most | |", "| --- | --- | --- | --- |"]
    for name, seen, most in verdicts(line):
        rows.append(f"| {name} | {seen:.3g} | {most:g} | {'met' if seen <= most else '**missed**'} |")
    return "\n".join(rows)


if __name__ == "__main__":
    rewrite()
