"""The conformance suite judges others, so it is judged first: each kind of damage has to be found."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from msgspec import Struct, structs

from afield.chat.vocabulary import Vocabulary
from afield.cli.main import main
from afield.conformance import runner
from afield.conformance.clients import CLIENTS, select_clients
from afield.conformance.clients.base import Client
from afield.conformance.decoders import ClientCall, ClientMessage, ClientRequest, UnknownShape, decode
from afield.conformance.judge import Verdict, judge
from afield.conformance.model import CHATML, hermes, qwen_xml, select_families, write_model
from afield.conformance.oracle import Oracle, Renderer, fold_system
from afield.conformance.proxy import CapturedRequest, FaultPlan, parse_request
from afield.conformance.scenario import (
    LONG,
    ModelReply,
    NetworkFault,
    Scenario,
    ToolUse,
    last_marker,
    marker,
    steps,
)
from afield.conformance.script import RandomTokenizer, Script
from afield.errors import Unavailable, UsageError
from afield.harnesses.base import ClientCommand, Stage
from afield.interfaces import SessionRecord, SessionSpec
from afield.types import Exclusion, TurnStatus
from afield.utils.installations import interpreter, python_environment

pytestmark = pytest.mark.anyio

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def look(thread: str, step: int) -> ToolUse:
    return ToolUse("look", {"thread": thread, "step": step})


async def walk(base_url: str, key: str) -> None:
    """A client of a few lines: asks, runs its tools, and asks again whatever happens to the line."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=2) as client:
        messages: list[Any] = [
            {"role": "system", "content": "You walk."},
            {"role": "user", "content": f"Walk; <|im_end|> is text. {marker('main', 0)}"},
        ]
        while True:
            answer = await client.chat.completions.create(model="m", messages=messages, tools=[LOOK])  # pyright: ignore
            message = answer.choices[0].message
            if not message.tool_calls:
                return
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                at = json.loads(call.function.arguments)  # pyright: ignore
                result = marker(at["thread"], at["step"])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


COURSE = steps(
    look,
    faults={"main-3": NetworkFault.REFUSE, "main-5": NetworkFault.CUT},
    excluded={"aborted": ("main-5",)},
)


class Judged(Struct, frozen=True):
    """What the judge is given about a walk."""

    engine_calls: list[Any]
    record: SessionRecord
    script: Script
    sent: list[CapturedRequest]
    renderer: Renderer

    def verdict(
        self, record: SessionRecord, branches: int = 1, engine_calls: list[Any] | None = None
    ) -> Verdict:
        served = self.engine_calls if engine_calls is None else engine_calls
        return judge(served, record, branches, COURSE.excluded, self.script.places)

    def prompts(
        self, sent: list[CapturedRequest] | None = None, engine_calls: list[Any] | None = None
    ) -> list[str]:
        """What the oracle finds."""
        sent, served = (
            self.sent if sent is None else sent,
            self.engine_calls if engine_calls is None else engine_calls,
        )
        return Oracle(self.renderer, sent, served, self.script.replies).problems


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def judged(tmp_path_factory: pytest.TempPathFactory, anyio_backend: str) -> Judged:
    """A walk of ten turns with a 500 and a lost connection on the way."""
    folder = tmp_path_factory.mktemp("walk")
    async with runner.gateway_under_test(COURSE, folder) as up:
        ticket = await up.gateway.open(SessionSpec(id="walk"))
        await walk(f"http://127.0.0.1:{up.port}/s/walk/v1", ticket.api_key)
        assert up.faults.injected == {"main-3": NetworkFault.REFUSE, "main-5": NetworkFault.CUT}
        assert up.script.unused_replies() == [] and up.script.unexpected_prompts == []
        record = await up.gateway.finalize("walk")
        return Judged(list(up.engine_calls), record, up.script, up.faults.requests, up.renderer)


async def test_a_faithful_record_is_ok(judged: Judged):
    record = judged.record
    verdict = judged.verdict(record)
    assert verdict == Verdict(calls=11, matched=11, duplicates=0, branches=1, excluded={"aborted": 1})
    assert verdict.ok
    assert judged.prompts() == []
    assert [turn.status for turn in record.turns].count(TurnStatus.ABORTED) == 1


