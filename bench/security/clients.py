"""Attacks by HTTP clients with the key of one session, and without a key."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import hmac
import http.client
import json
import sqlite3
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from bench.security.outcomes import Report

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
REFUSED = (400, 401, 403, 404, 405, 409, 413, 422, 429)
ADMIN_ONLY = (
    ("list_sessions", "GET", "/sessions"),
    ("open_a_session", "POST", "/sessions"),
    ("read_the_state_of_a_session", "GET", "/sessions/victim.1"),
    ("read_the_turns_of_a_session", "GET", "/sessions/victim.1/turns"),
    ("read_the_trajectories_of_a_session", "GET", "/sessions/victim.1/trajectories"),
    ("read_what_another_agent_handed_in", "GET", "/sessions/victim.1/submission"),
    ("reward_a_session", "POST", "/sessions/victim.1/reward"),
    ("complete_a_session", "POST", "/sessions/victim.1/complete"),
    ("abort_a_session", "POST", "/sessions/victim.1/abort"),
    ("finalize_a_session", "POST", "/sessions/victim.1/finalize"),
    ("publish_weights", "POST", "/policy"),
    ("pause_the_engines", "POST", "/policy/pause"),
    ("list_engines", "GET", "/engines"),
    ("add_an_engine", "POST", "/engines"),
    ("remove_an_engine", "DELETE", "/engines/engine"),
    ("read_metrics", "GET", "/metrics"),
)


class Answer(NamedTuple):
    status: int
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Gateway:
    """A gateway as a client sees it."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "", parts.port or 80

    def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        sent = {"Content-Type": "application/json", **(headers or {})}
        sent |= {"Authorization": f"Bearer {key}"} if key is not None else {}
        data = body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
        with contextlib.closing(http.client.HTTPConnection(self.host, self.port, timeout=60)) as http_client:
            try:
                http_client.request(method, path, data, sent)
                response = http_client.getresponse()
                return Answer(response.status, response.read())
            except (OSError, http.client.HTTPException) as error:
                return Answer(0, repr(error).encode())


def opened(gateway: Gateway, admin_key: str, session_id: str, **spec: Any) -> dict[str, Any]:
    names = {"id": session_id, "rollout_id": session_id.partition(".")[0], "attempt": 1}
    answer = gateway.ask("POST", "/sessions", {**names, **spec}, admin_key)
    if answer.status not in (200, 201):
        raise SystemExit(f"session {session_id} was not opened: {answer}")
    return answer.json


# --- with a session's key ------------------------------------------------------------------------


def with_session_key(url: str, admin_key: str, report: Report) -> None:
    who, gateway = "client with a session key", Gateway(url)
    victim = opened(gateway, admin_key, "victim.1")
    mine = opened(gateway, admin_key, "mine.1", reward_from="verifier")
    key, other = mine["api_key"], victim["api_key"]
    if gateway.ask("POST", "/s/mine.1/v1/chat/completions", CHAT, key).status != 200:
        raise SystemExit("a session's own key does not work: attacks with it would prove nothing")

    def attack(name: str, answer: Answer) -> None:
        report.add(
            who, name, blocked=answer.status in REFUSED, detail=f"{answer.status} {answer.body[:120]!r}"
        )

    for name, method, path in ADMIN_ONLY:
        attack(name, gateway.ask(method, path, None, key))
    attack(
        "call_the_model_for_another_session",
        gateway.ask("POST", "/s/victim.1/v1/chat/completions", CHAT, key),
    )
    attack(
        "say_that_another_session_is_done", gateway.ask("POST", "/s/victim.1/outcome", {"reward": 1.0}, key)
    )
    attack("reward_itself", gateway.ask("POST", "/s/mine.1/reward", {"reward": 1.0}, key))
    for name, path in (("turns", "turns"), ("trajectories", "trajectories"), ("submission", "submission")):
        attack(f"read_its_own_{name}_without_the_scope", gateway.ask("GET", f"/s/mine.1/{path}", None, key))
    session, scopes, nonce, mac = key.split("~")
    for name, forged in {
        "widen_its_scopes": f"{session}~infer.outcome.read.reward~{nonce}~{mac}",
        "drop_the_signature": f"{session}~reward~{nonce}~",
        "name_another_session": f"afk-victim.1~{scopes}~{nonce}~{mac}",
        "use_the_nonce_of_another_session": f"{session}~{scopes}~{other.split('~')[2]}~{mac}",
        "cut_the_signature_short": key[:-1],
        "sign_with_an_empty_secret": _signed(b"", f"mine.1~reward~{nonce}"),
        "sign_with_words_of_its_own": _signed(b"a secret of its own", f"mine.1~reward~{nonce}"),
    }.items():
        attack(name, gateway.ask("POST", "/s/mine.1/reward", {"reward": 1.0}, forged))
    attack(
        "climb_out_of_its_session", gateway.ask("POST", "/s/mine.1/../victim.1/reward", {"reward": 1}, key)
    )
    attack("encode_the_path_of_another", gateway.ask("POST", "/s/victim%2E1/outcome", {"reward": 1.0}, key))
    two = {"X-Api-Key": other, "Authorization": f"Bearer {key}"}
    attack("bring_two_keys", gateway.ask("POST", "/s/mine.1/reward", {"reward": 1.0}, None, two))
    huge = json.dumps({"artifacts": {"x": "x" * (20 * 2**20)}}).encode()
    attack("hand_in_more_than_may_be", gateway.ask("POST", "/s/mine.1/outcome", huge, key))
    bomb = gzip.compress(bytes(300 * 2**20), 9)
    zipped = {"Content-Encoding": "gzip"}
    began = time.monotonic()
    attack(
        "send_a_body_that_inflates", gateway.ask("POST", "/s/mine.1/v1/chat/completions", bomb, key, zipped)
    )
    healthy = gateway.ask("GET", "/health").status == 200 and time.monotonic() - began < 60
    report.add(
        who, "keep_others_waiting_with_it", blocked=healthy, detail=f"{time.monotonic() - began:.1f} s"
    )
    outcome = gateway.ask("POST", "/s/mine.1/outcome", {"reward": 1.0, "artifacts": {"a": 1}}, key)
    state = gateway.ask("GET", "/sessions/mine.1", None, admin_key).json
    graded = bool(state.get("graded")) or bool(state.get("rewards"))
    report.add(who, "smuggle_a_reward_into_what_it_hands_in", blocked=not graded, detail=str(outcome.status))
    gateway.ask("POST", "/s/mine.1/outcome", {"artifacts": {"a": 1}}, key)
    attack(
        "hand_in_something_else_afterwards",
        gateway.ask("POST", "/s/mine.1/outcome", {"artifacts": {"a": 2}}, key),
    )
    attack("go_on_after_the_end", gateway.ask("POST", "/s/mine.1/v1/chat/completions", CHAT, key))
    gateway.ask("DELETE", "/sessions/victim.1", None, admin_key)
    opened(gateway, admin_key, "victim.1")
    attack(
        "use_the_key_of_a_deleted_session_for_its_successor",
        gateway.ask("POST", "/s/victim.1/v1/chat/completions", CHAT, other),
    )


