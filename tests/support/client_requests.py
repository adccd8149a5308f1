"""Requests of real clients, at the versions `afield conformance` pins, in the shape they have on the wire.

Long texts are stand-ins, tools the first few of each kind; roles, parts, ids and fields are the clients' own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp

from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.interfaces import SessionRecord, SessionSpec
from support.gateways import running
from support.paths import TESTS

FILE = TESTS / "fixtures" / "client_requests.jsonl"
MAX_CONTEXT = 200_000


def requests() -> dict[str, list[dict[str, Any]]]:
    """By client, in the order in which it sent them: `path` and `body`."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in FILE.read_text().splitlines():
        request = json.loads(line)
        found.setdefault(request.pop("client"), []).append(request)
    return found


async def replay(model: Path, store: Path, **spec: Any) -> tuple[dict[str, SessionRecord], list[str]]:
    """What each client's session recorded with this model, and the requests that got no answer."""
    unanswered: list[str] = []
    records: dict[str, SessionRecord] = {}
    engine = ScriptedEngine(lambda _: ScriptedReply(token_ids=(7, 8, 9)), max_context=MAX_CONTEXT)
    async with running(engine, store, model) as up, aiohttp.ClientSession() as http:
        for client, sent in requests().items():
            ticket = await up.client.open(SessionSpec(id=client, **spec))
            headers = {"authorization": f"Bearer {ticket.api_key}"}
            for n, request in enumerate(sent):
                url = f"{up.url}/s/{client}{request['path']}"
                async with http.post(url, json=request["body"], headers=headers) as response:
                    text = await response.text()
                    if response.status != 200 or '"error":{' in text:
                        unanswered.append(f"{client} {n}: {response.status} {text[-300:]}")
            records[client] = await up.client.finalize(client)
    return records, unanswered