# --- damage --------------------------------------------------------------------------------------


def last_turn_lost(record: SessionRecord) -> SessionRecord:
    return structs.replace(record, turns=record.turns[:-1])


def partial_lost(record: SessionRecord) -> SessionRecord:
    kept = tuple(turn for turn in record.turns if turn.status is not TurnStatus.ABORTED)
    return structs.replace(record, turns=kept)


def turn_invented(record: SessionRecord) -> SessionRecord:
    twin = structs.replace(record.turns[-1], id="twin")
    return structs.replace(record, turns=(*record.turns, twin))


def sampled_id_changed(record: SessionRecord) -> SessionRecord:
    first = record.turns[0]
    other = structs.replace(first, token_ids=(first.token_ids[0] + 1, *first.token_ids[1:]))
    return structs.replace(record, turns=(other, *record.turns[1:]))


def first_row(record: SessionRecord, **changes: Any) -> SessionRecord:
    """The record with another first trajectory, which may be one that cannot be built."""
    row = structs.replace(record.trajectories[0])
    for name, value in changes.items():
        structs.force_setattr(row, name, tuple(value))
    return structs.replace(record, trajectories=(row, *record.trajectories[1:]))


def trained_id_changed(record: SessionRecord) -> SessionRecord:
    ids = list(record.trajectories[0].token_ids)
    ids[record.trajectories[0].loss_mask.index(1)] += 1
    return first_row(record, token_ids=ids)


def context_id_changed(record: SessionRecord) -> SessionRecord:
    ids = list(record.trajectories[0].token_ids)
    ids[0] += 1
    return first_row(record, token_ids=ids)


def logprob_changed(record: SessionRecord) -> SessionRecord:
    values = list(record.trajectories[0].logprobs)
    values[record.trajectories[0].loss_mask.index(1)] -= 0.5
    return first_row(record, logprobs=values)


def mask_too_short(record: SessionRecord) -> SessionRecord:
    mask = list(record.trajectories[0].loss_mask)
    mask[mask.index(1)] = 0
    return first_row(record, loss_mask=mask)


def mask_too_long(record: SessionRecord) -> SessionRecord:
    mask = list(record.trajectories[0].loss_mask)
    mask[mask.index(1) - 1] = 1
    return first_row(record, loss_mask=mask)


def row_missing(record: SessionRecord) -> SessionRecord:
    return structs.replace(record, trajectories=())


def row_twice(record: SessionRecord) -> SessionRecord:
    return structs.replace(record, trajectories=record.trajectories * 2)


def reason_missing(record: SessionRecord) -> SessionRecord:
    return structs.replace(record, excluded=())


def nothing_trained(record: SessionRecord) -> SessionRecord:
    """Every call left out, each with a reason."""
    left_out = tuple(Exclusion(turn.id, len(turn.token_ids), "side:probe") for turn in record.turns)
    return structs.replace(record, trajectories=(), excluded=left_out)


def every_other_turn_excluded(record: SessionRecord) -> SessionRecord:
    """The same under the one reason that is listed, which is listed for another call."""
    turns = record.turns[::2]
    left_out = tuple(Exclusion(turn.id, len(turn.token_ids), "aborted") for turn in turns)
    return structs.replace(record, excluded=left_out)


def reason_forged(record: SessionRecord) -> SessionRecord:
    [exclusion] = record.excluded
    return structs.replace(record, excluded=(structs.replace(exclusion, reason="superseded"),))


def too_few_tokens_excluded(record: SessionRecord) -> SessionRecord:
    [exclusion] = record.excluded
    return structs.replace(record, excluded=(structs.replace(exclusion, tokens=exclusion.tokens - 1),))


def exclusion_of_nothing(record: SessionRecord) -> SessionRecord:
    return structs.replace(record, excluded=(*record.excluded, Exclusion("t99", 1, "aborted")))


def trained_and_excluded(record: SessionRecord) -> SessionRecord:
    return structs.replace(record, excluded=(*record.excluded, Exclusion(record.turns[0].id, 1, "side")))


