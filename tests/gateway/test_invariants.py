"""The invariants: each holds in an honest session, and each is seen to fail when the code is broken."""

# Code is broken on purpose where it is: inside.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from transformers import AutoModelForCausalLM

from afield import trajectories
from afield.chat import ChatTokenizer, TextDelta
from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.engines.torch import decoder
from afield.engines.torch.engine import TorchEngine
from afield.gateway import calls, prompts, session_keys
from afield.gateway.app import GatewayApp
from afield.gateway.call_accumulator import CallAccumulator
from afield.gateway.calls import Calls
from afield.gateway.dialects.anthropic import AnthropicStream
from afield.gateway.dialects.chat import ChatStream
from afield.gateway.model_request import CallDelta
from afield.gateway.store import TurnRow
from afield.interfaces import Chunk
from afield.types import TurnStatus, VersionSpan
from support.dialect_clients import DIALECTS, knock
from support.dialect_session import Place, in_order, place, said, scene, user
from support.gateways import POLICY
from support.invariants import SINGLE, TOKENIZER, Seen, i5, i6, i8, i11

pytestmark = pytest.mark.anyio
NAMED = {"idempotency-key": "the first request"}
Broken = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="afield.gateway")


def failing(seen: Seen) -> dict[str, str]:
    wrong: dict[str, str] = {}
    for name, check in SINGLE.items():
        try:
            check(seen)
        except AssertionError as error:
            wrong[name] = str(error).partition("\n")[0]
    return wrong


# --- broken on purpose ----------------------------------------------------------------------------


def history_is_rendered_anew(patch: pytest.MonkeyPatch) -> None:
    """The prompt that is sent is a rendering of the whole, the one that is recorded is the parent's."""
    real = Calls._call

    def sent(self: Any, session: Any, request: Any, *rest: Any) -> Any:
        whole = tuple(self._tokenizer.render(request.messages, request.tools))
        return structs.replace(real(self, session, request, *rest), prompt_ids=whole)

    patch.setattr(Calls, "_call", sent)


def replies_are_tokenised_anew(patch: pytest.MonkeyPatch) -> None:
    real = Calls._ended

    def ended(self: Any, intent: Any, partial: Any, *rest: Any) -> Any:
        made = real(self, intent, partial, *rest)
        text = TOKENIZER.decode(list(made.token_ids), skip_special_tokens=False)
        ids = tuple(TOKENIZER.encode(text, add_special_tokens=False).ids)
        spans = (VersionSpan(0, len(ids), 0, 0),)
        return structs.replace(made, token_ids=ids, logprobs=(-0.5,) * len(ids), versions=spans)

    patch.setattr(Calls, "_ended", ended)


def two_tokens_change_places(patch: pytest.MonkeyPatch) -> None:
    real = Calls._ended

    def ended(self: Any, *rest: Any) -> Any:
        made = real(self, *rest)
        first, second, *others = made.token_ids
        return structs.replace(made, token_ids=(second, first, *others))

    patch.setattr(Calls, "_ended", ended)


def rows_lose_the_last_id_of_a_delta(patch: pytest.MonkeyPatch) -> None:
    real = trajectories._row

    def row(path: list[Any], *rest: Any) -> Any:
        return real([structs.replace(turn, delta_ids=turn.delta_ids[:-1]) for turn in path], *rest)

    patch.setattr(trajectories, "_row", row)


def the_newline_after_a_turn_is_dropped(patch: pytest.MonkeyPatch) -> None:
    real = ChatTokenizer.append

    def append(self: ChatTokenizer, new: Any, *, truncated: bool, **rest: Any) -> Any:
        tier, ids = real(self, new, truncated=truncated, **rest) or ("", [])
        return (tier, ids[:1] + ids[2:]) if truncated else (tier, ids[1:])

    patch.setattr(ChatTokenizer, "append", append)


def a_truncated_turn_is_not_closed(patch: pytest.MonkeyPatch) -> None:
    real = ChatTokenizer.append

    def append(self: ChatTokenizer, new: Any, *, truncated: bool, **rest: Any) -> Any:
        return real(self, new, truncated=False, **rest)

    patch.setattr(ChatTokenizer, "append", append)


