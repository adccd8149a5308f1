"""Attacks by a second user of the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from bench.security.outcomes import Report

UID = GID = 64_233  # of nobody here; the kernel needs no entry in /etc/passwd
WHO = "second user"
READ = """
import os, sys
for folder, _, names in os.walk(sys.argv[1]):
    for name in names:
        path = os.path.join(folder, name)
        if sys.argv[2] in path:
            try:
                with open(path, "rb") as file:
                    print("got", path, len(file.read()))
            except OSError:
                pass
try:
    with open(sys.argv[1], "rb") as file:
        print("got", len(file.read()))
except OSError:
    pass
"""
LIST = "import os, sys; print('got', os.listdir(sys.argv[1]))"
WRITE = "import os, sys; open(os.path.join(sys.argv[1], 'planted'), 'w').close(); print('got')"
REPLACE = "import os, sys; os.rename(sys.argv[1], sys.argv[1] + '.gone'); print('got')"
PROC = """
import os, sys
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        with open(f"/proc/{pid}/{sys.argv[1]}", "rb") as file:
            if sys.argv[2].encode() in file.read() and int(pid) != os.getpid():
                print("got", pid)
    except OSError:
        pass
"""
ASK = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode() or None, method=sys.argv[3])
request.add_header("Content-Type", "application/json")
if sys.argv[4]:
    request.add_header("X-Afield-Signature", sys.argv[4])
print("got", urllib.request.urlopen(request, timeout=20).status)
"""
UNIX = """
import glob, socket, sys
for path in glob.glob(sys.argv[1] + "/*"):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        print("got", path)
"""


class Targets(NamedTuple):
    """What there is to attack."""

    project: Path
    state: Path
    cells: Path
    worker: str
    served: str
    gateway: str
    admin_key: str
    forged: dict[str, Any]


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    python = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
    return subprocess.run(
        [python, "-c", code, *arguments],
        user=UID,
        group=GID,
        extra_groups=[],
        capture_output=True,
        text=True,
        cwd="/",
        env={"PATH": os.environ["PATH"]},
        timeout=60,
        check=False,
    )


def attack_as_other_user(targets: Targets, report: Report) -> None:
    def attack(name: str, code: str, *arguments: str) -> None:
        done = run(code, *arguments)
        detail = done.stdout.strip() or done.stderr.strip().rpartition("\n")[2]
        report.add(WHO, name, blocked=not done.stdout.startswith("got"), detail=detail)

    if not run(LIST, str(targets.project)).stdout.startswith("got"):
        raise SystemExit("the second user cannot even enter the project: the attacks would prove nothing")
    files(targets, attack)
    processes(targets, attack)


def files(targets: Targets, attack: Any) -> None:
    project, state = targets.project, targets.state
    store, run_dir = project / "gateway-store", project / "runs"
    attack("read_the_gateways_store", READ, str(store), "gateway.sqlite")
    attack("list_the_gateways_store", LIST, str(store))
    attack("write_into_the_gateways_store", WRITE, str(store))
    attack("replace_the_gateways_store", REPLACE, str(store))
    attack("read_the_signing_secret", READ, str(state), ".key")
    attack("list_the_signing_secrets", LIST, str(state / "afield" / "gateways"))
    attack("plant_a_signing_secret", WRITE, str(state / "afield" / "gateways"))
    attack("read_the_invocation_key", READ, str(state), "invocations.key")
    runs = sorted(run_dir.glob("*"))
    if not runs:
        raise SystemExit("there is no run to attack: let an agent run first (without --only user)")
    for name, part in (
        ("read_a_runs_configuration", "run.json"),
        ("read_a_runs_ledger", "run_state.sqlite"),
        ("read_a_runs_roster", "sessions.sqlite"),
        ("read_a_runs_outcomes", "outcomes"),
        ("read_a_runs_rollouts", "rollouts"),
        ("read_a_runs_logs", "logs"),
        ("read_a_runs_gateway_store", "gateway"),
        ("read_a_runs_queue_of_hints", "hints.sqlite"),
    ):
        attack(name, READ, str(run_dir), part)
    for folder in runs[:1]:
        attack("write_a_forged_commit_into_a_run", WRITE, str(folder / "outcomes"))
        attack("write_into_a_run", WRITE, str(folder))
    attack("read_logs_of_workers", READ, str(project / "logs"), ".log")


def processes(targets: Targets, attack: Any) -> None:
    attack("read_the_admin_key_in_arguments", PROC, "cmdline", targets.admin_key)
    attack("read_the_admin_key_in_environments", PROC, "environ", targets.admin_key)
    body = json.dumps({"_rollout": {**targets.forged, "outcome_url": f"file://{targets.project}/forged"}})
    for kind, url in (("worker", targets.worker), ("served_agent", targets.served)):
        attack(f"start_an_attempt_in_a_{kind}", ASK, f"{url}/invocations", body, "POST", "")
        attack(
            f"start_one_in_a_{kind}_with_a_made_up_signature", ASK, f"{url}/invocations", body, "POST", "1.0"
        )
        attack(f"stop_an_attempt_of_a_{kind}", ASK, f"{url}/invocations/forged.1", "", "DELETE", "")
    attack("open_a_session", ASK, f"{targets.gateway}/sessions", "{}", "POST", "")
    attack("connect_to_the_sockets_of_a_sandbox", UNIX, str(targets.cells))
    attack("list_the_sockets_of_a_sandbox", LIST, str(targets.cells))