def left_dangling(record: SessionRecord) -> SessionRecord:
    turns = tuple(
        structs.replace(turn, status=TurnStatus.DANGLING) if turn.status is TurnStatus.ABORTED else turn
        for turn in record.turns
    )
    return structs.replace(record, turns=turns)


DAMAGE = [
    (last_turn_lost, "is not in the record"),
    (partial_lost, "is not in the record"),
    (turn_invented, "the engine never served"),
    (sampled_id_changed, "the engine never served"),
    (trained_id_changed, "trained, but no call of the engine"),
    (context_id_changed, "trained, but no call of the engine"),
    (logprob_changed, "trained, but no call of the engine"),
    (mask_too_short, "trained, but no call of the engine"),
    (mask_too_long, "trained, but no call of the engine"),
    (row_missing, "was committed; in the loss: False"),
    (row_twice, "is trained 1 times too often"),
    (reason_missing, "was aborted; in the loss: False, excluded: None"),
    (trained_and_excluded, "was committed; in the loss: True, excluded: side"),
    (left_dangling, "is dangling"),
    (nothing_trained, "is excluded as 'side:probe', which is not listed"),
    (every_other_turn_excluded, "the call at 'main-0' is excluded as 'aborted', which is not listed"),
    (reason_forged, "the call at 'main-5' is excluded as 'superseded', which is not listed"),
    (too_few_tokens_excluded, "its exclusion says"),
    (exclusion_of_nothing, "names turn t99, which is not in the record"),
]


@pytest.mark.parametrize(("damage", "told"), DAMAGE, ids=[damage.__name__ for damage, _ in DAMAGE])
async def test_damage_is_found(judged: Judged, damage: Callable[[SessionRecord], SessionRecord], told: str):
    verdict = judged.verdict(damage(judged.record))
    assert any(told in problem for problem in verdict.problems), verdict


async def test_a_call_the_engine_did_not_record_is_found(judged: Judged):
    assert not judged.verdict(judged.record, engine_calls=judged.engine_calls[:-1]).ok


async def test_another_number_of_branches_is_found(judged: Judged):
    assert judged.verdict(judged.record, 2).problems == ("1 branches, expected 2",)


async def test_a_retry_that_was_sampled_and_trained_twice_is_a_duplicate(judged: Judged):
    """The second answer to the same prompt is faithful to the engine, and still one too many."""
    engine_calls, record = judged.engine_calls, judged.record
    last, row = record.turns[-1], record.trajectories[-1]
    logprobs = tuple(p - 1 for p in last.logprobs)
    again = structs.replace(engine_calls[-1], logprobs=logprobs)
    twin = structs.replace(last, id="twin", logprobs=logprobs)
    start, end = row.turns[-1].start, row.turns[-1].end
    mask = (*(0,) * start, *(1,) * (end - start))
    second = structs.replace(
        row,
        loss_mask=mask,
        logprobs=(*(0.0,) * start, *logprobs),
        turns=(structs.replace(row.turns[-1], id="twin"),),
        versions=tuple(span for span in row.versions if span.start >= start),
    )
    rows = (*record.trajectories, second)
    doubled = structs.replace(record, turns=(*record.turns, twin), trajectories=rows)
    verdict = judged.verdict(doubled, 2, [*engine_calls, again])
    assert (verdict.matched, verdict.duplicates) == (12, 1)
    assert not verdict.ok


# --- prompts that are not what was sent ----------------------------------------------------------


def edited(sent: CapturedRequest, change: Callable[[Any], Any]) -> CapturedRequest:
    """The request with its body changed: as if the gateway had rendered another one."""
    body = json.loads(sent.body)
    change(body)
    return structs.replace(sent, body=json.dumps(body).encode())


def system_message_added(body: Any) -> None:
    body["messages"].insert(0, {"role": "system", "content": "Be brief."})


def system_message_altered(body: Any) -> None:
    body["messages"][0]["content"] += " Slowly."


def user_message_altered(body: Any) -> None:
    body["messages"][1]["content"] = body["messages"][1]["content"].replace("Walk", "walk")


