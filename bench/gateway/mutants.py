"""Mutation tests of the gateway: named defects that `afield conformance` has to detect.

    python -m bench.gateway.mutants [--list] [--json] [MUTANT ...]

A mutant replaces one function of a copy of the source tree by a wrong one. The named conformance client runs
on one template family and has to fail. A mutant that does not apply to the present source is an error
(tests/bench/test_mutants_apply.py checks it), and so is a client that fails without any mutant. Add a mutant
whenever a defect is found that conformance missed.

The last line of `--json` is {"mutants", "killed", "survived", "errors"}.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import functools
import importlib
import json
import operator
import os
import re
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

from bench import ROOT

TIMEOUT_S = 300
PARALLEL = 2


class Mutant(NamedTuple):
    """A defect: one function of the source tree, replaced by a wrong one."""

    name: str
    breaks: str
    """The error in the record or in the prompt."""
    target: str
    """The function: module below `afield`, colon, name in the module."""
    code: str
    """Defines `mutant(original, *args)`, which is called instead of the target with the module's globals."""
    client: str = "langgraph"
    """Conformance client that has to detect it."""
    family: str = "chatml"
    """Template family that the client runs on."""

    @property
    def module(self) -> str:
        return f"afield.{self.target.partition(':')[0]}"

    @property
    def attribute(self) -> str:
        return self.target.partition(":")[2]

    @property
    def patch(self) -> str:
        """Source that replaces the target, appended to its module; also in tables of functions."""
        return f"""
{self.code}
def _mutated(original):
    def call(*args, **kwargs):
        return mutant(original, *args, **kwargs)
    return call
_original = {self.attribute}
{self.attribute} = _mutated(_original)
for _table in [value for value in list(globals().values()) if isinstance(value, dict)]:
    for _key in [key for key, value in _table.items() if value is _original]:
        if _table is not globals():
            _table[_key] = {self.attribute}
"""


CHAT = "gateway.dialects.chat:decode"
ANTHROPIC = "gateway.dialects.anthropic:decode"
RESPONSES = "gateway.dialects.responses_request:decode"
GEMINI = "gateway.dialects.gemini:decode"
REPLACE = "from msgspec.structs import replace as _replace"


def decoded(change: str) -> str:
    """A wrong decoder: `change` edits the lists `messages` and `tools` of the decoded request."""
    return f"""
{REPLACE}
def mutant(original, *args):
    request, options = original(*args)
    messages, tools = list(request.messages), list(request.tools)
{_indented(change)}
    return _replace(request, messages=tuple(messages), tools=tuple(tools)), options
"""


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.strip("\n").splitlines())


SYSTEM_DROPPED = "messages = [m for m in messages if m.role != 'system']"
EARLIER_RESULT_EMPTIED = """
earlier = [n for n, m in enumerate(messages[:-1]) if m.role == "tool" and messages[n + 1].role != "tool"]
for n in earlier[:1]:
    messages[n] = _replace(messages[n], content="")
"""
SCHEMAS_EMPTIED = """
for n, tool in enumerate(tools):
    function = {**tool.raw["function"], "parameters": {}}
    tools[n] = _replace(tool, raw={**tool.raw, "function": function})
"""

