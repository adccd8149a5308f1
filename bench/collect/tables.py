"""Collection tables of docs/benchmarks.md, from a saved result of part `collect`."""

from __future__ import annotations

from typing import Any

from bench.report import table

UNMEASURED = "Not measured yet; run `make accept PART=collect`."
NAMES = ("throughput", "chaos", "delivery", "memory", "modes")


def sections(run: dict[str, Any] | None) -> dict[str, str]:
    if run is None:
        return dict.fromkeys(NAMES, UNMEASURED) | {"origin": UNMEASURED}
    result, machine = run["runs"], run["machine"]
    origin = (
        f"The numbers are of commit `{run['commit']}`, on a machine with {machine['cores']} cores and Python"
        f" {machine['python']}."
    )
    return {
        "origin": origin,
        "throughput": _throughput(result["throughput"]),
        "chaos": _chaos(result["chaos"]),
        "delivery": _delivery(result["delivery"]),
        "memory": _memory(result["memory"]),
        "modes": table(
            ("mode", "first", "last", "stalest", "seconds"),
            [
                (f"`{mode}`", *(result[mode][key] for key in ("first", "last", "staleness", "wall_s")))
                for mode in ("one-step-off", "async")
            ],
        ),
    }


def _throughput(result: dict[str, Any]) -> str:
    limit = result["limit"]
    rows = [
        ("engine busy, asynchronous", f"{result['busy']:.1%}", "at least 90 %", "100 %"),
        ("... until the last rollout began", f"{result['busy_until_last_begun']:.1%}", "", "100 %"),
        ("... with nothing cut", f"{result['busy_nothing_cut']:.1%}", "", "100 %"),
        ("asynchronous over synchronous rate", result["async_over_sync"], "at least 2", ""),
        ("rate of one-step-off / rate of sync", result["one_step_off_over_sync"], "", ""),
        ("tokens wasted", f"{result['waste']:.2%}", "at most 5 %", f"{limit['waste']:.2%}"),
        ("greatest staleness, in versions", result["max_staleness"], "at most 2", ""),
    ]
    worst = f"The worst of {len(result['seeds'])} seeds:"
    return f"{worst}\n\n{table(('', 'measured', 'required', 'limit'), rows)}"


def _chaos(result: dict[str, Any]) -> str:
    calm = result["calm"]
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(result["kills_by_kind"].items()))
    rows = [
        ("kills", f"{result['kills']} ({kinds})", calm["kills"], "at least 40"),
        ("... while starting, half way through a step", _pair(result), _pair(calm), ""),
        ("trained groups equal the data set", *_yes_or_no(result, calm, "trained_equals_dataset"), "yes"),
        ("rollouts trained", result["rollouts"], calm["rollouts"], "800"),
        ("trained twice", result["duplicates"], calm["duplicates"], "0"),
        ("left behind", result["orphans"], calm["orphans"], "0"),
        ("attempts", result["attempts"], calm["attempts"], ""),
        ("attempts that died with their agent", result["died_with_agents"], calm["died_with_agents"], ""),
        ("reused", f"{result['reused']:.1%}", "", "at least 95 %"),
        ("greatest staleness, in versions", result["max_staleness"], calm["max_staleness"], "at most 2"),
        ("lengths as without kills, p", result["ks_p"], "", "at least 0.01"),
    ]
    return table(("", "with kills", "without", "required"), rows)


def _pair(result: dict[str, Any]) -> str:
    return f"{result['kills_in_starts']}, {result['kills_in_steps']}"


def _yes_or_no(result: dict[str, Any], calm: dict[str, Any], name: str) -> tuple[str, str]:
    return "yes" if result[name] else "**no**", "yes" if calm[name] else "**no**"


def _delivery(result: dict[str, Any]) -> str:
    sweep = f"slowest below {result['poll_interval_s']:g}, the sweep's interval"
    rows = [
        (
            "with messages",
            result["rollouts"],
            result["median_s"],
            f"{result['p99_s']} (p99)",
            "median below 0.5",
        ),
        (
            "every message dropped",
            result["dropped"],
            result["dropped_median_s"],
            result["dropped_max_s"],
            sweep,
        ),
    ]
    return table(("", "rollouts", "median, s", "slowest, s", "required"), rows)


def _memory(result: dict[str, Any]) -> str:
    samples = [(f"{n:,}", f"{rss:.0f}", f"{objects:,}") for n, rss, objects in result["samples"][::3]]
    grown = result["growth"]
    rows = [*samples, ("grown", f"{grown['rss_mib']:.1%}", f"{grown['objects']:.1%}")]
    return table(("rollouts", "MiB resident", "objects of Python"), rows)
