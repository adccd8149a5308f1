"""The tables about places in docs/benchmarks.md, of saved runs: the parts `runtimes` and `crowd`."""

from __future__ import annotations

from typing import Any

from collected import table

UNMEASURED = "No numbers are saved yet: `make accept PART=runtimes` and `PART=crowd` measure them."
NAMES = ("origin", "starts", "crowd", "throttle", "demos")


def sections(run: dict[str, Any] | None, of_many: dict[str, Any] | None) -> dict[str, str]:
    if run is None or of_many is None:
        return dict.fromkeys(NAMES, UNMEASURED)
    told, machine, crowd = run["runs"], run["machine"], of_many["runs"]
    throttle = told["throttle"]
    origin = (
        f"The numbers are of commit `{run['commit']}`, those of starts and of the crowd of"
        f" `{of_many['commit']}`, on a machine with {machine['cores']} cores and Python {machine['python']}."
    )
    starts = [(place, *(times or ("-", "-"))) for place, times in crowd["start_ms"].items()]
    many = [
        ("sandboxes at once", crowd["peak"], "at least 500"),
        ("rollouts", crowd["sessions"], ""),
        ("... that failed", crowd["failed"], "0"),
        ("controller's memory, first and second wave", _mib(crowd["controller_mib"]), "flat"),
        ("memory of one sandbox", f"{crowd['cells_mib']} MiB", ""),
        ("processes left after SIGKILL of the controller", crowd["orphans"], "0 after 30 s"),
    ]
    limit = [
        ("session starts a second", throttle["rate_per_s"], f"limit {throttle['limit_per_s']}"),
        ("share of the limit", f"{throttle['share']:.1%}", "at least 95 %"),
        ("calls answered 429", f"{throttle['throttled']:.2%}", "at most 1 %"),
        ("rollouts that failed", throttle["failed"], "0"),
    ]
    demos = [
        (f"`{name.removeprefix('demo, ')}`", one["first"], one["last"], one["rollouts"], one["wall_s"])
        for name, one in told.items()
        if name.startswith("demo, ")
    ]
    return {
        "origin": origin,
        "starts": table(("place", "median, ms", "99th percentile, ms"), starts),
        "crowd": table(("", "seen", "wanted"), many),
        "throttle": table(("", "seen", "wanted"), limit),
        "demos": table(("runtime", "first", "last", "rollouts", "seconds"), demos),
    }


def _mib(levels: list[float]) -> str:
    return " and ".join(f"{level:.0f}" for level in levels) + " MiB"
