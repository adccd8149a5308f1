"""Every method of every interface, what a fault of it is about, and what must hold then.

A method that is not in `METHODS` fails tests/orchestrator/test_faults.py:
whoever adds one says here what it concerns.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from msgspec import Struct

from afield.errors import root_cause
from afield.transports.stores.memory import MemoryTransport
from afield.types import Failure
from support import virtual_time
from support.faults import ERRORS, MARK, Fault, Script, every_fault
from support.simulated_run import Parts, every_rollout, run

ONE = "faults-e0-t1-r3"  # the faulty one of 32
About = Literal["rollout", "run", "restart", "unused"]

# rollout: calls about one rollout are faulty, all of them.
# run: the call concerns the whole run; its first call is faulty.
# restart: only asked when a run is resumed; about one rollout.
# unused: nothing that collects or trains calls it (people and commands do).
METHODS: dict[str, About] = {
    "Gateway.open": "rollout",
    "Gateway.state": "rollout",
    "Gateway.states": "rollout",
    "Gateway.version": "run",
    "Gateway.abort": "rollout",
    "Gateway.finalize": "rollout",
    "Gateway.submission": "rollout",
    "Gateway.publish": "run",
    "Runtime.capabilities": "run",
    "Runtime.check": "unused",  # before the first launch: what it raises keeps the run from starting
    "Runtime.launch": "rollout",
    "Runtime.adopt": "restart",
    "Runtime.wait": "rollout",
    "Runtime.stop": "rollout",
    "Runtime.status": "rollout",
    "Runtime.list": "unused",
    "Runtime.logs": "unused",
    "Transport.held_s": "restart",
    "Transport.address": "run",
    "Transport.deliver": "rollout",
    "Transport.decision": "rollout",
    "Transport.commit_result": "rollout",
    "Transport.fence": "rollout",
    "Transport.hints": "run",
    "Transport.acknowledge": "rollout",
    "Transport.unacknowledged": "run",  # once, when everything is collected
    "Transport.sweep": "rollout",
    "Transport.late": "unused",  # asked once, when everything is collected
    "Engine.info": "run",
    "Engine.generate": "rollout",
    "Engine.load": "run",
    "Sandbox.exec": "rollout",
    "Sandbox.upload": "rollout",
    "Sandbox.download": "rollout",
    "Trainer.context": "unused",
    "Trainer.step": "run",
    "Trainer.export": "run",
    "Trainer.save": "run",
    "Trainer.restore": "restart",
}
# The verifiers' runtime is the same interface at another place.
VERIFIERS = ("Verifiers.launch", "Verifiers.wait")


class Case(Struct, frozen=True):
    """One fault of one method."""

    method: str
    fault: Fault
    about: About

    def __str__(self) -> str:
        return f"{self.method} {self.fault.name}"


def every_case() -> Iterator[Case]:
    for method, about in [*METHODS.items(), *((method, "rollout") for method in VERIFIERS)]:
        for fault in every_fault():
            if about != "unused" and not _impossible(method, fault):
                yield Case(method, fault, about)


def _impossible(method: str, fault: Fault) -> bool:
    """A property or a function that is no coroutine cannot hang; a step in a thread has no deadline."""
    at_once = method in ("Runtime.capabilities", "Transport.held_s", "Transport.address")
    blocking = method.startswith("Trainer.")
    return fault.kind in ("hang", "slow", "late") and (at_once or blocking)


def problems(case: Case) -> list[str]:
    """What does not hold when this call is faulty: empty when all is well."""
    logging.getLogger("afield").setLevel(logging.CRITICAL + 1)
    try:
        with tempfile.TemporaryDirectory(prefix="afield-faults-") as place:
            return virtual_time.run(_problems(case, Path(place)))
    finally:
        logging.getLogger("afield").setLevel(logging.NOTSET)


async def _problems(case: Case, place: Path) -> list[str]:
    store = MemoryTransport()
    about_one = case.about == "rollout"
    script = Script(
        case.method, case.fault, rollout=ONE if about_one else None, numbers=None if about_one else [0]
    )
    parts = Parts(script, store, stuck=f"{ONE}.1" if case.method in IN_TROUBLE else None)
    try:
        result = await run(place, parts)
    except Exception as error:  # noqa: BLE001  what it was is looked at
        if about_one:
            return [f"the run ended: {error!r}"]
        # It may end the run, with that very error; then the same run goes on and loses nothing.
        told = str(root_cause(error))
        if MARK not in told and case.fault.kind != "hang":
            return [f"the run ended with another error: {error!r}"]
        result = await run(place, Parts(Script("", case.fault), store, parts.inner))
    wrong = [one for one in every_rollout() if result.trained[one] != 1]
    if case.about == "run":  # a call for the whole run may still be about the rollout that made it
        wrong = [one for one in wrong if _unexplained(case, result.finished[one].outcome.failure)]
    found = [f"{one} was trained {result.trained[one]} times" for one in wrong if one != ONE or not about_one]
    if about_one and ONE in wrong:
        failure = result.finished[ONE].outcome.failure if ONE in result.finished else None
        found += _unexplained(case, failure)
    if about_one and not script.met:
        found.append("the fault was never met")
    return found


# Asked only about attempts that are in trouble already: the agent of the faulty one never ends by itself.
IN_TROUBLE = ("Gateway.abort", "Transport.fence", "Runtime.status", "Runtime.stop")
# Whoever delivers is elsewhere; the collector sees that nothing comes.
ELSEWHERE = ("Transport.deliver",)
DEADLINE = ("within", " after ", " for ")


def _unexplained(case: Case, failure: Failure | None) -> list[str]:
    if failure is None:
        return [f"{ONE} was neither trained nor explained"]
    told = case.fault.kind in ("raise", "lost") and case.method not in ELSEWHERE
    if told and MARK not in failure.message:
        return [f"the failure does not say what it was: {failure.message}"]
    if case.fault.kind == "raise" and case.fault.error not in ERRORS:
        return [f"no such error: {case.fault.error}"]
    if not any(word in failure.message for word in (*DEADLINE, MARK)):
        return [f"the failure names no deadline: {failure.message}"]
    return []


def sample() -> list[Case]:
    """A few faults of every method, each fault of some method: what a quick test looks at."""
    cases: dict[str, list[Case]] = {}
    for case in every_case():
        cases.setdefault(case.method, []).append(case)
    chosen: list[Case] = []
    for n, of_method in enumerate(cases.values()):
        always = [case for case in of_method if case.fault.name in ("Unavailable", "hang")]
        others = [case for case in of_method if case not in always]
        chosen += [*always, others[n % len(others)]]
    return chosen
