"""The invariants I1 to I10, judged from outside: by what the gateway's HTTP answers say and by the ledger.

Each `i*` takes what was `Seen` of a session and raises AssertionError that names the turn. I5, I6, I8 and
I11 compare more than one look and take what they compare. The rendering they are held to is written out by
hand here, for the demo policy's template; nothing of `afield.chat` is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from tokenizers import Tokenizer

from afield.engines.recording import RecordedCall
from support.gateways import POLICY

TOKENIZER = Tokenizer.from_file(str(POLICY / "tokenizer.json"))
CONTROL = {token.content: n for n, token in TOKENIZER.get_added_tokens_decoder().items()}
STOP = CONTROL["<|im_end|>"]
_SPELLED = re.compile("|".join(map(re.escape, CONTROL)))
Row = dict[str, Any]


class Seen(Struct, frozen=True, kw_only=True):
    """A session from outside. `tools` says what the client offered in each turn, as the template gets it."""

    turns: list[Row]
    linear: Row
    per_turn: Row
    tree: Row
    ledger: dict[str, RecordedCall]
    tools: Mapping[str, list[Row]] = {}

    @property
    def by_id(self) -> dict[str, Row]:
        return {turn["id"]: turn for turn in self.turns}


async def look(
    get: Callable[[str], Awaitable[Any]],
    session_id: str,
    ledger: Iterable[RecordedCall],
    tools: Mapping[str, list[Row]] | None = None,
) -> Seen:
    """`get` asks the control API for a path. Entries of other sessions are left aside."""
    base = f"/sessions/{session_id}"
    served: dict[str, RecordedCall] = {}
    for entry in ledger:
        owner, _, turn_id = entry.call_id.rpartition("/")
        if owner == session_id:
            assert turn_id not in served, f"the engine was asked twice for {entry.call_id}"
            served[turn_id] = entry
    return Seen(
        turns=(await get(f"{base}/turns?prompt_ids=1"))["turns"],
        linear=await get(f"{base}/trajectories"),
        per_turn=await get(f"{base}/trajectories?form=turns"),
        tree=await get(f"{base}/trajectories?form=tree"),
        ledger=served,
        tools=tools or {},
    )


# --- what was sent and what was kept --------------------------------------------------------------


def i1(seen: Seen) -> None:
    """The prompt sent is the parent's ids and a recorded delta, or a declared root."""
    turns = seen.by_id
    for turn in seen.turns:
        entry = seen.ledger.get(turn["id"])
        if entry is not None:
            assert list(entry.prompt_ids) == turn["prompt_ids"], f"{turn['id']}: sent is not what is recorded"
        else:
            assert not turn["token_ids"], f"{turn['id']} has tokens that no engine sampled"
        if turn["parent"] is None:
            assert turn["tier"] in ("full", "raw"), f"{turn['id']} is a root but says {turn['tier']}"
            continue
        parent = turns[turn["parent"]]
        before = parent["prompt_ids"] + parent["token_ids"]
        assert parent["status"] == "committed", f"{turn['id']} extends {parent['id']}, {parent['status']}"
        assert turn["prompt_ids"][: len(before)] == before, f"{turn['id']}: does not begin as its parent ends"
        assert len(turn["prompt_ids"]) > len(before), f"{turn['id']} adds nothing to its parent"
    assert set(seen.ledger) <= set(turns), f"calls without a turn: {set(seen.ledger) - set(turns)}"


def i2(seen: Seen) -> None:
    """What a path's nodes add, one after the other, is what the engine saw and sampled; in every form."""
    turns = seen.by_id
    paths: dict[str | None, list[int]] = {None: []}
    for node in seen.tree["nodes"]:
        turn, entry = turns[node["id"]], seen.ledger.get(node["id"])
        path = paths[node["id"]] = paths[node["parent"]] + node["token_ids"]
        sampled = list(entry.token_ids) if entry else []
        assert path == turn["prompt_ids"] + sampled, f"{node['id']}: its path is not what the engine saw"
    for form in (seen.linear, seen.per_turn):
        for row in form["trajectories"]:
            last = row["turns"][-1]["id"]
            ids = row["token_ids"]
            assert ids[: len(paths[last])] == paths[last], f"the row of {last} is not its path"
            for part in row["turns"]:
                sampled = list(seen.ledger[part["id"]].token_ids)
                assert ids[part["start"] : part["end"]] == sampled, f"{part['id']}: not the sampled ids"