def a_shared_turn_is_trained_in_every_row(patch: pytest.MonkeyPatch) -> None:
    real = trajectories._assemble

    def assemble(rows: Any, excluded: Any) -> Any:
        kept = {e.turn for e in excluded}
        return real([(path, {t.id for t in path} - kept) for path, _ in rows], excluded)

    patch.setattr(trajectories, "_assemble", assemble)


def a_branch_is_lost(patch: pytest.MonkeyPatch) -> None:
    real = trajectories._assemble
    patch.setattr(trajectories, "_assemble", lambda rows, excluded: real(rows[1:], excluded))


def partials_are_left_out_without_a_word(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(trajectories, "exclusions", lambda *_: ())


def a_logprob_is_recorded_as_zero(patch: pytest.MonkeyPatch) -> None:
    real = CallAccumulator.fold

    def fold(self: CallAccumulator, chunk: Chunk, now: float) -> None:
        real(self, structs.replace(chunk, logprobs=(0.0, *chunk.logprobs[1:])), now)

    patch.setattr(CallAccumulator, "fold", fold)


def all_tokens_have_the_first_version(patch: pytest.MonkeyPatch) -> None:
    def span(self: CallAccumulator, start: int, end: int, low: int, high: int) -> None:
        self._spans = [(0, end, *(self._spans[0][2:] if self._spans else (low, high)))]

    patch.setattr(CallAccumulator, "_span", span)


def tools_do_not_enter_the_root(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ChatTokenizer, "root_key", lambda self, _: hashlib.md5(self.name.encode()).hexdigest())
    patch.setattr(prompts, "_heads", prompts._Heads(256))  # the other one knows the right keys


def content_may_spell_control_tokens(patch: pytest.MonkeyPatch) -> None:
    async def rendered_by(self: Calls, _: Any, request: Any) -> Any:
        return self._tokenizer.under(escape="faithful"), request

    patch.setattr(Calls, "_tokenizer_for", rendered_by)


@pytest.mark.parametrize(
    ("broken", "fails"),
    [
        (history_is_rendered_anew, {"I1"}),
        (replies_are_tokenised_anew, {"I2", "I4", "I7"}),
        (two_tokens_change_places, {"I2"}),
        (rows_lose_the_last_id_of_a_delta, {"I2"}),
        (the_newline_after_a_turn_is_dropped, {"I3"}),
        (a_truncated_turn_is_not_closed, {"I3"}),
        (a_shared_turn_is_trained_in_every_row, {"I4"}),
        (a_branch_is_lost, {"I4"}),
        (partials_are_left_out_without_a_word, {"I4"}),
        (a_logprob_is_recorded_as_zero, {"I4"}),
        (all_tokens_have_the_first_version, {"I7"}),
        (tools_do_not_enter_the_root, {"I9"}),
        (content_may_spell_control_tokens, {"I10"}),
    ],
)
async def test_broken_gateway_violates_an_invariant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: Broken, fails: set[str]
) -> None:
    broken(monkeypatch)
    assert set(wrong := failing(await scene(tmp_path))) == fails, wrong


# --- I5: streaming, not streaming, every dialect --------------------------------------------------


TIERS = ["full", "append", "append", "append", "splice", "full", "append", "append", "append"]


async def in_dialects(tmp_path: Path, dialects: Sequence[str]) -> dict[str, Seen]:
    ways = [(dialect, stream) for dialect in dialects for stream in (False, True)]
    return {f"{d} stream={s}": await scene(tmp_path / f"{d}{s}", d, s) for d, s in ways}


async def test_every_dialect_streamed_or_not_records_the_same_tree(tmp_path: Path) -> None:
    looks = await in_dialects(tmp_path, DIALECTS)
    assert len(looks) == 8
    for seen in looks.values():
        assert failing(seen) == {}
        assert [turn["tier"] for turn in seen.turns] == TIERS
        assert [e["reason"] for e in seen.linear["excluded"]] == ["aborted"]
    i5(looks)


@pytest.mark.parametrize(("dialect", "encoder"), [("chat", ChatStream), ("anthropic", AnthropicStream)])
async def test_stream_that_drops_a_word_violates_i5(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dialect: str, encoder: Any
) -> None:
    real = encoder.delta

    def without_4(self: Any, delta: CallDelta) -> bytes:
        events = [e for e in delta.events if not (isinstance(e, TextDelta) and "4" in e.text)]
        return real(self, structs.replace(delta, events=events))

    monkeypatch.setattr(encoder, "delta", without_4)
    looks = await in_dialects(tmp_path, [dialect])
    assert all(failing(seen) == {} for seen in looks.values())
    with pytest.raises(AssertionError, match="stream=True"):
        i5(looks)


