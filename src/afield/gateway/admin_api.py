"""Admin API: sessions, turns, trajectories, keys, engines, policy.

See docs/reference/http-api.md.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from msgspec import Struct, to_builtins

from afield import trajectories
from afield.gateway import outcomes
from afield.gateway.api_error import ApiError, bad_request, conflict, forbidden, not_found
from afield.gateway.header_keys import HeaderKeySpec, public_fields
from afield.gateway.http import PlainText, Scope, json_body, query
from afield.gateway.service import LocalGateway
from afield.gateway.session_keys import Grant, KeyScope
from afield.gateway.sessions import Session, SessionPhase
from afield.interfaces import SessionSpec
from afield.types import Policy, Turn

Answer = tuple[int, Any]
Handler = Callable[[LocalGateway, str, bytes, dict[str, str]], Awaitable[Answer]]
log = logging.getLogger(__name__)
MAX_WAIT_S = 300.0
"""Maximum duration of a `wait` request, in seconds."""
MAX_STATES = 5_000
"""Maximum of session ids in one `states` request."""


class RewardBody(Struct):
    """Body of `POST /sessions/ID/reward`."""

    reward: Any
    """Value of the reward."""
    name: str | None = None
    """Name of the reward; None for the main reward."""
    turn: str | None = None
    """Turn that is rewarded; None for the whole attempt."""


class CompleteBody(Struct):
    """Body of `POST /sessions/ID/complete`."""

    reward: Any = None
    """Reward of the attempt; None for none."""
    metrics: dict[str, float] = {}
    """Metrics by name."""


class AbortBody(Struct):
    """Body of `POST /sessions/ID/abort`."""

    reason: str = ""
    """Reason, for the record."""


class StatesBody(Struct):
    """Body of `POST /sessions/states`."""

    ids: list[str]
    """Session ids."""


class PolicyBody(Struct):
    """Body of `POST /policy`."""

    version: int
    """Version of the weights."""
    path: str = ""
    """Model directory from which engines load the weights; empty if they have them."""


class PauseBody(Struct):
    """Body of `POST /policy/pause`."""

    in_flight: Literal["keep", "drain", "resume"] = "keep"
    """Handling of running calls; see `EnginePool.pause`."""


class EngineBody(Struct):
    """Body of `POST /engines`."""

    kind: str
    """Engine kind, such as `vllm`."""
    url: str
    """Engine URL."""


def encode_error(error: ApiError) -> dict[str, Any]:
    return {"error": {"type": error.code, "message": error.message, "hint": error.hint}}


async def handle(gateway: LocalGateway, scope: Scope, path: str, body: bytes) -> Answer:
    for method, pattern, handler in ROUTES:
        if scope["method"] == method and (match := pattern.fullmatch(path)):
            return await handler(gateway, match.groupdict().get("id", ""), body, query(scope))
    raise not_found(f"{scope['method']} {path} is not served", "see docs/reference/http-api.md for what is")


class SessionRoute(Struct, frozen=True):
    """Route under a session's base URL."""

    needs: KeyScope
    """Scope that the key needs."""
    handler: Handler
    """Handler of the route."""


async def handle_session(
    gateway: LocalGateway, session: Session, grant: Grant | None, scope: Scope, path: str, body: bytes
) -> Any:
    """Handles a session request of an agent or a verifier; `grant` is None for the admin key."""
    if path == "/outcome":
        return await outcome(gateway, session, grant, body)
    if path == "/complete" and grant and KeyScope.REWARD not in grant.scopes:
        _refuse_reward(session, json_body(body, CompleteBody).reward)
    handler = SESSION_ROUTES[scope["method"], path].handler
    return (await handler(gateway, session.id, body, query(scope)))[1]


async def outcome(gateway: LocalGateway, session: Session, grant: Grant | None, body: bytes) -> Any:
    """Records the outcome of an attempt. Idempotent."""
    agent = grant is not None and KeyScope.REWARD not in grant.scopes
    verdict = outcomes.judged(session.row.spec) and not agent
    statement = outcomes.read(body, session.row, verdict=verdict)
    if agent:
        _refuse_reward(session, statement.any_reward)
    await gateway.record_outcome(session, statement, verdict=verdict)
    return session.state()


def _refuse_reward(session: Session, reward: Any) -> None:
    if reward is not None:
        log.warning("session %s: reward by the agent refused reward=%.200s", session.id, repr(reward))
        raise forbidden("this key may not give a reward", "the session's verifier does")


async def open_session(gateway: LocalGateway, _: str, body: bytes, __: dict[str, str]) -> Answer:
    session, new = await gateway.open_session(json_body(body, SessionSpec))
    return (201 if new else 200), gateway.credentials(session)


