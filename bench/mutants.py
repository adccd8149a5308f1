"""Mutation tests of the gateway: named defects, each of which `afield conformance` has to find.

A mutant is a patch on a copy of the source tree: code at the end of one module that replaces a function
by a wrong one. The runner copies the tree, applies one patch, runs the named clients on one template
family, and expects the judge to say no. A patch that no longer applies (the function is gone, the module
does not import) is an error, and so is a client that is not ok without any patch. Add a mutant whenever
a defect is found that the judge had missed.

The last line of `--json` is {"mutants", "killed", "survived", "errors"}.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from bars import ROOT

TIMEOUT_S = 300
PARALLEL = 2


class Mutant(NamedTuple):
    name: str
    breaks: str
    """What is wrong with the record or the prompt."""
    module: str
    """File below src/afield."""
    code: str
    """Appended to the module."""
    client: str = "langgraph"
    family: str = "chatml"


CHAT = "gateway/dialects/chat.py"
ANTHROPIC = "gateway/dialects/anthropic.py"
RESPONSES = "gateway/dialects/responses_request.py"
GEMINI = "gateway/dialects/gemini.py"


def decoded(change: str) -> str:
    """Replaces a dialect's decoder: `change` rewrites the request, a ModelRequest, in place of the name."""
    return f"""
from msgspec import structs as _structs
_decode = decode
def decode(asked):
    request, wish = _decode(asked)
    messages, tools = list(request.messages), list(request.tools)
{_indented(change)}
    return _structs.replace(request, messages=tuple(messages), tools=tuple(tools)), wish
"""


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.strip("\n").splitlines())


SYSTEM_DROPPED = "messages = [m for m in messages if m.role != 'system']"
EARLIER_RESULT_EMPTIED = """
earlier = [n for n, m in enumerate(messages[:-1]) if m.role == "tool" and messages[n + 1].role != "tool"]
for n in earlier[:1]:
    messages[n] = _structs.replace(messages[n], content="")
"""
SCHEMAS_EMPTIED = """
for n, tool in enumerate(tools):
    function = {**tool.raw["function"], "parameters": {}}
    tools[n] = _structs.replace(tool, raw={**tool.raw, "function": function})
"""

