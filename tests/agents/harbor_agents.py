"""Agents for Harbor tasks: one with a shell, one that searches for tests and solution."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import afield
from afield.sdk.workspace import Workspace

CANARY = re.compile(rb"canary-[0-9a-f]{16}")
TASK_FILES = ("tests/test.sh", "solution/solve.sh", "task.toml", "instruction.md")
LARGE = ("/usr", sys.prefix, sys.base_prefix)
MAX_BYTES = 1 << 20
ADMIN_PATHS = ("/sessions", "/sessions/{id}", "/sessions/{id}/turns", "/sessions/{id}/submission", "/metrics")


@afield.agent
def shell(task: dict[str, Any], rollout: afield.Context) -> dict[str, Any]:
    """Run each reply of the model as a command, until it is DONE."""
    workspace = Workspace.open(task)
    messages = [{"role": "user", "content": task["instruction"]}]
    for _ in range(4):
        body = json.dumps({"model": rollout.model_id, "messages": messages}).encode()
        headers = {"Authorization": f"Bearer {rollout.api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{rollout.openai_base_url}/chat/completions", body, headers)
        with urllib.request.urlopen(request) as answer:
            message = json.load(answer)["choices"][0]["message"]
        messages.append(message)
        if message["content"].startswith("DONE"):
            break
        done = subprocess.run(
            ["bash", "-c", message["content"]], cwd=workspace.directory, capture_output=True, text=True
        )
        messages.append(
            {"role": "user", "content": f"exit code {done.returncode}\n{done.stdout}{done.stderr}"}
        )
    return {**workspace.submission()}


@afield.agent
def hostile(task: dict[str, Any], rollout: afield.Context) -> dict[str, Any]:
    """Search everything for traces of tests and solution; write them to findings.json."""
    workspace = Workspace.open(task)
    findings, files = search(["/", *rollout.args.get("look", [])])
    if CANARY.search(json.dumps(task).encode()):
        findings.append("payload")
    findings += gateway_leaks(rollout)
    report = {"findings": findings, "files": files}
    (workspace.directory / "findings.json").write_text(json.dumps(report))
    return {**workspace.submission()}


def search(roots: list[str]) -> tuple[list[str], int]:
    """Places that show a canary or a file of a task, and the number of files that were seen."""
    findings = [f"environment {name}" for name, value in os.environb.items() if CANARY.search(value)]
    files = 0
    for path in _files(roots):
        files += 1
        if not path.startswith(LARGE) and (path.endswith(TASK_FILES) or CANARY.search(_content(path))):
            findings.append(path)
    for process in map(str, Path("/proc").glob("[0-9]*")):
        records = (f"{process}/{name}" for name in ("environ", "cmdline", "mountinfo", "maps"))
        findings += [path for path in records if CANARY.search(_content(path))]
        folders = (f"{process}/{link}/{name}" for link in ("root", "cwd") for name in ("tests", "solution"))
        findings += [path for path in folders if os.path.lexists(path)]
    findings += [path for path in ("/tests", "/solution", "/.layers", "/.changes") if os.path.lexists(path)]
    return findings, files


def _files(roots: list[str]) -> Iterator[str]:
    for root in roots:
        for folder, folders, names in os.walk(root):
            if root == "/" and folder == "/":
                folders[:] = [name for name in folders if name not in ("proc", "sys", "dev")]
            yield from (f"{folder}/{name}" for name in names)


def _content(path: str) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        return os.read(descriptor, MAX_BYTES)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def gateway_leaks(rollout: afield.Context) -> list[str]:
    """Addresses of the gateway that answer the agent's key with a canary."""
    leaks: list[str] = []
    origin = "/".join(rollout.base_url.split("/")[:3])
    for base in (origin, rollout.base_url):
        for path in ADMIN_PATHS:
            url = base + path.format(id=rollout.session_id)
            request = urllib.request.Request(url, headers={"Authorization": f"Bearer {rollout.api_key}"})
            try:
                with urllib.request.urlopen(request, timeout=10) as answer:
                    content = answer.read()
            except urllib.error.HTTPError as error:
                content = error.read()
            except OSError:
                continue
            if CANARY.search(content) or b"task_path" in content:
                leaks.append(url)
    return leaks