def user_message_doubled(body: Any) -> None:
    body["messages"].insert(1, body["messages"][1])


def messages_reordered(body: Any) -> None:
    body["messages"][:2] = reversed(body["messages"][:2])


def tool_schema_filled(body: Any) -> None:
    body["tools"][0]["function"]["parameters"]["properties"] = {"step": {"type": "integer"}}


def tool_added(body: Any) -> None:
    body["tools"].append({"type": "function", "function": {"name": "stop"}})


def tools_removed(body: Any) -> None:
    del body["tools"]


def result_altered(body: Any) -> None:
    for message in body["messages"]:
        if message["role"] == "tool":
            message["content"] += "!"


def result_removed(body: Any) -> None:
    if body["messages"][-1]["role"] == "tool":
        body["messages"].pop()


def results_swapped(body: Any) -> None:
    """Their texts, so that each result belongs to the other call."""
    if len(body["messages"]) > 4:
        first, second = body["messages"][3:5]
        first["content"], second["content"] = second["content"], first["content"]


def reply_altered(body: Any) -> None:
    for message in body["messages"]:
        if message["role"] == "assistant" and message.get("content"):
            message["content"] = "Nothing of the kind."


def call_altered(body: Any) -> None:
    for message in body["messages"]:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = '{"thread": "main", "step": 77}'


OTHERWISE = [
    *(system_message_added, system_message_altered, user_message_altered, user_message_doubled),
    *(messages_reordered, tool_schema_filled, tool_added, tools_removed, result_altered, result_removed),
    *(results_swapped, reply_altered, call_altered),
]


@pytest.mark.parametrize("change", OTHERWISE, ids=[change.__name__ for change in OTHERWISE])
async def test_a_prompt_that_is_not_the_request_is_found(judged: Judged, change: Callable[[Any], None]):
    problems = judged.prompts([edited(sent, change) for sent in judged.sent])
    assert any("is no request's" in problem for problem in problems)
    assert any("was never asked" in problem for problem in problems)