def i4(seen: Seen) -> None:
    """Every sampled token is trained once or excluded with a reason, and has its one log-probability."""
    for name, rows in _trained(seen).items():
        excluded = {e["turn"]: e for e in seen.linear["excluded"]}
        assert len(excluded) == len(seen.linear["excluded"]), "a turn is excluded twice"
        for turn_id, entry in seen.ledger.items():
            found = rows.get(turn_id, [])
            if turn_id in excluded:
                assert not found, f"{name}: {turn_id} is excluded and trained"
                assert excluded[turn_id]["reason"], f"{turn_id} is excluded without a reason"
                sampled, said = len(entry.token_ids), excluded[turn_id]["tokens"]
                assert said == sampled, f"{turn_id}: {said} tokens excluded, {sampled} sampled"
            else:
                assert len(found) == bool(entry.token_ids), f"{name}: {turn_id} is trained {len(found)} times"
                for logprobs in found:
                    assert logprobs == list(entry.logprobs), f"{name}: log-probabilities of {turn_id} differ"
        assert set(rows) <= set(seen.ledger), f"{name}: trains {set(rows) - set(seen.ledger)}, never sampled"
    for form in (seen.linear, seen.per_turn):
        weights = [row["weight"] for row in form["trajectories"]]
        assert not weights or abs(sum(weights) - 1) < 1e-9, f"a rollout weighs {sum(weights)}"


def _trained(seen: Seen) -> dict[str, dict[str, list[list[float]]]]:
    """In each form: the log-probabilities under the mask, per turn that owns some; one list per row."""
    out: dict[str, dict[str, list[list[float]]]] = {"linear": {}, "turns": {}, "tree": {}}
    for name, form in (("linear", seen.linear), ("turns", seen.per_turn)):
        for row in form["trajectories"]:
            masked = {i for i, bit in enumerate(row["loss_mask"]) if bit}
            for part in row["turns"]:
                own = range(part["start"], part["end"])
                assert masked.issuperset(own), f"{name}: {part['id']} is only partly in the loss"
                masked.difference_update(own)
                out[name].setdefault(part["id"], []).append([row["logprobs"][i] for i in own])
            assert not masked, f"{name}: tokens in the loss that no turn owns"
            zero = [i for i, bit in enumerate(row["loss_mask"]) if not bit and row["logprobs"][i] != 0.0]
            assert not zero, f"{name}: log-probabilities outside the loss at {zero[:5]}"
    for node in seen.tree["nodes"]:
        own = [i for i, bit in enumerate(node["loss_mask"]) if bit]
        if own:
            out["tree"].setdefault(node["id"], []).append([node["logprobs"][i] for i in own])
    return out


def i7(seen: Seen) -> None:
    """Version spans cover all sampled tokens, and say what the engine said."""
    for turn in seen.turns:
        entry = seen.ledger.get(turn["id"])
        spans = [[s.start, s.end, s.low, s.high] for s in entry.versions] if entry else []
        assert turn["versions"] == spans, f"{turn['id']}: versions {turn['versions']}, the engine's {spans}"
        covered = [i for start, end, *_ in turn["versions"] for i in range(start, end)]
        assert covered == list(range(len(turn["token_ids"]))), f"{turn['id']}: spans leave tokens uncovered"
    for form in (seen.linear, seen.per_turn):
        for row in form["trajectories"]:
            masked = [i for i, bit in enumerate(row["loss_mask"]) if bit]
            covered = [i for start, end, *_ in row["versions"] for i in range(start, end)]
            assert covered == masked, "the spans of a row do not cover what it trains"


# --- rendering ------------------------------------------------------------------------------------


def conversation(seen: Seen, turn: Row) -> list[Row]:
    """All messages a turn was asked with."""
    turns, asked = seen.by_id, list(turn["messages"])
    if turn["status"] == "committed":
        asked.pop()
    while turn["parent"] is not None:
        turn = turns[turn["parent"]]
        asked = turn["messages"] + asked
    return asked