MUTANTS = (
    # --- what is trained -------------------------------------------------------------------------
    Mutant(
        "nothing-trained",
        "every turn is excluded, under a reason that exists",
        "trajectories.py",
        """
_linear = linear
def linear(forest, withheld=NOTHING):
    return _linear(forest, {turn.id: "superseded" for turn in forest.turns})
""",
    ),
    Mutant(
        "every-other-turn-excluded",
        "every second turn is excluded, under the reason that the client's allow-list has",
        "trajectories.py",
        """
_linear = linear
def linear(forest, withheld=NOTHING):
    return _linear(forest, {**withheld, **{turn.id: "aborted" for turn in forest.turns[::2]}})
""",
    ),
    Mutant(
        "exclusion-reason-forged",
        "the call that was cut is excluded as one that was asked again with more room",
        "trajectories.py",
        """
_exclusions = exclusions
def exclusions(forest, withheld=NOTHING):
    return tuple(Exclusion(e.turn, e.tokens, "superseded") for e in _exclusions(forest, withheld))
""",
    ),
    Mutant(
        "exclusion-counts-too-few-tokens",
        "an exclusion says that it leaves out less than it does",
        "trajectories.py",
        """
_exclusions = exclusions
def exclusions(forest, withheld=NOTHING):
    return tuple(Exclusion(e.turn, e.tokens - 1, e.reason) for e in _exclusions(forest, withheld))
""",
    ),
    Mutant(
        "aborted-turn-trained",
        "the partial answer of a call that was cut is in the loss",
        "trajectories.py",
        """
_why_excluded = why_excluded
def why_excluded(turn, withheld):
    return None if turn.status is TurnStatus.ABORTED else _why_excluded(turn, withheld)
""",
    ),
    Mutant(
        "row-trained-twice",
        "the first row is there twice",
        "trajectories.py",
        """
_linear = linear
def linear(forest, withheld=NOTHING):
    rows, excluded = _linear(forest, withheld).trajectories, _linear(forest, withheld).excluded
    return Assembled((*rows, *rows[:1]), excluded)
""",
    ),
    Mutant(
        "turn-trained-in-two-rows",
        "turns that two branches share are in the loss of both",
        "trajectories.py",
        """
def linear(forest, withheld=NOTHING):
    trained = {turn.id for turn in forest.turns if turn.token_ids and not why_excluded(turn, withheld)}
    parents = {turn.parent for turn in forest.turns if turn.id in trained}
    rows = [(path, {turn.id for turn in path} & trained)
            for path in (forest.path(name) for name in trained - parents)]
    return _assemble(rows, exclusions(forest, withheld))
""",
        client="claude-code",
    ),
    Mutant(
        "logprobs-shifted",
        "every log-probability belongs to the token before",
        "trajectories.py",
        """
from msgspec import structs as _structs
_assembled_row = _row
def _row(path, mine, total):
    row = _assembled_row(path, mine, total)
    at = [n for n, bit in enumerate(row.loss_mask) if bit]
    values = list(row.logprobs)
    for n, before in zip(at, at[-1:] + at[:-1]):
        values[n] = row.logprobs[before]
    return _structs.replace(row, logprobs=tuple(values))
""",
    ),
    Mutant(
        "mask-shifted",
        "the loss mask, with its log-probabilities, begins one token early and ends one early",
        "trajectories.py",
        """
from msgspec import structs as _structs
_assembled_row = _row
def _row(path, mine, total):
    row = _assembled_row(path, mine, total)
    mask, values = (*row.loss_mask[1:], 0), (*row.logprobs[1:], 0.0)
    return _structs.replace(row, loss_mask=mask, logprobs=values)
""",
    ),
    # --- what is recorded ------------------------------------------------------------------------
    Mutant(
        "token-dropped",
        "the first sampled token of a call is not recorded",
        "gateway/call_accumulator.py",
        """
from msgspec import structs as _structs
_fold = Partial.fold
def _forgetful(self, chunk, now):
    if not self.ids and len(chunk.token_ids) > 1:
        _fold(self, _structs.replace(chunk, token_ids=chunk.token_ids[1:], logprobs=chunk.logprobs[1:]), now)
        return chunk
    return _fold(self, chunk, now)
Partial.fold = _forgetful
""",
    ),
    Mutant(
        "stop-token-lost",
        "the token that ends a turn is not recorded",
        "gateway/calls.py",
        """
from afield.types import VersionSpan as _Span
_whole = Calls._ended
def _unended(self, intent, partial, status, *more):
    turn = _whole(self, intent, partial, status, *more)
    if status is not TurnStatus.COMMITTED or len(turn.token_ids) < 2:
        return turn
    ids, values = turn.token_ids[:-1], turn.logprobs[:-1]
    return structs.replace(turn, token_ids=ids, logprobs=values, versions=(_Span(0, len(ids), 0, 0),))
Calls._ended = _unended
""",
    ),
    Mutant(
        "logprob-altered",
        "one log-probability of each call is recorded otherwise than the engine gave it",
        "gateway/calls.py",
        """
_whole = Calls._ended
def _altered(self, *args):
    turn = _whole(self, *args)
    return structs.replace(turn, logprobs=(*turn.logprobs[:-1], *(p - 0.01 for p in turn.logprobs[-1:])))
Calls._ended = _altered
""",
    ),
    Mutant(
        "partial-lost",
        "a call that was cut is not in the record",
        "gateway/service.py",
        """
from msgspec import structs as _structs
_record = LocalGateway.record
def _without(self, session):
    record = _record(self, session)
    kept = tuple(turn for turn in record.turns if turn.status is TurnStatus.COMMITTED)
    names = {turn.id for turn in kept}
    excluded = tuple(e for e in record.excluded if e.turn in names)
    return _structs.replace(record, turns=kept, excluded=excluded)
LocalGateway.record = _without
""",
    ),
    Mutant(
        "turn-recorded-twice",
        "the last turn is in the record under two ids",
        "gateway/service.py",
        """
from msgspec import structs as _structs
_record = LocalGateway.record
def _with(self, session):
    record = _record(self, session)
    twin = _structs.replace(record.turns[-1], id="twin")
    return _structs.replace(record, turns=(*record.turns, twin))
LocalGateway.record = _with
""",
    ),
    # --- which turn a request goes on from -------------------------------------------------------
    Mutant(
        "parent-chosen-wrongly",
        "a request goes on from the turn before the one it goes on from",
        "gateway/prompts.py",
        """
_find_spot = _locate
def _locate(forest, *more):
    spot = _find_spot(forest, *more)
    if spot.parent is None or spot.parent.parent is None:
        return spot
    depth = spot.depth - len(spot.parent.messages)
    return structs.replace(spot, parent=forest[spot.parent.parent], depth=depth)
""",
    ),
    Mutant(
        "sampled-turn-tokenised-again",
        "every prompt is rendered anew, so that sampled turns come back in other tokens",
        "gateway/prompts.py",
        """
def _follow(*given):
    return None
""",
    ),
    Mutant(
        "reasoning-dropped",
        "earlier reasoning is not in the prompt",
        "gateway/prompts.py",
        """
_with_reasoning = render
def render(tokens, spot, *more):
    if any(message.reasoning for message in spot.messages):
        messages = tuple(structs.replace(message, reasoning="") for message in spot.messages)
        spot = structs.replace(spot, parent=None, depth=0, messages=messages)
    return _with_reasoning(tokens, spot, *more)
""",
    ),
    Mutant(
        "edit-ignored",
        "an answer that the client changed stands in the prompt as it was sampled",
        "turn_tree.py",
        """
_fields = canonical
def canonical(message):
    return ["assistant"] if message.role == "assistant" else _fields(message)
""",
        client="smolagents",
    ),
    Mutant(
        "retry-sampled-again",
        "a client that asks again after it lost the answer gets another one, and both are trained",
        "gateway/calls.py",
        """
async def _never(self, *args):
    return []
Calls._again = _never
""",
        client="litellm",
    ),
    Mutant(
        "lost-answer-trained",
        "an answer that was lost on its way, and sampled again, is trained beside its retry",
        "gateway/repeats.py",
        """
def excluded(*args):
    return {}
""",
    ),
    Mutant(
        "retry-on-another-twin",
        "the retry of a broken call goes on from a lost answer that said the same",
        "turn_tree.py",
        """
def _unused_first(self, twins, asked):
    return [t for t in twins if t not in self._parents] or twins
assert Forest._free
Forest._free = _unused_first
""",
        client="terminus-2",
    ),
    Mutant(
        "ids-of-edited-turns-confuse",
        "a turn that the client edited hides the ids that tell two equal answers apart",
        "turn_tree.py",
        """
def _all_or_none(self, twins, named):
    return [t for t in twins if named <= {turn.id for turn in self.path(t)}] or twins
assert Forest._most_named
Forest._most_named = _all_or_none
""",
        client="qwen-code",
    ),
    Mutant(
        "quotation-keeps-lost-answer",
        "a lost answer counts as used because a summary quotes its retry, which said the same",
        "gateway/repeats.py",
        """
assert _unused
def _unused(forest, group, linked):
    used = [turn for turn in group if forest.has_children(turn.id) or turn.id in linked]
    return [turn for turn in group if turn not in used and not _quoted(forest, turn)]
""",
        client="opencode",
    ),
    # --- messages --------------------------------------------------------------------------------
    Mutant(
        "system-message-dropped", "the system message is not in the prompt", CHAT, decoded(SYSTEM_DROPPED)
    ),
    Mutant(
        "system-message-altered",
        "the system message lacks its last character",
        CHAT,
        decoded("""
for n, m in enumerate(messages):
    if m.role == "system":
        messages[n] = _structs.replace(m, content=m.content[:-1])
"""),
    ),
    Mutant(
        "user-message-doubled",
        "the first user message is in the prompt twice",
        CHAT,
        decoded("""
at = next(n for n, m in enumerate(messages) if m.role == "user")
messages.insert(at, messages[at])
"""),
    ),
    Mutant(
        "user-message-altered",
        "a word of the user is another one",
        CHAT,
        decoded("""
for n, m in enumerate(messages):
    if m.role == "user":
        messages[n] = _structs.replace(m, content=m.content.replace("steps", "tasks"))
"""),
    ),
    Mutant(
        "tool-result-dropped",
        "an earlier tool result is empty",
        CHAT,
        decoded(EARLIER_RESULT_EMPTIED),
    ),
    Mutant(
        "tool-result-altered",
        "tool results lack their last character",
        CHAT,
        decoded("""
for n, m in enumerate(messages):
    if m.role == "tool":
        messages[n] = _structs.replace(m, content=m.content[:-1])
"""),
    ),
    Mutant(
        "parallel-results-swapped",
        "the results of two parallel calls stand in each other's place",
        "gateway/echoed_turns.py",
        """
_in_order = _as_sampled
def _as_sampled(turn, messages):
    told = list(_in_order(turn, messages))
    results = [message for message in told if message.role == "tool"]
    return [message for message in told if message.role != "tool"] + results[::-1]
""",
    ),
    Mutant(
        "message-order-changed",
        "the system message stands behind the first user message",
        CHAT,
        decoded("messages[:2] = messages[1::-1]"),
    ),
    Mutant(
        "control-tokens-not-escaped",
        "a control token that content spells becomes one",
        "chat/escape.py",
        """
Escape.__call__ = lambda self, text: text
""",
    ),
    Mutant(
        "line-end-after-turn-lost",
        "the line end behind the token that ends a turn is missing",
        "chat/tokenizer.py",
        """
_text_behind = ChatTokens._behind_stop
ChatTokens._behind_stop = lambda self, text, truncated: _text_behind(self, text, truncated)[1:]
""",
    ),
    # --- tools -----------------------------------------------------------------------------------
    Mutant("tool-schemas-emptied", "tools have no parameters", CHAT, decoded(SCHEMAS_EMPTIED)),
    Mutant("tools-reordered", "tools stand in another order", CHAT, decoded("tools.reverse()")),
    Mutant(
        "tool-description-dropped",
        "tools have no description",
        CHAT,
        decoded("""
for n, tool in enumerate(tools):
    function = {key: value for key, value in tool.raw["function"].items() if key != "description"}
    tools[n] = _structs.replace(tool, raw={**tool.raw, "function": function})
"""),
    ),
    # --- the other dialects ----------------------------------------------------------------------
    Mutant(
        "responses-instructions-dropped",
        "the instructions of a Responses request are not in the prompt",
        RESPONSES,
        decoded(SYSTEM_DROPPED),
        client="openai-agents",
    ),
    Mutant(
        "responses-output-dropped",
        "an earlier function_call_output is empty",
        RESPONSES,
        decoded(EARLIER_RESULT_EMPTIED),
        client="openai-agents",
    ),
    Mutant(
        "gemini-schemas-emptied",
        "function declarations have no parameters",
        GEMINI,
        decoded(SCHEMAS_EMPTIED),
        client="google-adk",
    ),
    Mutant(
        "gemini-response-dropped",
        "an earlier functionResponse is empty",
        GEMINI,
        decoded(EARLIER_RESULT_EMPTIED),
        client="google-adk",
    ),
    Mutant(
        "anthropic-system-cut",
        "the system prompt of a Messages request breaks off",
        ANTHROPIC,
        decoded("""
if messages[0].role == "system":
    messages[0] = _structs.replace(messages[0], content=messages[0].content[:500])
"""),
        client="claude-code",
    ),
    Mutant(
        "later-system-dropped",
        "a system message in the middle is left out where the template refuses it",
        "chat/message_rules.py",
        """
def _left_out(messages, context):
    count = _leading(messages, context)
    return messages[:count] + [message for message in messages[count:] if message.role != "system"]
_STEPS["fold-system"] = _left_out
""",
        client="claude-code",
        family="qwen3.5",
    ),
)