# --- I6: what survives a kill ---------------------------------------------------------------------


async def killed(tmp_path: Path) -> tuple[dict[str, list[int]], int, Seen]:
    """Two calls to their end and one in flight; then the store as a killed process would leave it."""
    answers = (said("One."), said("Two."), ScriptedReply(token_ids=(40, 41), fail="hang"))
    async with place(tmp_path / "store", in_order(*answers)) as there:
        client = await there.client()
        first = await client.say(user("Hi"), headers=NAMED)
        second = await client.say(user("Hi"), first.reply, user("And?"))
        third = asyncio.create_task(client.send(user("Hi"), first.reply, user("Or?")))
        while not there.gateway.sessions.get("r.1").sampled_tokens >= 2 + sum(
            len(entry.token_ids) for entry in there.ledger.recorded
        ):
            await asyncio.sleep(0.01)
        shutil.copytree(tmp_path / "store", tmp_path / "copy")
        ended = {h.turn_id: [*there.ledger.recorded[n].token_ids] for n, h in enumerate((first, second))}
        third.cancel()
        await asyncio.gather(third, return_exceptions=True)
    async with place(tmp_path / "copy", in_order(said("Again."))) as there:
        client = await there.client()
        # Whoever asks again for what was committed gets it; no second turn comes of it.
        again = await client.send(user("Hi"), headers=NAMED)
        assert again.status == 200
        return ended, 3, await there.look()


async def test_finished_calls_survive_a_kill(tmp_path: Path) -> None:
    ended, asked, after = await killed(tmp_path)
    i6(ended, asked, after)
    assert [turn["status"] for turn in after.turns] == ["committed", "committed", "dangling"]


def turns_are_committed_after_they_were_shown(patch: pytest.MonkeyPatch) -> None:
    waiting: list[asyncio.Task[None]] = []

    async def late(self: Calls, session: Any, row: TurnRow) -> None:
        await asyncio.sleep(0.5)
        await self._store.put_turn(session.id, row)

    async def record(self: Calls, session: Any, _: Any, turn: Any, n: int) -> None:
        session.commits += 1
        row = TurnRow(n, session.commits, turn)
        session.record(row)
        waiting.append(asyncio.create_task(late(self, session, row)))

    patch.setattr(Calls, "_record", record)


def calls_are_not_announced(patch: pytest.MonkeyPatch) -> None:
    async def note(self: Calls, session: Any, intent: Any, n: int) -> None:
        session.rows[n] = TurnRow(n, calls.LAST, intent)

    patch.setattr(Calls, "_write_intent", note)


def a_retry_samples_again(patch: pytest.MonkeyPatch) -> None:
    async def again(*_: Any) -> list[Any]:
        return []

    patch.setattr(Calls, "_repeat_answer", again)


@pytest.mark.parametrize(
    "broken", [turns_are_committed_after_they_were_shown, calls_are_not_announced, a_retry_samples_again]
)
async def test_kill_violates_i6_when(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: Broken) -> None:
    broken(monkeypatch)
    # A turn whose parent was lost cannot even be shown.
    with pytest.raises((AssertionError, KeyError)):
        i6(*await killed(tmp_path))


# --- I8: keys -------------------------------------------------------------------------------------

ENDPOINTS = [
    ("POST", "/s/b.1/v1/chat/completions"),
    ("POST", "/s/b.1/v1/messages"),
    ("POST", "/s/b.1/reward"),
    ("POST", "/s/b.1/complete"),
    ("POST", "/s/b.1/outcome"),
    ("GET", "/s/b.1/turns"),
    ("GET", "/s/b.1/trajectories"),
    ("GET", "/s/b.1/v1/models"),
    ("GET", "/sessions/b.1/turns"),
    ("POST", "/sessions/b.1/finalize"),
    ("DELETE", "/sessions/b.1"),
]