def delta_of(seen: Seen, turn: Row) -> list[int]:
    """The environment's ids of a turn."""
    if turn["parent"] is None:
        return turn["prompt_ids"]
    parent = seen.by_id[turn["parent"]]
    return turn["prompt_ids"][len(parent["prompt_ids"]) + len(parent["token_ids"]) :]


def i3(seen: Seen) -> None:
    """Environment ids are what the template writes for those messages, to the last newline."""
    for turn in seen.turns:
        if turn["tier"] == "raw":
            continue
        messages, delta = conversation(seen, turn), delta_of(seen, turn)
        text = rendered(messages, seen.tools.get(turn["id"], []))
        hostile = any(_SPELLED.search(said) for m in messages for said in _texts(m))
        want: Sequence[Any] = text if hostile else TOKENIZER.encode(text, add_special_tokens=False).ids
        have: Sequence[Any] = _decoded(delta) if hostile else delta
        if turn["parent"] is None:
            assert list(have) == list(want), f"{turn['id']}: {_decoded(delta)!r} is not {text!r}"
            continue
        assert list(want[-len(have) :]) == list(have), (
            f"{turn['id']}: {_decoded(delta)!r} does not end {text!r}"
        )
        sampled = seen.by_id[turn["parent"]]["token_ids"]
        closed = [*sampled[-1:], delta[0]]
        assert closed.count(STOP) == 1, (
            f"{turn['id']}: the turn before it is closed {closed.count(STOP)} times"
        )


def i10(seen: Seen) -> None:
    """Control ids stand where the template writes them, and nowhere else."""
    for turn in seen.turns:
        if turn["tier"] == "raw":
            continue
        messages, delta = conversation(seen, turn), delta_of(seen, turn)
        harmless = [_harmless(message) for message in messages]
        tools = json.loads(_SPELLED.sub("x", json.dumps(seen.tools.get(turn["id"], []))))
        ids = TOKENIZER.encode(rendered(harmless, tools), add_special_tokens=False).ids
        want = [i for i in ids if i in _CONTROL_IDS]
        have = [i for i in delta if i in _CONTROL_IDS]
        if turn["parent"] is not None:
            want = want[-len(have) :]
        assert have == want, f"{turn['id']}: control ids {have} in its environment, the template's are {want}"


_CONTROL_IDS = frozenset(CONTROL.values())


def _decoded(ids: Sequence[int]) -> str:
    return TOKENIZER.decode(list(ids), skip_special_tokens=False)


def _texts(message: Row) -> Iterable[str]:
    yield from (message.get("content", ""), message.get("reasoning", ""))
    for call in message.get("tool_calls", ()):
        yield from (call["name"], call["arguments"])


def _harmless(message: Row) -> Row:
    text = json.dumps(message, ensure_ascii=False)
    return json.loads(_SPELLED.sub("x", text))


def rendered(messages: Sequence[Row], tools: Sequence[Row]) -> str:
    """What the demo policy's template writes, by hand."""
    out, rest = "", list(messages)
    system = rest.pop(0) if rest and rest[0]["role"] in ("system", "developer") else None
    if system or tools:
        head = [system.get("content", "")] if system else []
        if tools:
            lines = ["# Tools", "To use one, write a tool call with its name and arguments as JSON."]
            head.append("\n".join(lines + [_json(tool.get("function") or tool) for tool in tools]))
        body = "\n\n".join(head)
        out += f"<|im_start|>system\n{body}<|im_end|>\n"
    for n, message in enumerate(rest):
        role, content = message["role"], message.get("content", "")
        if role == "tool":
            first = n == 0 or rest[n - 1]["role"] != "tool"
            last = n + 1 == len(rest) or rest[n + 1]["role"] != "tool"
            out += "<|im_start|>user" * first + f"\n<tool_response>\n{content}\n</tool_response>"
            out += "<|im_end|>\n" * last
        elif role == "assistant":
            out += f"<|im_start|>assistant\n{_assistant(message)}<|im_end|>\n"
        else:
            out += f"<|im_start|>{'system' if role == 'developer' else role}\n{content}<|im_end|>\n"
    return out + "<|im_start|>assistant\n"