class Outcome(NamedTuple):
    name: str
    killed: bool
    why: str
    """The first problem that the judge named, or what went wrong with the run."""
    error: bool = False
    seconds: float = 0.0


def conformance(tree: Path, client: str, family: str) -> tuple[dict[str, object] | None, str]:
    """What `afield conformance` from this tree says of one client, and what it printed besides."""
    command = [sys.executable, "-m", "afield", "conformance", client, "--template", family, "--json"]
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None, f"{client} did not end within {TIMEOUT_S} s"
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])["clients"][client], done.stderr
    except (IndexError, ValueError, KeyError):
        return None, done.stderr.strip()[-600:]


def copied(source: Path, folder: Path) -> Path:
    """A copy of the source tree; raises unless it is the one that is imported."""
    shutil.copytree(source / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    environment = os.environ | {"PYTHONPATH": str(folder / "src")}
    command = [sys.executable, "-c", "import afield; print(afield.__file__)"]
    shown = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    if not Path(shown.stdout.strip()).is_relative_to(folder):
        raise SystemExit(f"the copy is not what is imported, but {shown.stdout.strip()}; cannot test mutants")
    return folder


def tried(mutant: Mutant, source: Path) -> Outcome:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="afield-mutant-", ignore_cleanup_errors=True) as scratch:
        tree = copied(source, Path(scratch).resolve())
        module = tree / "src" / "afield" / mutant.module
        if not module.is_file():
            return Outcome(mutant.name, False, f"there is no {mutant.module}", error=True)
        module.write_text(module.read_text(encoding="utf-8") + mutant.code, encoding="utf-8")
        verdict, printed = conformance(tree, mutant.client, mutant.family)
    seconds = round(time.monotonic() - began, 1)
    if verdict is None or "skipped: " in printed:
        return Outcome(mutant.name, False, printed.strip()[-600:], error=True, seconds=seconds)
    problems = [
        line.strip().removeprefix("- ") for line in printed.splitlines() if line.strip().startswith("- ")
    ]
    return Outcome(mutant.name, not verdict["ok"], problems[0][:160] if problems else "ok", seconds=seconds)