async def list_sessions(gateway: LocalGateway, _: str, __: bytes, params: dict[str, str]) -> Answer:
    limit, phase = _number(params, "limit", 100), params.get("phase")
    if not limit >= 1:
        raise bad_request(f"limit={params['limit']} must be at least 1")
    if phase is not None and phase not in list(SessionPhase):
        raise bad_request(f"unknown phase {phase!r}", f"choose one of: {', '.join(SessionPhase)}")
    after, key_id = params.get("after", ""), params.get("key", "")
    return 200, {"sessions": await gateway.list_sessions(phase, int(min(limit, 1000)), after, key_id)}


async def create_key(gateway: LocalGateway, _: str, body: bytes, __: dict[str, str]) -> Answer:
    row, new = await gateway.header_keys.create(json_body(body, HeaderKeySpec))
    return (201 if new else 200), gateway.header_key_credentials(row)


async def list_keys(gateway: LocalGateway, _: str, __: bytes, ___: dict[str, str]) -> Answer:
    return 200, {"keys": [public_fields(row) for row in gateway.header_keys.list()]}


async def delete_key(gateway: LocalGateway, key_id: str, _: bytes, __: dict[str, str]) -> Answer:
    await gateway.header_keys.delete(key_id)
    return 200, {"id": key_id, "deleted": True}


async def get_session(gateway: LocalGateway, session_id: str, _: bytes, __: dict[str, str]) -> Answer:
    return 200, await gateway.state(session_id)


async def session_states(gateway: LocalGateway, _: str, body: bytes, __: dict[str, str]) -> Answer:
    request = json_body(body, StatesBody)
    if len(request.ids) > MAX_STATES:
        raise bad_request(f"{len(request.ids)} ids; at most {MAX_STATES} at once", "ask in several requests")
    return 200, {"sessions": await gateway.states(request.ids)}


async def delete_session(gateway: LocalGateway, session_id: str, _: bytes, __: dict[str, str]) -> Answer:
    await gateway.sessions.delete(gateway.sessions.get(session_id))
    return 200, {"id": session_id, "deleted": True}


async def reward(gateway: LocalGateway, session_id: str, body: bytes, _: dict[str, str]) -> Answer:
    request = json_body(body, RewardBody)
    session = gateway.sessions.get(session_id)
    await gateway.sessions.reward(session, to_builtins(request))
    await gateway.deliver(session)
    return 200, await gateway.state(session_id)


async def alive(gateway: LocalGateway, session_id: str, _: bytes, __: dict[str, str]) -> Answer:
    session = gateway.sessions.get(session_id)
    session.alive()
    return 200, {"phase": session.phase}


async def complete(gateway: LocalGateway, session_id: str, body: bytes, _: dict[str, str]) -> Answer:
    request = json_body(body, CompleteBody)
    session = gateway.sessions.get(session_id)
    if request.reward is not None:
        await gateway.sessions.reward(session, {"reward": request.reward})
    await gateway.sessions.complete(session, request.metrics)
    await gateway.deliver(session)
    return 200, session.state()


async def abort(gateway: LocalGateway, session_id: str, body: bytes, _: dict[str, str]) -> Answer:
    await gateway.abort(session_id, json_body(body, AbortBody).reason)
    return 200, await gateway.state(session_id)


async def finalize(gateway: LocalGateway, session_id: str, _: bytes, __: dict[str, str]) -> Answer:
    return 200, await gateway.finalize(session_id)


async def wait(gateway: LocalGateway, session_id: str, _: bytes, params: dict[str, str]) -> Answer:
    deadline = time.monotonic() + min(_number(params, "timeout_s", 30.0), MAX_WAIT_S)
    return 200, await gateway.wait(session_id, lambda: deadline - time.monotonic())


async def submission(gateway: LocalGateway, session_id: str, _: bytes, __: dict[str, str]) -> Answer:
    handed_in = await gateway.submission(session_id)
    if handed_in is None:
        raise conflict(f"the agent of session {session_id} has submitted no result yet", "ask again later")
    return 200, handed_in


async def turns(gateway: LocalGateway, session_id: str, _: bytes, params: dict[str, str]) -> Answer:
    session = gateway.sessions.get(session_id)
    with_prompt = params.get("prompt_ids") == "1"
    rows = sorted(session.rows.values(), key=lambda row: (row.seq, row.n))
    return 200, {"turns": [_turn(session, row.turn, with_prompt) for row in rows]}


def _turn(session: Session, turn: Turn, with_prompt: bool) -> dict[str, Any]:
    fields = to_builtins(turn)
    delta = fields.pop("delta_ids")
    parent_ids = session.tree.ids(turn.parent) if turn.parent else []
    fields |= {"kind": "sampled", "prompt_len": len(parent_ids) + len(delta)}
    if with_prompt:
        fields["prompt_ids"] = [*parent_ids, *delta]
    return fields