def _assistant(message: Row) -> str:
    reasoning, content = message.get("reasoning", ""), message.get("content", "")
    calls: list[str] = []
    for call in message.get("tool_calls", ()):
        body = f'{{"name": "{call["name"]}", "arguments": {_arguments(call["arguments"])}}}'
        calls.append(f"<tool_call>\n{body}\n</tool_call>")
    said = "\n".join([*([content] if content else []), *calls])
    return (f"<think>\n{reasoning}\n</think>\n\n" if reasoning else "") + said


def _arguments(text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return _json(value) if isinstance(value, dict) else text


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# --- roots ----------------------------------------------------------------------------------------


def i9(seen: Seen) -> None:
    """Other tools are another root; a turn never extends one that was offered other tools."""
    roots: dict[str, str] = {}
    for turn in seen.turns:
        if turn["tier"] == "raw":
            continue
        offered = json.dumps(seen.tools.get(turn["id"], []), sort_keys=True)
        assert roots.setdefault(turn["root"], offered) == offered, (
            f"{turn['id']}: other tools on the same root"
        )
        if turn["parent"] is not None:
            assert seen.by_id[turn["parent"]]["root"] == turn["root"], f"{turn['id']}: not its parent's root"


# --- comparisons ----------------------------------------------------------------------------------


def i5(looks: Mapping[str, Seen]) -> None:
    """However it was asked, streaming or not, in whichever dialect: the same forest."""
    shapes = {name: _shape(seen) for name, seen in looks.items()}
    first, *others = shapes
    for other in others:
        assert len(shapes[first]) == len(shapes[other]), (
            f"{first}: {len(shapes[first])} turns, not so {other}"
        )
        for one, two in zip(shapes[first], shapes[other], strict=True):
            for key, value in one.items():
                assert value == two[key], f"{first} and {other}: {key} of {one['id']} differ"


def _shape(seen: Seen) -> list[Row]:
    keys = (
        "id",
        "parent",
        "root",
        "prompt_ids",
        "token_ids",
        "logprobs",
        "versions",
        "finish_reason",
        "status",
    )
    return [{key: turn[key] for key in keys} for turn in seen.turns]


def i6(ended: Mapping[str, Sequence[int]], asked: int, after: Seen) -> None:
    """After a kill: what a client saw the end of is committed whole, every other call is accounted for.

    `ended` are the turns whose end a client saw, with their ids; `asked` is how many calls were begun.
    """
    turns = after.by_id
    for turn_id, ids in ended.items():
        assert turn_id in turns, f"{turn_id} was seen to its end and is lost"
        assert turns[turn_id]["status"] == "committed", f"{turn_id} is {turns[turn_id]['status']}"
        assert turns[turn_id]["token_ids"] == list(ids), f"{turn_id} has other tokens than its client got"
    assert len(turns) == asked, f"{asked} calls were begun, {len(turns)} are recorded"
    for turn in after.turns:
        assert turn["status"] in ("committed", "aborted", "dangling")


def i8(statuses: Mapping[str, int], before: Seen, after: Seen) -> None:
    """With the key of another session every door is closed, and nothing changes behind it."""
    for what, status in statuses.items():
        assert status == 401, f"{what} with another session's key: {status}"
    assert before.turns == after.turns, "another session's key changed the forest"


def i11(seen: Seen, rescored: Sequence[Sequence[float]], tolerance: float = 1e-4) -> None:
    """The same weights give the recorded log-probabilities; one list per linear row."""
    rows = seen.linear["trajectories"]
    assert len(rows) == len(rescored)
    checked = 0
    for n, (row, scores) in enumerate(zip(rows, rescored, strict=True)):
        for i, bit in enumerate(row["loss_mask"]):
            if bit:
                checked += 1
                off = abs(row["logprobs"][i] - scores[i])
                assert off < tolerance, f"row {n}, token {i}: recorded {row['logprobs'][i]}, off by {off}"
    assert checked, "nothing was trained"


SINGLE = {"I1": i1, "I2": i2, "I3": i3, "I4": i4, "I7": i7, "I9": i9, "I10": i10}