async def try_other_key(there: Place) -> tuple[dict[str, int], Seen, Seen]:
    a, b = await there.client("a.1"), await there.client("b.1")
    await b.say(user("Hi"))
    key = a.door.keywords["key"]
    before = await there.look(b, "b.1")
    statuses: dict[str, int] = {}
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi"}], "reward": 1.0}).encode()
    for kind, used in (("key", key), ("forged key", key.replace("a.1", "b.1"))):
        for method, path in ENDPOINTS:
            answer = await knock(there.app, method, path, body if method == "POST" else b"", used)
            statuses[f"{kind}, {method} {path}"] = answer.status
    return statuses, before, await there.look(b, "b.1")


async def test_session_key_is_refused_for_another_session(tmp_path: Path) -> None:
    async with place(tmp_path, ScriptedEngine(lambda _: said("Yes."))) as there:
        i8(*await try_other_key(there))


def signatures_are_not_checked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(session_keys.SessionKeys, "_mac", lambda self, body: "x" * 40)
    patch.setattr(session_keys.SessionKeys, "check", lambda self, key: grant(key))


def grant(key: str) -> session_keys.Grant | None:
    session_id, scopes, nonce, *_ = [*key.removeprefix(session_keys.PREFIX).split("~"), "", "", ""]
    return (
        session_keys.Grant(session_id, frozenset(map(session_keys.KeyScope, scopes.split("."))), nonce)
        if scopes
        else None
    )


def the_path_alone_names_the_session(patch: pytest.MonkeyPatch) -> None:
    real = GatewayApp._session

    def session(self: GatewayApp, session_id: str | None, *rest: Any) -> Any:
        return self._gateway.sessions.get(session_id) if session_id else real(self, session_id, *rest)

    patch.setattr(GatewayApp, "_session", session)


@pytest.mark.parametrize("broken", [signatures_are_not_checked, the_path_alone_names_the_session])
async def test_broken_key_check_violates_i8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: Broken
) -> None:
    broken(monkeypatch)
    async with place(tmp_path, ScriptedEngine(lambda _: said("Yes."))) as there:
        with pytest.raises(AssertionError, match="another session's key"):
            i8(*await try_other_key(there))


# --- I11: rescoring -------------------------------------------------------------------------------


async def sampled_and_rescored(store: Path) -> tuple[Seen, list[list[float]]]:
    torch.set_num_threads(1)
    async with place(store, TorchEngine(POLICY, seed=5)) as there:
        client = await there.client()
        first = await client.say(user("How much is the red mug?"), limit=24)
        history = (user("How much is the red mug?"), first.reply, user("And the blue one?"))
        await client.say(*history, limit=24)
        await client.say(*history[:2], user("Thanks."), limit=24)
        seen = await there.look(client)
    model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32).eval()
    rescored: list[list[float]] = []
    for row in seen.linear["trajectories"]:
        ids = torch.tensor([row["token_ids"]])
        with torch.no_grad():
            logits = model(ids).logits[0, :-1].log_softmax(-1)
        rescored.append([0.0, *logits.gather(1, ids[0, 1:, None])[:, 0].tolist()])
    return seen, rescored


async def test_rescored_logprobs_equal_the_recorded_ones(tmp_path: Path) -> None:
    seen, rescored = await sampled_and_rescored(tmp_path)
    assert failing(seen) == {}
    assert len(rescored) == 2
    i11(seen, rescored)


def logprobs_are_those_of_another_temperature(patch: pytest.MonkeyPatch) -> None:
    real = decoder.draw
    patch.setattr(
        decoder, "draw", lambda logits, *rest: (real(logits, *rest)[0], real(logits / 1.5, *rest)[1])
    )


def a_newline_more_is_recorded_than_was_sent(patch: pytest.MonkeyPatch) -> None:
    real = Calls._intent

    def intent(self: Calls, *rest: Any) -> Any:
        made = real(self, *rest)
        assert made.status is TurnStatus.DANGLING
        return structs.replace(made, delta_ids=(*made.delta_ids, made.delta_ids[-1]))

    patch.setattr(Calls, "_intent", intent)


@pytest.mark.parametrize(
    "broken", [logprobs_are_those_of_another_temperature, a_newline_more_is_recorded_than_was_sent]
)
async def test_rescoring_detects_a_broken_sampler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: Broken
) -> None:
    broken(monkeypatch)
    seen, rescored = await sampled_and_rescored(tmp_path)
    with pytest.raises(AssertionError, match="off by"):
        i11(seen, rescored)