async def test_arguments_and_texts_as_clients_rewrite_them_are_the_same_message(judged: Judged):
    def rewritten(body: Any) -> None:
        for message in body["messages"]:
            for call in message.get("tool_calls", ()):
                arguments = json.loads(call["function"]["arguments"])
                call["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())), indent=1)
            if message["role"] == "assistant":
                message.pop("reasoning_content", None)
                message["content"] = [{"type": "text", "text": (message.get("content") or "") + "\n"}]

    assert judged.prompts([edited(sent, rewritten) for sent in judged.sent]) == []


async def test_a_request_that_was_never_asked_is_found(judged: Judged):
    doubled = [*judged.sent, judged.sent[0]]
    assert [problem for problem in judged.prompts(doubled) if "was never asked" in problem]


async def test_a_call_without_a_request_is_found(judged: Judged):
    problems = judged.prompts(engine_calls=[*judged.engine_calls, judged.engine_calls[-1]])
    assert problems == [
        f"call {judged.engine_calls[-1].call_id} belongs to no request: all were asked already"
    ]


async def test_judge_reports_a_sampled_turn_that_returns_with_other_token_ids(
    judged: Judged, vocabulary: Vocabulary
):
    """The text is the same, and the client could not tell."""
    last, before = judged.engine_calls[-1], judged.engine_calls[-2]
    at, end = len(before.prompt_ids), len(before.prompt_ids) + len(before.token_ids)
    again = tuple(vocabulary.encode(vocabulary.decode(before.token_ids)))
    assert again != before.token_ids
    other = structs.replace(last, prompt_ids=(*last.prompt_ids[:at], *again, *last.prompt_ids[end:]))
    problems = judged.prompts(engine_calls=[*judged.engine_calls[:-1], other])
    assert any("does not begin with the ids of the call it goes on from" in problem for problem in problems)


async def test_text_that_became_a_control_token_is_found(judged: Judged, vocabulary: Vocabulary):
    first, *rest = judged.engine_calls
    written = list(vocabulary.encode("<|im_end|>"))
    assert len(written) == 1
    ids = first.prompt_ids
    spelled = [n for n in range(len(ids)) if vocabulary.decode(ids[n:]).startswith("<|im_end|> is text")]
    ends = [n for n in range(len(ids)) if vocabulary.decode(ids[n:]).startswith(" is text")]
    other = structs.replace(first, prompt_ids=(*ids[: spelled[-1]], *written, *ids[ends[-1] :]))
    assert vocabulary.decode(other.prompt_ids) == vocabulary.decode(ids)
    assert any("is no request's" in problem for problem in judged.prompts(engine_calls=[other, *rest]))


def test_later_system_messages_are_folded_where_a_template_refuses_them():
    messages = [
        ClientMessage(role="system", content="One."),
        ClientMessage(role="system", content="Two."),
        ClientMessage(role="user", content="Hello."),
        ClientMessage(role="system", content="Three."),
    ]
    assert fold_system(messages) == [
        ClientMessage(role="system", content="One.\n\nTwo."),
        ClientMessage(role="user", content="Hello."),
        ClientMessage(role="user", content="<system>\nThree.\n</system>"),
    ]


# --- requests on the wire ------------------------------------------------------------------------

CALL = ClientCall("c1", "look", {"step": 1})
ASKED = ClientRequest(
    messages=(
        ClientMessage(role="system", content="You look."),
        ClientMessage(role="user", content="Look."),
        ClientMessage(role="assistant", content="I look.", reasoning="Why?", calls=(CALL,)),
        ClientMessage(role="tool", content="A tree.", call_id="c1"),
    ),
    tools=(
        {
            "type": "function",
            "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
        },
    ),
)
SCHEMA = {"type": "object", "properties": {}}
CHAT = {
    "messages": [
        {"role": "developer", "content": [{"type": "text", "text": "You look."}]},
        {"role": "user", "content": "Look."},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Why?",
            "tool_calls": [{"id": "c1", "function": {"name": "look", "arguments": '{"step": 1}'}}],
        },
        {"role": "assistant", "content": None},
        {"role": "tool", "tool_call_id": "c1", "content": "A tree."},
    ],
    "tools": list(ASKED.tools),
}
MESSAGES = {
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: 1"},
        {"type": "text", "text": "You look."},
    ],
    "messages": [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Why?", "signature": "s"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c1", "name": "look", "input": {"step": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "A tree."}]},
    ],
    "tools": [
        {"name": "look", "input_schema": SCHEMA},
        {"name": "later", "input_schema": SCHEMA, "defer_loading": True},
    ],
}
RESPONSES = {
    "instructions": "You look.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Look."}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Why?"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look."}],
        },
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"step":1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "A tree."},
    ],
    "tools": [{"type": "function", "name": "look", "parameters": SCHEMA}, {"type": "web_search"}],
}
GEMINI = {
    "system_instruction": {"parts": [{"text": "You look."}]},
    "contents": [
        {"role": "user", "parts": [{"text": "Look."}]},
        {"role": "model", "parts": [{"text": "Why?", "thought": True}, {"text": "I look."}]},
        {"role": "model", "parts": [{"functionCall": {"id": "c1", "name": "look", "args": {"step": 1}}}]},
        {
            "role": "user",
            "parts": [{"functionResponse": {"name": "look", "response": {"result": "A tree."}}}],
        },
    ],
    "tools": [
        {"functionDeclarations": [{"name": "look", "parameters": {"type": "OBJECT", "properties": {}}}]}
    ],
}
WIRES = {
    "/v1/chat/completions": CHAT,
    "/v1/messages?beta=true": MESSAGES,
    "/v1/responses": RESPONSES,
    "/v1beta/models/m:streamGenerateContent?alt=sse": GEMINI,
}


def on_the_wire(target: str, body: Any) -> CapturedRequest:
    head = f"POST {target} HTTP/1.1\r\nContent-Type: application/json\r\n\r\n".encode()
    return parse_request(head, json.dumps(body).encode(), None)


@pytest.mark.parametrize("target", WIRES)
def test_the_same_conversation_is_read_in_every_dialect(target: str):
    assert decode(on_the_wire(target, WIRES[target])) == ASKED


