"""Lineage: which turn does a conversation extend?"""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from afield.turn_tree import TurnTree, chain, extend_digest
from afield.types import FinishReason, Message, Sampling, ToolCall, Turn, TurnStatus, VersionSpan

text = st.text(max_size=8)
users = st.builds(lambda c: Message(role="user", content=c), text)


def turn(n: int, root: str, conversation: list[Message], parent: str | None = None) -> Turn:
    return Turn(
        id=f"t{n}",
        root=root,
        parent=parent,
        delta_ids=(1, 2),
        token_ids=(3,),
        logprobs=(-0.5,),
        versions=(VersionSpan(0, 1, 0, 0),),
        finish_reason=FinishReason.STOP,
        status=TurnStatus.COMMITTED,
        sampling=Sampling(),
        digest=chain(root, conversation)[-1],
    )


def say(role: str, content: str) -> Message:
    return Message(role=role, content=content)  # pyright: ignore[reportArgumentType]


@given(st.lists(users, min_size=1, max_size=6), st.integers(0, 5))
def test_the_deepest_matching_turn_is_the_parent(messages: list[Message], extra: int) -> None:
    forest = TurnTree()
    for depth in range(1, len(messages) + 1):
        forest.add(turn(depth, "root", messages[:depth]))
    request = messages + [say("user", f"new {i}") for i in range(extra)]
    found = forest.find(chain("root", request))
    assert found is not None
    assert found[0] >= len(messages)
    assert found[1].id == f"t{len(messages)}"


def test_another_root_never_matches() -> None:
    forest = TurnTree([turn(1, "tools-a", [say("user", "hi")])])
    assert forest.find(chain("tools-b", [say("user", "hi")])) is None


def test_a_hint_distinguishes_identical_conversations() -> None:
    conversation = [say("user", "hi"), say("assistant", "yes")]
    forest = TurnTree([turn(1, "r", conversation), turn(2, "r", conversation)])
    digests = chain("r", conversation)
    assert forest.find(digests)[1].id == "t2"
    assert forest.find(digests, ["t1"])[1].id == "t1"
    assert forest.find(digests, ["unknown"])[1].id == "t2"


def test_hints_distinguish_identical_conversations_beside_an_edited_turn() -> None:
    """The client names three turns; the last one it changed, so it is on no path that the request repeats."""
    start, reply = say("user", "hi"), say("assistant", "yes")
    forest = TurnTree([turn(1, "r", [start, reply]), turn(2, "r", [start, reply])])
    forest.add(turn(3, "r", [start, reply, say("user", "go on"), say("assistant", "no")], "t1"))
    request = [start, reply, say("assistant", "no, not at all"), say("user", "and?")]
    found = forest.find(chain("r", request), ["t1", "t3"])
    assert found is not None and found[1].id == "t1"


def test_the_retry_of_a_broken_call_continues_from_the_same_twin() -> None:
    conversation = [say("user", "hi"), say("assistant", "yes")]
    forest = TurnTree([turn(1, "r", conversation), turn(2, "r", conversation)])
    digests = chain("r", [*conversation, say("user", "go on")])
    first = forest.find(digests)
    assert first is not None
    cut = structs.replace(
        turn(3, "r", conversation, first[1].id),
        status=TurnStatus.ABORTED,
        finish_reason=FinishReason.ABORTED,
        request_digest=digests[-1],
    )
    forest.add(cut)
    assert forest.find(digests) == first


def test_a_turn_is_never_edited() -> None:
    first = turn(1, "r", [say("user", "hi")])
    forest = TurnTree([first])
    forest.add(first)
    with pytest.raises(ValueError, match="never edited"):
        forest.add(structs.replace(first, token_ids=(4,)))
    with pytest.raises(ValueError, match="unknown parent"):
        forest.add(turn(2, "r", [say("user", "hi")], parent="t9"))
    with pytest.raises(ValueError, match="root"):
        forest.add(turn(2, "other", [say("user", "hi")], parent="t1"))


arguments = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=5), arguments, max_size=4))
def test_reserialised_tool_arguments_are_the_same_message(value: dict) -> None:
    def call(text: str) -> Message:
        return Message(role="assistant", tool_calls=(ToolCall("any", "f", text),))

    shuffled = dict(reversed(value.items()))
    forms = {
        json.dumps(value),
        json.dumps(shuffled, separators=(",", ":")),
        json.dumps(value, ensure_ascii=False, indent=1),
    }
    assert len({extend_digest("r", call(form)) for form in forms}) == 1


def test_numbers_are_compared_by_value_and_ids_not_at_all() -> None:
    one = Message(role="assistant", tool_calls=(ToolCall("a", "f", '{"n": 1e4}'),))
    two = Message(role="assistant", tool_calls=(ToolCall("b", "f", '{"n":10000}'),), reasoning="hm")
    other = Message(role="assistant", tool_calls=(ToolCall("a", "f", '{"n": 10001}'),))
    assert extend_digest("r", one) == extend_digest("r", two) != extend_digest("r", other)


def test_trimmed_text_is_the_same_message_and_changed_text_is_not() -> None:
    assert extend_digest("r", say("user", " hi\n")) == extend_digest("r", say("user", "hi"))
    assert extend_digest("r", say("user", "hi")) != extend_digest("r", say("assistant", "hi"))
    assert extend_digest("r", say("user", "hi")) != extend_digest("r", say("user", "ho"))


def test_unparsable_arguments_are_compared_as_text() -> None:
    def call(text: str) -> Message:
        return Message(role="assistant", tool_calls=(ToolCall("a", "f", text),))

    assert extend_digest("r", call('{"n": ')) == extend_digest("r", call('{"n": '))
    assert extend_digest("r", call('{"n": ')) != extend_digest("r", call('{"m": '))