async def get_trajectories(
    gateway: LocalGateway, session_id: str, _: bytes, params: dict[str, str]
) -> Answer:
    session = gateway.sessions.get(session_id)
    reasons, dangling = gateway.excluded(session), gateway.dangling(session)
    form = params.get("form", "linear")
    if form == "tree":
        excluded = [*trajectories.exclusions(session.tree, reasons), *dangling]
        return 200, {"nodes": trajectories.tree(session.tree, reasons), "excluded": excluded}
    if form not in ("linear", "turns"):
        raise bad_request(f"unknown form {form!r}", "choose one of: linear, tree, turns")
    assembled = (trajectories.linear if form == "linear" else trajectories.per_turn)(session.tree, reasons)
    return 200, {"trajectories": assembled.trajectories, "excluded": [*assembled.excluded, *dangling]}


async def engines(gateway: LocalGateway, _: str, __: bytes, ___: dict[str, str]) -> Answer:
    return 200, {"engines": gateway.engine.list()}


async def add_engine(gateway: LocalGateway, _: str, body: bytes, __: dict[str, str]) -> Answer:
    request = json_body(body, EngineBody)
    return 201, await gateway.engine.add(request.kind, request.url)


async def remove_engine(gateway: LocalGateway, engine_id: str, _: bytes, __: dict[str, str]) -> Answer:
    await gateway.engine.remove(engine_id)
    return 200, {"id": engine_id, "removed": True}


async def pause(gateway: LocalGateway, _: str, body: bytes, __: dict[str, str]) -> Answer:
    request = json_body(body, PauseBody)
    await gateway.engine.pause(request.in_flight)
    return 200, {"paused": True, "in_flight": request.in_flight}


async def resume(gateway: LocalGateway, _: str, __: bytes, ___: dict[str, str]) -> Answer:
    await gateway.engine.resume()
    return 200, {"paused": False}


async def metrics(gateway: LocalGateway, _: str, __: bytes, ___: dict[str, str]) -> Answer:
    return 200, PlainText(await gateway.exposition())


async def snapshot(gateway: LocalGateway, _: str, __: bytes, ___: dict[str, str]) -> Answer:
    return 200, gateway.snapshot()


async def policy(gateway: LocalGateway, _: str, body: bytes, __: dict[str, str]) -> Answer:
    request = json_body(body, PolicyBody)
    await gateway.publish(Policy(gateway.tokenizer.name, request.version), request.path)
    return 200, {"version": request.version}


async def served_policy(gateway: LocalGateway, _: str, __: bytes, ___: dict[str, str]) -> Answer:
    model = await asyncio.to_thread(lambda: gateway.tokenizer.identity)
    return 200, {"version": await gateway.version(), "model": model}


def _number(params: dict[str, str], name: str, default: float) -> float:
    try:
        return float(params.get(name, default))
    except ValueError as error:
        raise bad_request(f"{name}={params[name]!r} is not a number") from error


SESSION = r"/sessions/(?P<id>[^/]+)"
ROUTES: list[tuple[str, re.Pattern[str], Handler]] = [
    (method, re.compile(pattern), handler)
    for method, pattern, handler in (
        ("POST", "/sessions", open_session),
        ("GET", "/sessions", list_sessions),
        ("POST", "/sessions/states", session_states),
        ("POST", "/keys", create_key),
        ("GET", "/keys", list_keys),
        ("DELETE", "/keys/(?P<id>[^/]+)", delete_key),
        ("GET", SESSION, get_session),
        ("DELETE", SESSION, delete_session),
        ("POST", f"{SESSION}/reward", reward),
        ("POST", f"{SESSION}/complete", complete),
        ("POST", f"{SESSION}/abort", abort),
        ("POST", f"{SESSION}/finalize", finalize),
        ("GET", f"{SESSION}/wait", wait),
        ("GET", f"{SESSION}/submission", submission),
        ("GET", f"{SESSION}/turns", turns),
        ("GET", f"{SESSION}/trajectories", get_trajectories),
        ("GET", "/policy", served_policy),
        ("POST", "/policy", policy),
        ("POST", "/policy/pause", pause),
        ("POST", "/policy/resume", resume),
        ("GET", "/engines", engines),
        ("POST", "/engines", add_engine),
        ("DELETE", "/engines/(?P<id>[^/]+)", remove_engine),
        ("GET", "/metrics", metrics),
        ("GET", "/metrics/snapshot", snapshot),
    )
]
# Routes under a session's base URL, with the key scope that each needs.
SESSION_ROUTES: dict[tuple[str, str], SessionRoute] = {
    ("POST", "/alive"): SessionRoute(KeyScope.INFER, alive),
    ("POST", "/reward"): SessionRoute(KeyScope.REWARD, reward),
    ("POST", "/complete"): SessionRoute(KeyScope.OUTCOME, complete),
    ("POST", "/outcome"): SessionRoute(KeyScope.OUTCOME, complete),
    ("GET", "/state"): SessionRoute(KeyScope.READ, get_session),
    ("GET", "/submission"): SessionRoute(KeyScope.READ, submission),
    ("GET", "/turns"): SessionRoute(KeyScope.READ, turns),
    ("GET", "/trajectories"): SessionRoute(KeyScope.READ, get_trajectories),
}