def _signed(secret: bytes, body: str) -> str:
    return f"afk-{body}~{hmac.new(secret, body.encode(), hashlib.sha256).hexdigest()[:40]}"


# --- without a key -------------------------------------------------------------------------------


def without_key(url: str, admin_key: str, store: Path, report: Report) -> None:
    who, gateway = "client without a key", Gateway(url)
    chat = "/s/victim.1/v1/chat/completions"

    def attack(name: str, answer: Answer) -> None:
        report.add(
            who, name, blocked=answer.status in REFUSED, detail=f"{answer.status} {answer.body[:120]!r}"
        )

    for name, method, path in ADMIN_ONLY:
        attack(name, gateway.ask(method, path))
    attack("call_the_model", gateway.ask("POST", chat, CHAT))
    attack("call_the_model_without_a_session", gateway.ask("POST", "/v1/chat/completions", CHAT))
    with contextlib.closing(sqlite3.connect(f"file:{store / 'gateway.sqlite'}?mode=ro", uri=True)) as db:
        held = [bytes(value) for (value,) in db.execute("SELECT value FROM meta")]
    for name, key in {
        "bring_an_empty_key": "",
        "guess_the_admin_key": admin_key[:-1],
        "guess_a_session_key": "afk-victim.1~infer~00000000~" + "0" * 40,
        "bring_a_key_with_no_parts": "afk-",
        "bring_a_key_of_other_letters": "afk-victim.1~infer~\u00ff~0".encode().decode("latin-1"),
    }.items():
        attack(name, gateway.ask("POST", chat, CHAT, key))
    good = [_signed(value, "victim.1~infer~00000000") for value in held]
    answers = [gateway.ask("POST", chat, CHAT, key) for key in good]
    report.add(
        who,
        "sign_with_what_the_store_holds",
        blocked=all(answer.status in REFUSED for answer in answers),
        detail=f"{len(answers)} values",
    )
    attempts: dict[str, Callable[[], Answer]] = {
        "bring_the_key_in_the_address": lambda: gateway.ask("GET", f"/sessions?key={admin_key}x&api_key=x"),
        "use_another_scheme": lambda: gateway.ask(
            "GET", "/sessions", headers={"Authorization": f"Basic {admin_key}"}
        ),
        "override_the_method": lambda: gateway.ask(
            "POST", "/engines/engine", headers={"X-HTTP-Method-Override": "GET"}
        ),
        "climb_to_the_sessions": lambda: gateway.ask("GET", "/health/../sessions"),
        "pretend_to_be_passed_on": lambda: gateway.ask(
            "GET", "/sessions", headers={"X-Forwarded-For": "127.0.0.1", "X-Afield-Passed": "1"}
        ),
    }
    for name, attempt in attempts.items():
        attack(name, attempt())