def test_what_asks_no_model_is_no_request():
    assert decode(on_the_wire("/v1/messages/count_tokens", MESSAGES)) is None
    assert decode(parse_request(b"GET /v1/models HTTP/1.1\r\n\r\n", b"", None)) is None


def test_unknown_request_shape_raises_unknown_shape():
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    with pytest.raises(UnknownShape, match="image_url"):
        decode(on_the_wire("/v1/chat/completions", {"messages": [{"role": "user", "content": [image]}]}))
    with pytest.raises(UnknownShape, match="previous_response_id"):
        decode(on_the_wire("/v1/responses", {"previous_response_id": "r", "input": "Go on."}))


def test_results_are_read_in_the_order_of_their_calls():
    calls = [{"id": name, "function": {"name": "look", "arguments": "{}"}} for name in ("a", "b")]
    results = [{"role": "tool", "tool_call_id": name, "content": name} for name in ("b", "a")]
    body = {"messages": [{"role": "assistant", "tool_calls": calls}, *results]}
    decoded = decode(on_the_wire("/v1/chat/completions", body))
    assert decoded is not None
    assert [message.content for message in decoded.messages] == ["", "a", "b"]


# --- what the judge is given ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    path = write_model(tmp_path_factory.mktemp("model")) / "tokenizer.json"
    return Vocabulary(path.read_bytes(), path)


@pytest.mark.parametrize("spell", [hermes, qwen_xml])
def test_random_tokenizer_never_gives_the_canonical_ids_or_the_same_ids_twice(
    vocabulary: Vocabulary, spell: Callable[[ModelReply], str]
):
    words = spell(ModelReply(text="naïve 北京 ☂ 🚲 and on", reasoning="why?", uses=(look("main", 1),)))
    sampler = RandomTokenizer(vocabulary)
    ways = {tuple(sampler.sample(words, random.Random(n))) for n in range(20)}
    assert {vocabulary.decode(ids) for ids in ways} == {words}
    assert len(ways) == 20
    assert tuple(vocabulary.encode(words)) not in ways


def test_last_marker_is_found_in_a_text():
    assert last_marker(f"{marker('main', 1)} then {marker('sub', 12)} and [at main-$((1+1))]") == "sub-12"
    assert last_marker("nowhere") is None


def test_a_fault_happens_once():
    faults = FaultPlan({"main-1": NetworkFault.REFUSE})
    body = f'{{"messages": ["{marker("main", 1)}"]}}'.encode()
    assert [faults.take(body), faults.take(body)] == [NetworkFault.REFUSE, None]
    assert faults.injected == {"main-1": NetworkFault.REFUSE}


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_lost_answer_is_complete_for_the_gateway_and_broken_for_its_client(
    tmp_path: Path, stream: bool, clean: bool
):
    course = Scenario(
        replies={"main-0": ModelReply(text=LONG)},
        faults={"main-0": NetworkFault.LOSE},
        branches=1,
        clean=clean,
    )
    body: Any = {"messages": [{"role": "user", "content": marker("main", 0)}], "stream": stream}
    async with runner.gateway_under_test(course, tmp_path) as up, aiohttp.ClientSession() as http:
        ticket = await up.gateway.open(SessionSpec(id="lost"))
        url = f"http://127.0.0.1:{up.port}/s/lost/v1/chat/completions"
        headers, received = {"Authorization": f"Bearer {ticket.api_key}"}, b""
        try:
            async with http.post(url, json=body, headers=headers) as answer:
                async for part in answer.content.iter_any():
                    received += part
        except aiohttp.ClientError:
            assert not (clean and stream)
        assert (b"data: " in received) == stream
        assert b"[DONE]" not in received and b"choices" not in received[-20:]
        [served] = up.engine_calls
        assert served.finish is not None
        record = await up.gateway.finalize("lost")
        assert [turn.status for turn in record.turns] == [TurnStatus.COMMITTED]
        assert record.excluded == ()


def test_a_fault_where_nothing_is_said_is_refused():
    with pytest.raises(ValueError, match="main-7"):
        Scenario(replies={"main-0": ModelReply(text="x")}, faults={"main-7": NetworkFault.CUT}, branches=1)


