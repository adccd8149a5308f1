"""The control API: sessions, their turns and trajectories, and the policy. See docs/http-api.md."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

from msgspec import Struct, to_builtins

from afield import assembly
from afield.gateway.http import Scope, json_body, query
from afield.gateway.refusal import Refusal, bad_request, not_found
from afield.gateway.service import LocalGateway
from afield.gateway.sessions import Session
from afield.seams import SessionSpec
from afield.types import Policy, Turn

Answer = tuple[int, Any]
MAX_WAIT_S = 300.0


class RewardBody(Struct):
    reward: Any
    name: str | None = None
    turn: str | None = None


class CompleteBody(Struct):
    reward: Any = None
    metrics: dict[str, float] = {}


class AbortBody(Struct):
    reason: str = ""


class PolicyBody(Struct):
    version: int
    path: str


def encode_error(refusal: Refusal) -> dict[str, Any]:
    return {"error": {"type": refusal.code, "message": refusal.message, "hint": refusal.hint}}


async def handle(gateway: LocalGateway, scope: Scope, path: str, body: bytes) -> Answer:
    for method, pattern, handler in ROUTES:
        if scope["method"] == method and (found := pattern.fullmatch(path)):
            return await handler(gateway, found.groupdict().get("id", ""), body, query(scope))
    raise not_found(f"{scope['method']} {path} is not served", "see docs/http-api.md for what is")


async def report(gateway: LocalGateway, session: Session, path: str, body: bytes) -> dict[str, Any]:
    """What an agent may report with its own key."""
    handler = reward if path == "/reward" else complete
    return (await handler(gateway, session.id, body, {}))[1]


async def open_session(gateway: LocalGateway, _: str, body: bytes, __: dict[str, str]) -> Answer:
    session, new = await gateway.sessions.open(json_body(body, SessionSpec))
    return (201 if new else 200), gateway.ticket(session)


async def list_sessions(gateway: LocalGateway, _: str, __: bytes, asked: dict[str, str]) -> Answer:
    limit = _number(asked, "limit", 100)
    limit = int(max(1, min(limit, 1000)))
    states = gateway.sessions.list(asked.get("phase"), limit, asked.get("after", ""))
    return 200, {"sessions": states}


async def get_session(gateway: LocalGateway, session_id: str, _: bytes, __: dict[str, str]) -> Answer:
    return 200, await gateway.state(session_id)


async def delete_session(gateway: LocalGateway, session_id: str, _: bytes, __: dict[str, str]) -> Answer:
    await gateway.sessions.delete(gateway.sessions.get(session_id))
    return 200, {"id": session_id, "deleted": True}


async def reward(gateway: LocalGateway, session_id: str, body: bytes, _: dict[str, str]) -> Answer:
    asked = json_body(body, RewardBody)
    await gateway.sessions.reward(gateway.sessions.get(session_id), to_builtins(asked))
    return 200, await gateway.state(session_id)


async def complete(gateway: LocalGateway, session_id: str, body: bytes, _: dict[str, str]) -> Answer:
    asked = json_body(body, CompleteBody)
    session = gateway.sessions.get(session_id)
    if asked.reward is not None:
        await gateway.sessions.reward(session, {"reward": asked.reward})
    await gateway.sessions.complete(session, asked.metrics)
    return 200, session.state()


async def abort(gateway: LocalGateway, session_id: str, body: bytes, _: dict[str, str]) -> Answer:
    await gateway.abort(session_id, json_body(body, AbortBody).reason)
    return 200, await gateway.state(session_id)


async def finalize(gateway: LocalGateway, session_id: str, _: bytes, __: dict[str, str]) -> Answer:
    return 200, await gateway.finalize(session_id)


async def wait(gateway: LocalGateway, session_id: str, _: bytes, asked: dict[str, str]) -> Answer:
    end = time.monotonic() + min(_number(asked, "timeout_s", 30.0), MAX_WAIT_S)
    return 200, await gateway.wait(session_id, lambda: end - time.monotonic())


async def turns(gateway: LocalGateway, session_id: str, _: bytes, asked: dict[str, str]) -> Answer:
    session = gateway.sessions.get(session_id)
    with_prompt = asked.get("prompt_ids") == "1"
    rows = sorted(session.rows.values(), key=lambda row: (row.seq, row.n))
    return 200, {"turns": [_turn(session, row.turn, with_prompt) for row in rows]}


def _turn(session: Session, turn: Turn, with_prompt: bool) -> dict[str, Any]:
    shown = to_builtins(turn)
    delta = shown.pop("delta_ids")
    before = session.forest.ids(turn.parent) if turn.parent else []
    shown |= {"kind": "sampled", "prompt_len": len(before) + len(delta)}
    if with_prompt:
        shown["prompt_ids"] = [*before, *delta]
    return shown


async def trajectories(gateway: LocalGateway, session_id: str, _: bytes, asked: dict[str, str]) -> Answer:
    session = gateway.sessions.get(session_id)
    withheld = gateway.withheld(session)
    form = asked.get("form", "linear")
    if form == "tree":
        excluded = assembly.exclusions(session.forest, withheld)
        return 200, {"nodes": assembly.tree(session.forest, withheld), "excluded": excluded}
    if form not in ("linear", "turns"):
        raise bad_request(f"unknown form {form!r}", "choose one of: linear, tree, turns")
    return 200, (assembly.linear if form == "linear" else assembly.per_turn)(session.forest, withheld)


async def policy(gateway: LocalGateway, _: str, body: bytes, __: dict[str, str]) -> Answer:
    asked = json_body(body, PolicyBody)
    await gateway.publish(Policy(gateway.tokens.name, asked.version), asked.path)
    return 200, {"version": asked.version}


def _number(asked: dict[str, str], name: str, default: float) -> float:
    try:
        return float(asked.get(name, default))
    except ValueError as error:
        raise bad_request(f"{name}={asked[name]!r} is not a number") from error


Handler = Callable[[LocalGateway, str, bytes, dict[str, str]], Awaitable[Answer]]
SESSION = r"/sessions/(?P<id>[^/]+)"
ROUTES: list[tuple[str, re.Pattern[str], Handler]] = [
    (method, re.compile(pattern), handler)
    for method, pattern, handler in (
        ("POST", "/sessions", open_session),
        ("GET", "/sessions", list_sessions),
        ("GET", SESSION, get_session),
        ("DELETE", SESSION, delete_session),
        ("POST", f"{SESSION}/reward", reward),
        ("POST", f"{SESSION}/complete", complete),
        ("POST", f"{SESSION}/abort", abort),
        ("POST", f"{SESSION}/finalize", finalize),
        ("GET", f"{SESSION}/wait", wait),
        ("GET", f"{SESSION}/turns", turns),
        ("GET", f"{SESSION}/trajectories", trajectories),
        ("POST", "/policy", policy),
    )
]