def control(client: str, family: str, source: Path) -> Outcome:
    """The client on the tree as it is."""
    verdict, printed = conformance(source, client, family)
    fine = verdict is not None and verdict["ok"] is True
    return Outcome(
        f"no mutant, {client} on {family}", False, "ok" if fine else printed[-600:], error=not fine
    )


def selected(names: Sequence[str]) -> list[Mutant]:
    known = {mutant.name: mutant for mutant in MUTANTS}
    if unknown := sorted(set(names) - set(known)):
        raise SystemExit(f"unknown mutants {unknown}; choose from: {', '.join(known)}")
    return [known[name] for name in names] if names else list(MUTANTS)


def main() -> int:
    parser = argparse.ArgumentParser(description="run the conformance judge against wrong gateways")
    parser.add_argument("names", nargs="*", metavar="MUTANT", help="which ones; default: all")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--list", action="store_true", help="list the mutants and what each breaks")
    args = parser.parse_args()
    mutants = selected(args.names)
    if args.list:
        for mutant in mutants:
            print(f"{mutant.name:34} {mutant.breaks}")
        return 0
    runs = sorted({(mutant.client, mutant.family) for mutant in mutants})
    outcomes: list[Outcome] = []
    with (
        tempfile.TemporaryDirectory(prefix="afield-mutants-") as scratch,
        ThreadPoolExecutor(PARALLEL) as pool,
    ):
        source = copied(ROOT, Path(scratch).resolve())  # once, so that all mutants are of one tree
        controls = pool.map(lambda run: control(run[0], run[1], source), runs)
        mutated = pool.map(lambda mutant: tried(mutant, source), mutants)
        for outcome in chain(controls, mutated):
            outcomes.append(outcome)
            state = "ERROR" if outcome.error else "killed" if outcome.killed else "-"
            print(f"{outcome.name:34} {state:8} {outcome.seconds:6} s  {outcome.why}", flush=True)
    named = {mutant.name for mutant in mutants}
    errors = [outcome.name for outcome in outcomes if outcome.error]
    survived = [o.name for o in outcomes if o.name in named and not o.killed and not o.error]
    killed = sum(outcome.killed for outcome in outcomes)
    if args.json:
        print(json.dumps({"mutants": len(mutants), "killed": killed, "survived": survived, "errors": errors}))
    return 0 if not survived and not errors else 1


if __name__ == "__main__":
    raise SystemExit(main())
