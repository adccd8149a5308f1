"""Runtime tables of docs/benchmarks.md, from saved results of parts `runtimes` and `crowd`."""

from __future__ import annotations

from typing import Any

from bench.report import table

UNMEASURED = "Not measured yet; run `make accept PART=runtimes` and `make accept PART=crowd`."
NAMES = ("origin", "starts", "crowd", "throttle", "demos")


def sections(run: dict[str, Any] | None, crowd_run: dict[str, Any] | None) -> dict[str, str]:
    if run is None or crowd_run is None:
        return dict.fromkeys(NAMES, UNMEASURED)
    result, machine, crowd = run["runs"], run["machine"], crowd_run["runs"]
    throttle = result["throttle"]
    origin = (
        f"The numbers are of commit `{run['commit']}`, those of starts and of the crowd of"
        f" `{crowd_run['commit']}`, on a machine with {machine['cores']} cores and Python"
        f" {machine['python']}."
    )
    starts = [(runtime, *(times or ("-", "-"))) for runtime, times in crowd["start_ms"].items()]
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
        for name, one in result.items()
        if name.startswith("demo, ")
    ]
    return {
        "origin": origin,
        "starts": table(("runtime", "median, ms", "99th percentile, ms"), starts),
        "crowd": table(("", "measured", "required"), many),
        "throttle": table(("", "measured", "required"), limit),
        "demos": table(("runtime", "first", "last", "rollouts", "seconds"), demos),
    }


def _mib(levels: list[float]) -> str:
    return " and ".join(f"{level:.0f}" for level in levels) + " MiB"