MUTANTS = (
    # --- trained rows ----------------------------------------------------------------------------
    Mutant(
        "nothing-trained",
        "every turn is excluded, with an existing reason",
        "trajectories:linear",
        """
def mutant(original, tree, *excluded):
    return original(tree, {turn.id: "superseded" for turn in tree.turns})
""",
    ),
    Mutant(
        "every-other-turn-excluded",
        "every second turn is excluded, with the reason that the client's allow-list has",
        "trajectories:linear",
        """
def mutant(original, tree, excluded={}):
    return original(tree, {**excluded, **{turn.id: "aborted" for turn in tree.turns[::2]}})
""",
    ),
    Mutant(
        "exclusion-reason-forged",
        "a truncated call is excluded as one that was repeated with more room",
        "trajectories:exclusions",
        """
def mutant(original, *args):
    return tuple(Exclusion(e.turn, e.tokens, "superseded") for e in original(*args))
""",
    ),
    Mutant(
        "exclusion-counts-too-few-tokens",
        "an exclusion counts one token too few",
        "trajectories:exclusions",
        """
def mutant(original, *args):
    return tuple(Exclusion(e.turn, e.tokens - 1, e.reason) for e in original(*args))
""",
    ),
    Mutant(
        "aborted-turn-trained",
        "the partial answer of a truncated call is in the loss",
        "trajectories:why_excluded",
        """
def mutant(original, turn, *excluded):
    return None if turn.status is TurnStatus.ABORTED else original(turn, *excluded)
""",
    ),
    Mutant(
        "row-trained-twice",
        "the first row exists twice",
        "trajectories:linear",
        """
def mutant(original, *args):
    assembled = original(*args)
    rows = assembled.trajectories
    return Assembled((*rows, *rows[:1]), assembled.excluded)
""",
    ),
    Mutant(
        "turn-trained-in-two-rows",
        "turns that two branches share are in the loss of both",
        "trajectories:linear",
        """
def mutant(original, tree, *excluded):
    trained = {t.id for t in tree.turns if t.token_ids and not why_excluded(t, *(excluded or ({},)))}
    parents = {turn.parent for turn in tree.turns if turn.id in trained}
    rows = [(path, {turn.id for turn in path} & trained)
            for path in (tree.path(name) for name in trained - parents)]
    return _assemble(rows, exclusions(tree, *excluded))
""",
        client="claude-code",
    ),
    Mutant(
        "logprobs-shifted",
        "every log-probability belongs to the token before",
        "trajectories:_row",
        f"""
{REPLACE}
def mutant(original, *args):
    row = original(*args)
    sampled = [n for n, bit in enumerate(row.loss_mask) if bit]
    values = list(row.logprobs)
    for n, before in zip(sampled, sampled[-1:] + sampled[:-1]):
        values[n] = row.logprobs[before]
    return _replace(row, logprobs=tuple(values))
""",
    ),
    Mutant(
        "mask-shifted",
        "loss mask and log-probabilities begin and end one token early",
        "trajectories:_row",
        f"""
{REPLACE}
def mutant(original, *args):
    row = original(*args)
    return _replace(row, loss_mask=(*row.loss_mask[1:], 0), logprobs=(*row.logprobs[1:], 0.0))
""",
    ),
    # --- recorded turns --------------------------------------------------------------------------
    Mutant(
        "token-dropped",
        "the first sampled token of a call is not recorded",
        "gateway.call_accumulator:CallAccumulator.fold",
        f"""
{REPLACE}
def mutant(original, self, chunk, now):
    if not self.ids and len(chunk.token_ids) > 1:
        original(self, _replace(chunk, token_ids=chunk.token_ids[1:], logprobs=chunk.logprobs[1:]), now)
        return chunk
    return original(self, chunk, now)
""",
    ),
    Mutant(
        "stop-token-lost",
        "the token that ends a turn is not recorded",
        "gateway.calls:Calls._ended",
        f"""
{REPLACE}
from afield.types import VersionSpan as _Span
def mutant(original, *args):
    turn = original(*args)
    if turn.status is not TurnStatus.COMMITTED or len(turn.token_ids) < 2:
        return turn
    ids, values = turn.token_ids[:-1], turn.logprobs[:-1]
    return _replace(turn, token_ids=ids, logprobs=values, versions=(_Span(0, len(ids), 0, 0),))
""",
    ),
    Mutant(
        "logprob-altered",
        "one log-probability of each call is recorded wrongly",
        "gateway.calls:Calls._ended",
        f"""
{REPLACE}
def mutant(original, *args):
    turn = original(*args)
    return _replace(turn, logprobs=(*turn.logprobs[:-1], *(p - 0.01 for p in turn.logprobs[-1:])))
""",
    ),
    Mutant(
        "partial-lost",
        "a truncated call is not in the record",
        "gateway.service:LocalGateway.record",
        f"""
{REPLACE}
from afield.types import TurnStatus as _TurnStatus
def mutant(original, *args):
    record = original(*args)
    kept = tuple(turn for turn in record.turns if turn.status is _TurnStatus.COMMITTED)
    names = {{turn.id for turn in kept}}
    return _replace(record, turns=kept, excluded=tuple(e for e in record.excluded if e.turn in names))
""",
    ),
    Mutant(
        "turn-recorded-twice",
        "the last turn is in the record with two ids",
        "gateway.service:LocalGateway.record",
        f"""
{REPLACE}
def mutant(original, *args):
    record = original(*args)
    return _replace(record, turns=(*record.turns, _replace(record.turns[-1], id="twin")))
""",
    ),
    # --- parent of a request ---------------------------------------------------------------------
    Mutant(
        "parent-chosen-wrongly",
        "a request continues from the parent of its real parent",
        "gateway.prompts:_match",
        f"""
{REPLACE}
def mutant(original, tree, *args):
    match = original(tree, *args)
    if match.parent is None or match.parent.parent is None:
        return match
    depth = match.depth - len(match.parent.messages)
    return _replace(match, parent=tree[match.parent.parent], depth=depth)
""",
    ),
    Mutant(
        "sampled-turn-tokenised-again",
        "every prompt is rendered from the start, so that sampled turns get other tokens",
        "gateway.prompts:_follow",
        """
def mutant(original, *args):
    return None
""",
    ),
    Mutant(
        "reasoning-dropped",
        "earlier reasoning is not in the prompt",
        "gateway.prompts:render",
        f"""
{REPLACE}
def mutant(original, tokenizer, match, *args):
    if any(message.reasoning for message in match.messages):
        messages = tuple(_replace(message, reasoning="") for message in match.messages)
        match = _replace(match, parent=None, depth=0, messages=messages)
    return original(tokenizer, match, *args)
""",
    ),
    Mutant(
        "edit-ignored",
        "an answer that the client changed is in the prompt as it was sampled",
        "turn_tree:canonical",
        """
def mutant(original, message):
    return ["assistant"] if message.role == "assistant" else original(message)
""",
        client="smolagents",
    ),
    Mutant(
        "retry-sampled-again",
        "a client that repeats a call after losing the answer gets another one, and both are trained",
        "gateway.calls:Calls._repeat_answer",
        """
async def mutant(original, *args):
    return []
""",
        client="litellm",
    ),
    Mutant(
        "lost-answer-trained",
        "an answer that was lost in transit is trained beside its retry",
        "gateway.repeats:excluded",
        """
def mutant(original, *args):
    return {}
""",
    ),
    Mutant(
        "retry-on-another-twin",
        "the retry of a broken call continues from a lost answer with the same text",
        "turn_tree:TurnTree._free",
        """
def mutant(original, self, twins, *args):
    return [turn for turn in twins if turn not in self._parents] or twins
""",
        client="terminus-2",
    ),
    Mutant(
        "ids-of-edited-turns-confuse",
        "a turn that the client edited hides the ids that distinguish two equal answers",
        "turn_tree:TurnTree._most_named",
        """
def mutant(original, self, twins, named):
    return [t for t in twins if named <= {turn.id for turn in self.path(t)}] or twins
""",
        client="qwen-code",
    ),
    Mutant(
        "quotation-keeps-lost-answer",
        "a lost answer counts as used because a summary quotes its retry with the same text",
        "gateway.repeats:_unused",
        """
def mutant(original, tree, group, linked):
    used = [turn for turn in group if tree.has_children(turn.id) or turn.id in linked]
    return [turn for turn in group if turn not in used and not _quoted(tree, turn)]
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
        messages[n] = _replace(m, content=m.content[:-1])
"""),
    ),
    Mutant(
        "user-message-doubled",
        "the first user message is in the prompt twice",
        CHAT,
        decoded("""
first = next(n for n, m in enumerate(messages) if m.role == "user")
messages.insert(first, messages[first])
"""),
    ),
    Mutant(
        "user-message-altered",
        "a word of the user's message is another one",
        CHAT,
        decoded("""
for n, m in enumerate(messages):
    if m.role == "user":
        messages[n] = _replace(m, content=m.content.replace("steps", "tasks"))
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
        messages[n] = _replace(m, content=m.content[:-1])
"""),
    ),
    Mutant(
        "parallel-results-swapped",
        "the results of two parallel calls are swapped",
        "gateway.echoed_turns:_as_sampled",
        """
def mutant(original, *args):
    messages = list(original(*args))
    results = [message for message in messages if message.role == "tool"]
    return [message for message in messages if message.role != "tool"] + results[::-1]
""",
    ),
    Mutant(
        "message-order-changed",
        "the system message comes after the first user message",
        CHAT,
        decoded("messages[:2] = messages[1::-1]"),
    ),
    Mutant(
        "control-tokens-not-escaped",
        "a control token spelled in content becomes one",
        "chat.escape:Escape.__call__",
        """
def mutant(original, self, text):
    return text
""",
    ),
    Mutant(
        "line-end-after-turn-lost",
        "the line end after the token that ends a turn is missing",
        "chat.tokenizer:ChatTokenizer._behind_stop",
        """
def mutant(original, *args):
    return original(*args)[1:]
""",
    ),
    # --- tools -----------------------------------------------------------------------------------
    Mutant("tool-schemas-emptied", "tools have no parameters", CHAT, decoded(SCHEMAS_EMPTIED)),
    Mutant("tools-reordered", "tools are in another order", CHAT, decoded("tools.reverse()")),
    Mutant(
        "tool-description-dropped",
        "tools have no description",
        CHAT,
        decoded("""
for n, tool in enumerate(tools):
    function = {key: value for key, value in tool.raw["function"].items() if key != "description"}
    tools[n] = _replace(tool, raw={**tool.raw, "function": function})
"""),
    ),
    # --- other dialects --------------------------------------------------------------------------
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
        "the system prompt of a Messages request is truncated",
        ANTHROPIC,
        decoded("""
if messages[0].role == "system":
    messages[0] = _replace(messages[0], content=messages[0].content[:500])
"""),
        client="claude-code",
    ),
    Mutant(
        "later-system-dropped",
        "a later system message is dropped where the template refuses it",
        "chat.message_rules:_fold_system",
        """
def mutant(original, messages, context):
    count = _leading(messages, context)
    return messages[:count] + [message for message in messages[count:] if message.role != "system"]
""",
        client="claude-code",
        family="qwen3.5",
    ),
)


