"""Export of runs into one self-contained HTML file.

The file has the page's style, libraries and modules inline, allowed by their hashes alone, and the server's
answers for each page, compressed. Turns and tokens of the newest rollouts are included up to `MAX_BYTES`.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from afield.errors import AfieldError, DamagedFile, NotFound
from afield.ui.app import STATIC, Runs, data
from afield.ui.data import RunData
from afield.ui.views import SHOWN_TEXT, as_text
from afield.utils.durable_files import write_whole

MAX_BYTES = 40_000_000
"""Compressed bytes of rollouts above which older ones are left out."""
LIBRARIES = ("htm-preact-3.1.1.js", "uplot-1.6.32.js", "d3-hierarchy-3.1.3.js")
STYLES = ("vendor/uplot-1.6.32.css", "style.css")
_IMPORT = re.compile(r'^import \{.*\} from "\.{1,2}/(.*)";\n', re.MULTILINE)
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>afield</title><link rel="icon" href="data:,">
<style>{style}</style></head>
<body><div id="app"></div>
<script type="application/json" id="data">{data}</script>
{scripts}
</body></html>
"""


def export_html(runs: Sequence[RunData], path: Path) -> dict[str, Any]:
    """Write the file; returns its size, the numbers of runs, of whole rollouts and of others, and errors of
    runs that cannot be read."""
    answers: dict[str, str] = {}
    source = Runs(lambda: runs)

    def add(address: str) -> int:
        body = data(source, address, {}).body
        answers[address] = base64.b64encode(gzip.compress(body, 6, mtime=0)).decode()
        return len(answers[address])

    add("/api/runs")
    included = left_out = size = 0
    unreadable: dict[str, str] = {}
    for run in runs:
        base = f"/api/runs/{_quoted(run.key)}"
        try:
            for name in ("", "/rollouts.bin", "/excluded", "/timeline", "/events"):
                add(base + name)
        except (AfieldError, OSError, sqlite3.Error) as error:
            unreadable[run.key] = str(error)
            continue
        for rollout_id, group_id in _newest(run):
            if size > MAX_BYTES:
                left_out += 1
                continue
            try:
                size += sum(
                    add(f"{base}/{kind}/{_quoted(rollout_id)}") for kind in ("rollouts", "tokens", "text")
                )
                size += sum(add(address) for address in _whole_messages(run, base, rollout_id))
            except (NotFound, DamagedFile):  # its file was removed, or cannot be read
                left_out += 1
                continue
            if (group := f"{base}/groups/{_quoted(group_id)}") not in answers:
                size += add(group)
            included += 1
    text = page(answers)
    write_whole(path.absolute(), text.encode(), private=True)
    return {
        "bytes": len(text.encode()),
        "runs": len(runs) - len(unreadable),
        "rollouts": included,
        "left_out": left_out,
        "unreadable": unreadable,
    }


def _newest(run: RunData) -> Iterator[tuple[str, str]]:
    for row in run.query("SELECT id, group_id FROM rollouts ORDER BY seq DESC"):
        yield row["id"], row["group_id"]


def _whole_messages(run: RunData, base: str, rollout_id: str) -> Iterator[str]:
    """Addresses of texts that the rollout's page cuts: task, returned values, and messages of turns."""
    rollout = run.rollout(rollout_id)
    values = (as_text(rollout.record.rollout.task.input), as_text(rollout.record.returned))
    if any(len(text) > SHOWN_TEXT for text in values):
        yield f"{base}/values/{_quoted(rollout_id)}"
    for segment in rollout.segments:
        if cut_messages(segment.turn.messages):
            yield f"{base}/messages/{_quoted(rollout_id)}/{_quoted(segment.turn.id)}"


def cut_messages(messages: Sequence[Any]) -> bool:
    texts = (t for m in messages for t in (m.content, m.reasoning, *(c.arguments for c in m.tool_calls)))
    return any(len(text) > SHOWN_TEXT for text in texts)


def _quoted(name: str) -> str:
    """As JavaScript's encodeURIComponent."""
    return quote(name, safe="!~*'()")


def page(answers: dict[str, str]) -> str:
    style = "\n".join((STATIC / name).read_text() for name in STYLES)
    scripts = [("", (STATIC / "vendor" / name).read_text()) for name in LIBRARIES]
    scripts.append((' type="module"', bundle()))
    policy = (
        f"default-src 'none'; script-src {' '.join(_hash(body) for _, body in scripts)};"
        f" style-src {_hash(style)};"
        " img-src data:; base-uri 'none'; form-action 'none';"
        " require-trusted-types-for 'script'; trusted-types 'none'"
    )
    return _PAGE.format(
        policy=policy,
        style=style,
        data=json.dumps(answers).replace("<", "\\u003c"),
        scripts="\n".join(f"<script{kind}>{body}</script>" for kind, body in scripts),
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def bundle(entry: str = "app.js") -> str:
    """The modules in the order of their imports, as one; names at their top level are unique."""
    sources: dict[str, str] = {}

    def add(name: str) -> None:
        if name in sources:
            return
        text = (STATIC / name).read_text()
        sources[name] = ""
        for imported in _IMPORT.findall(text):
            add(imported)
        del sources[name]  # behind its imports
        sources[name] = re.sub(r"^export ", "", _IMPORT.sub("", text), flags=re.MULTILINE)

    add(entry)
    return "\n".join(sources.values())
