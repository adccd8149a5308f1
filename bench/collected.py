"""The tables about collection in docs/benchmarks.md, of a saved run of `make accept PART=collect`."""

from __future__ import annotations

from typing import Any

UNMEASURED = "No numbers are saved yet: `make accept PART=collect` measures them."
NAMES = ("throughput", "chaos", "delivery", "memory", "modes")


def sections(run: dict[str, Any] | None) -> dict[str, str]:
    if run is None:
        return dict.fromkeys(NAMES, UNMEASURED) | {"origin": UNMEASURED}
    told, machine = run["runs"], run["machine"]
    origin = (
        f"The numbers are of commit `{run['commit']}`, on a machine with {machine['cores']} cores and Python"
        f" {machine['python']}."
    )
    return {
        "origin": origin,
        "throughput": _throughput(told["throughput"]),
        "chaos": _chaos(told["chaos"]),
        "delivery": _delivery(told["delivery"]),
        "memory": _memory(told["memory"]),
        "modes": table(
            ("mode", "first", "last", "stalest", "seconds"),
            [
                (f"`{mode}`", *(told[mode][key] for key in ("first", "last", "staleness", "wall_s")))
                for mode in ("one-step-off", "async")
            ],
        ),
    }


def _throughput(told: dict[str, Any]) -> str:
    limit = told["limit"]
    rows = [
        ("engine busy, asynchronous", f"{told['busy']:.1%}", "at least 90 %", "100 %"),
        ("... until the last rollout began", f"{told['busy_until_last_begun']:.1%}", "", "100 %"),
        ("... with nothing cut", f"{told['busy_nothing_cut']:.1%}", "", "100 %"),
        ("asynchronous over synchronous rate", told["async_over_sync"], "at least 2", ""),
        ("one step off over synchronous rate", told["one_step_off_over_sync"], "", ""),
        ("tokens wasted", f"{told['waste']:.2%}", "at most 5 %", f"{limit['waste']:.2%}"),
        ("greatest staleness, in versions", told["max_staleness"], "at most 2", ""),
    ]
    worst = f"The worst of {len(told['seeds'])} seeds:"
    return f"{worst}\n\n{table(('', 'seen', 'wanted', 'limit'), rows)}"


def _chaos(told: dict[str, Any]) -> str:
    calm = told["calm"]
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(told["kills_by_kind"].items()))
    rows = [
        ("kills", f"{told['kills']} ({kinds})", calm["kills"], "at least 40"),
        ("... while starting, half way through a step", _pair(told), _pair(calm), ""),
        ("trained groups equal the data set", *_said(told, calm, "trained_equals_dataset"), "yes"),
        ("rollouts trained", told["rollouts"], calm["rollouts"], "800"),
        ("trained twice", told["duplicates"], calm["duplicates"], "0"),
        ("left behind", told["orphans"], calm["orphans"], "0"),
        ("attempts", told["attempts"], calm["attempts"], ""),
        ("attempts that died with their agent", told["died_with_agents"], calm["died_with_agents"], ""),
        ("reused", f"{told['reused']:.1%}", "", "at least 95 %"),
        ("greatest staleness, in versions", told["max_staleness"], calm["max_staleness"], "at most 2"),
        ("lengths as without kills, p", told["ks_p"], "", "at least 0.01"),
    ]
    return table(("", "with kills", "without", "wanted"), rows)


def _pair(told: dict[str, Any]) -> str:
    return f"{told['kills_in_starts']}, {told['kills_in_steps']}"


def _said(told: dict[str, Any], calm: dict[str, Any], name: str) -> tuple[str, str]:
    return "yes" if told[name] else "**no**", "yes" if calm[name] else "**no**"


def _delivery(told: dict[str, Any]) -> str:
    sweep = f"slowest below {told['poll_interval_s']:g}, the sweep's interval"
    rows = [
        ("with messages", told["rollouts"], told["median_s"], f"{told['p99_s']} (p99)", "median below 0.5"),
        ("every message dropped", told["dropped"], told["dropped_median_s"], told["dropped_max_s"], sweep),
    ]
    return table(("", "rollouts", "median, s", "slowest, s", "wanted"), rows)


def _memory(told: dict[str, Any]) -> str:
    samples = [(f"{n:,}", f"{rss:.0f}", f"{objects:,}") for n, rss, objects in told["samples"][::3]]
    grown = told["growth"]
    rows = [*samples, ("grown", f"{grown['rss_mib']:.1%}", f"{grown['objects']:.1%}")]
    return table(("rollouts", "MiB resident", "objects of Python"), rows)


def table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("".join(f"| {cell} " if cell != "" else "| " for cell in line) + "|" for line in lines)
