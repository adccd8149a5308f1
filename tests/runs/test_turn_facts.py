"""Turn facts count what is broken in turns, and nothing in sound ones."""

from __future__ import annotations

from typing import Any

import pytest

from afield.runs.turn_facts import FACTS, has_empty_schema, turn_facts, turn_tags
from afield.types import (
    Exclusion,
    FinishReason,
    Link,
    Message,
    Sampling,
    ToolCall,
    Turn,
    TurnStatus,
    VersionSpan,
)

ASK = Message(role="user", content="How much is the lamp?")


def reply(text: str = "", *, call: str = "", arguments: str = '{"item": "lamp"}') -> Message:
    calls = (ToolCall(id=call, name="get_price", arguments=arguments),) if call else ()
    return Message(role="assistant", content=text, tool_calls=calls)


def result(call: str) -> Message:
    return Message(role="tool", content="12", tool_call_id=call)


def turn(n: int, *messages: Message, parent: int | None = None, **fields: Any) -> Turn:
    values: dict[str, Any] = {
        "id": f"t{n}",
        "root": "r",
        "parent": f"t{parent}" if parent else None,
        "delta_ids": (1, 2, 3),
        "token_ids": (4, n),
        "logprobs": (-0.1, -0.2),
        "versions": (VersionSpan(0, 2, 0, 0),),
        "finish_reason": FinishReason.STOP,
        "status": TurnStatus.COMMITTED,
        "sampling": Sampling(),
        "tier": "append" if parent else "full",
        "tools_digest": "tools",
        "messages": messages,
        "request_digest": f"q{n}",
        "started": float(n),
        "ended": n + 0.5,
    }
    return Turn(**{**values, **fields})


SOUND = (turn(1, ASK, reply(call="c1")), turn(2, result("c1"), reply("It costs 12."), parent=1))


def test_sound_turns_have_no_broken_fact() -> None:
    facts = turn_facts(SOUND)
    assert facts.pop("replies") > 0
    assert facts == {"tool_turns": 2, "continued_calls": 1, "main_turns": 2, "continuations": 1}
    assert set(facts) < set(FACTS)
    assert turn_facts(()) == {}


def test_a_result_that_no_later_prompt_has_is_lost() -> None:
    go_on = turn(2, Message(role="user", content="Go on."), reply("Hm."), parent=1)
    assert turn_facts((SOUND[0], go_on))["lost_results"] == 1


def test_a_last_call_needs_no_result() -> None:
    assert "lost_results" not in turn_facts(SOUND[:1])
    assert "continued_calls" not in turn_facts(SOUND[:1])


def test_a_request_that_is_sent_again_after_its_calls_loses_their_results() -> None:
    again = [turn(n, ASK, reply(call=f"c{n}"), request_digest="same") for n in (1, 2, 3)]
    assert turn_facts(again)["lost_results"] == 2
    at_once = [turn(n, ASK, reply(call=f"c{n}"), request_digest="same", started=1.0) for n in (1, 2, 3)]
    assert "lost_results" not in turn_facts(at_once)  # samples of one request
    continued = [*again, turn(4, result("c2"), reply("It costs 12."), parent=2)]
    assert "lost_results" not in turn_facts(continued)


def test_a_continued_conversation_with_other_tokens_is_unstable() -> None:
    whole = turn(2, ASK, reply(call="c1"), result("c1"), reply("12"), links=(Link("fork", "t1"),))
    facts = turn_facts((SOUND[0], whole))
    assert facts["unstable_turns"] == 1
    assert facts["continuations"] == 1
    assert "lost_results" not in facts
    other = turn(2, Message(role="user", content="Hi"), reply("12"), links=(Link("fork", "t1"),))
    assert "unstable_turns" not in turn_facts((SOUND[0], other))


def test_calls_with_bad_or_unexpected_arguments_are_counted() -> None:
    facts = turn_facts([turn(1, ASK, reply(call="c1", arguments="[1]"), tags=("empty-schema:get_price",))])
    assert (facts["bad_arguments"], facts["untyped_calls"]) == (1, 1)
    facts = turn_facts([turn(1, ASK, reply(call="c1", arguments="{}"), tags=("empty-schema:get_price",))])
    assert "untyped_calls" not in facts


def test_exclusions_cuts_edits_and_failures_are_counted() -> None:
    cut = turn(2, result("c1"), reply("It"), parent=1, finish_reason=FinishReason.LENGTH)
    facts = turn_facts((SOUND[0], cut), (Exclusion("t1", 2, "side:declared"),))
    assert (facts["main_excluded"], facts["cut_turns"], facts["cut_end"]) == (1, 1, 1)
    failed = turn(2, result("c1"), parent=1, status=TurnStatus.ABORTED, tags=("engine-failed",))
    facts = turn_facts((SOUND[0], failed), (Exclusion("t2", 2, "aborted"),))
    assert facts["engine_failed_end"] == 1
    assert "main_excluded" not in facts
    edited = turn(2, ASK, reply("Another."), ASK, reply("12"), links=(Link("edit", "t1"),))
    assert turn_facts((SOUND[0], edited))["edited_turns"] == 1


def test_equal_samples_have_equal_numbers() -> None:
    other = (SOUND[0], turn(3, result("c1"), reply("It costs 13."), parent=1))
    assert turn_facts(SOUND)["replies"] == turn_facts(SOUND)["replies"] != turn_facts(other)["replies"]


def test_tags_count_turns() -> None:
    turns = [turn(1, ASK, reply("a"), tags=("x", "x", "y")), turn(2, ASK, reply("b"), tags=("x",))]
    assert turn_tags(turns) == {"x": 2, "y": 1}


@pytest.mark.parametrize(
    ("schema", "empty"),
    [
        ({}, True),
        ({"type": "object", "properties": {}}, True),
        ({"type": "object", "properties": {"item": {"type": "string"}}}, False),
        ({"anyOf": [{"type": "object"}]}, False),
        ({"$ref": "#/$defs/a", "$defs": {}}, False),
    ],
)
def test_tool_schema_without_parameters_counts_as_empty(schema: dict[str, Any], empty: bool) -> None:
    assert has_empty_schema(schema) is empty
