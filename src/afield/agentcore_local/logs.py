"""What sessions printed, as CloudWatch Logs would answer `FilterLogEvents`: by the prefix of a log stream.

Streams are `YYYY/MM/DD/[runtime-logs-SESSION]...`; the day is not looked at. Patterns and times are not
modelled.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from afield.agentcore_local.errors import invalid
from afield.agentcore_local.http import Request
from afield.agentcore_local.requests import read

TARGET = "Logs_20140328.FilterLogEvents"
STREAM = re.compile(r"^\d{4}/\d\d/\d\d/\[runtime-logs-([A-Za-z0-9][A-Za-z0-9._-]{0,127})\]$")
LAST_BYTES = 1024 * 1024


def asked(request: Request) -> bool:
    return request.method == "POST" and request.headers.get("x-amz-target", "") == TARGET


async def answer(request: Request, folder: Path) -> None:
    wish: dict[str, Any] = read(await request.body(), dict[str, Any])
    found = STREAM.match(str(wish.get("logStreamNamePrefix", "")))
    if found is None or wish.get("filterPattern"):
        raise invalid(
            "logStreamNamePrefix", "this local server finds logs by YYYY/MM/DD/[runtime-logs-SESSION] only"
        )
    events = [event for path in _files(folder, found[1]) for event in _events(path, found[0])]
    await request.answer(200, {"events": events, "searchedLogStreams": []})


def _files(folder: Path, session_id: str) -> list[Path]:
    """One for each time the session was started, oldest first."""
    number = re.compile(rf"^{re.escape(session_id)}-(\d+)\.log$")
    found = ((number.match(path.name), path) for path in folder.iterdir())
    return [path for _, path in sorted((int(match[1]), path) for match, path in found if match)]


def _events(path: Path, stream: str) -> list[dict[str, object]]:
    at = int(path.stat().st_mtime * 1000)
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LAST_BYTES))
        lines = file.read().decode("utf-8", "replace").splitlines()
    return [
        {
            "logStreamName": f"{stream}{path.stem}",
            "timestamp": at,
            "ingestionTime": at,
            "message": line,
            "eventId": str(n),
        }
        for n, line in enumerate(lines)
    ]