def problem(mutant: Mutant) -> str:
    """Why a mutant does not apply to the present source; empty if it does.

    Checks that the target exists, that the globals which the code uses exist in its module, and that the
    attributes which it reads occur in the source.
    """
    try:
        module = importlib.import_module(mutant.module)
        target = operator.attrgetter(mutant.attribute)(module)
    except (ImportError, AttributeError) as error:
        return f"{mutant.name}: target {mutant.target} does not exist: {error}"
    if not callable(target):
        return f"{mutant.name}: target {mutant.target} is not a function"
    tree = ast.parse(mutant.code)
    nodes = list(ast.walk(tree))
    defined = {n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    defined |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    defined |= {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    defined |= {n.asname or n.name for n in nodes if isinstance(n, ast.alias)}
    used = {n.id for n in nodes if isinstance(n, ast.Name)} - defined
    if missing := sorted(used - vars(module).keys() - vars(builtins).keys()):
        return f"{mutant.name}: {mutant.module} has no {', '.join(missing)}"
    attributes = {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    if missing := sorted(attributes - _identifiers()):
        return f"{mutant.name}: no attribute {', '.join(missing)} occurs in src/afield"
    return ""


@functools.cache
def _identifiers() -> frozenset[str]:
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    return frozenset(re.findall(r"[A-Za-z_]\w*", text))


class Outcome(NamedTuple):
    name: str
    killed: bool
    why: str
    """The first problem that conformance reported, or why the run failed."""
    error: bool = False
    seconds: float = 0.0


def conformance(tree: Path, client: str, family: str) -> tuple[dict[str, object] | None, str]:
    """Result of `afield conformance CLIENT` from this tree, and its standard error."""
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
    """Copy the source tree; exits unless Python imports the copy."""
    shutil.copytree(source / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    environment = os.environ | {"PYTHONPATH": str(folder / "src")}
    command = [sys.executable, "-c", "import afield; print(afield.__file__)"]
    imported = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    if not Path(imported.stdout.strip()).is_relative_to(folder):
        raise SystemExit(f"the copy is not imported, but {imported.stdout.strip()}; mutants cannot be tested")
    return folder


def run_mutant(mutant: Mutant, source: Path) -> Outcome:
    if error := problem(mutant):
        return Outcome(mutant.name, False, error, error=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="afield-mutant-", ignore_cleanup_errors=True) as scratch:
        tree = copied(source, Path(scratch).resolve())
        module = (tree / "src").joinpath(*mutant.module.split(".")).with_suffix(".py")
        module.write_text(module.read_text(encoding="utf-8") + mutant.patch, encoding="utf-8")
        verdict, printed = conformance(tree, mutant.client, mutant.family)
    seconds = round(time.monotonic() - began, 1)
    if verdict is None or "skipped: " in printed:
        return Outcome(mutant.name, False, printed.strip()[-600:], error=True, seconds=seconds)
    problems = [
        line.strip().removeprefix("- ") for line in printed.splitlines() if line.strip().startswith("- ")
    ]
    return Outcome(mutant.name, not verdict["ok"], problems[0][:160] if problems else "ok", seconds=seconds)


def control(client: str, family: str, source: Path) -> Outcome:
    """The client on the unchanged tree."""
    verdict, printed = conformance(source, client, family)
    fine = verdict is not None and verdict["ok"] is True
    return Outcome(
        f"no mutant, {client} on {family}", False, "ok" if fine else printed[-600:], error=not fine
    )


def selected(names: Sequence[str]) -> list[Mutant]:
    by_name = {mutant.name: mutant for mutant in MUTANTS}
    if unknown := sorted(set(names) - set(by_name)):
        raise SystemExit(f"unknown mutants {unknown}; choose from: {', '.join(by_name)}")
    return [by_name[name] for name in names] if names else list(MUTANTS)


def main() -> int:
    parser = argparse.ArgumentParser(description="run conformance clients against wrong gateways")
    parser.add_argument("names", nargs="*", metavar="MUTANT", help="mutants to run (default: all)")
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
        source = copied(ROOT, Path(scratch).resolve())  # all mutants of one tree
        controls = pool.map(lambda run: control(run[0], run[1], source), runs)
        mutated = pool.map(lambda mutant: run_mutant(mutant, source), mutants)
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