# --- the suite -----------------------------------------------------------------------------------


def client(code: str) -> Client:
    def commands(stage: Stage) -> list[ClientCommand]:
        return [ClientCommand((sys.executable, "-c", code))]

    return Client(
        name="idle", install=lambda cache: cache, commands=commands, scenario=steps(look), timeout_s=20
    )


async def test_a_client_that_does_nothing_is_not_ok(tmp_path: Path):
    verdict = await runner.check(client("pass"), tmp_path, tmp_path / "run", "")
    assert "no request at marker 'main-0'" in verdict.problems
    assert "the fault at marker 'main-3' was not injected" in verdict.problems


async def test_a_client_that_fails_is_not_ok(tmp_path: Path):
    verdict = await runner.check(client("raise SystemExit(3)"), tmp_path, tmp_path / "run", "")
    assert "ended with code 3" in verdict.problems[0]


async def test_a_client_that_cannot_be_installed_is_skipped_with_the_reason_and_not_ok(tmp_path: Path):
    def install(cache: Path) -> Path:
        raise Unavailable("npm is not installed here")

    verdict = await runner.check(
        structs.replace(client("pass"), install=install), tmp_path, tmp_path / "run", ""
    )
    assert verdict.problems == ("skipped: npm is not installed here",)
    assert not verdict.ok


def test_the_trajectory_of_terminus_2_must_match_the_engine_calls(tmp_path: Path, judged: Judged):
    engine_calls = [entry for entry in judged.engine_calls if entry.token_ids]
    stage = Stage(home=tmp_path, work=tmp_path, programs=tmp_path, base_url="", api_key="", model="m")
    folder = tmp_path / "jobs" / "job" / "trial"
    folder.mkdir(parents=True)

    def kept(entries: list[Any], shift: int = 0) -> list[str]:
        detail = {
            "prompt_token_ids": [entry.prompt_ids for entry in entries],
            "completion_token_ids": [[token + shift for token in entry.token_ids] for entry in entries],
            "logprobs": [entry.logprobs for entry in entries],
        }
        (folder / "result.json").write_text(json.dumps({"agent_result": {"rollout_details": [detail]}}))
        return CLIENTS["terminus-2"].inspect(stage, engine_calls)

    assert kept(engine_calls) == []
    assert kept(engine_calls[1:]) == []  # the answer that was lost
    assert "8 turns" in kept(engine_calls[2:])[0]
    assert "10 of 10 turns" in kept(engine_calls, shift=1)[0]
    assert "0 turns" in kept([])[0]


def test_an_unknown_client_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]):
    assert main(["conformance", "emacs"]) == 2
    assert "mini-swe-agent" in capsys.readouterr().err
    assert select_clients([]) == list(CLIENTS.values())


def test_a_folder_that_is_in_use_is_not_written_to(tmp_path: Path):
    (tmp_path / "mine").touch()
    assert main(["conformance", "strands", "--keep", str(tmp_path)]) == 2


def test_an_interpreter_is_run_before_it_is_believed():
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert version in interpreter(version)
    with pytest.raises(Unavailable, match="python2\\.99 is not installed"):
        interpreter("2.99")


def test_an_environment_that_cannot_be_made_says_why(tmp_path: Path):
    with pytest.raises(Unavailable, match="not installed here"):
        python_environment(tmp_path, "x", ["y"], python="no-such-python")


def test_an_unknown_template_family_is_refused_with_the_known_ones():
    assert CHATML in select_families([])
    with pytest.raises(UsageError, match=r"choose from: chatml, qwen3\.5"):
        select_families(["alpaca"])


def test_a_scenario_for_every_client_named_in_the_requirements():
    wanted = {"claude-code", "codex", "opencode", "mini-swe-agent", "strands", "langgraph"}
    wanted |= {"openai-agents", "terminus-2", "pydantic-ai", "smolagents", "litellm", "google-adk"}
    wanted |= {"qwen-code", "gemini-cli"}
    assert wanted <= set(CLIENTS)
    with pytest.raises(UsageError, match="choose from"):
        select_clients(["nobody"])
