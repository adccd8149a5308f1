"""Constraints: what a grammar allows is read back as what was asked for, and rescored as it was sampled."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from afield.chat import ChatTokenizer, Tool, reply_grammar
from afield.chat.parsers.formats import FORMATS, REASONING, ToolFormat
from afield.chat.parsers.harmony import HarmonyReader
from afield.chat.parsers.reply import ReplyReader
from afield.chat.reply_grammar import CallSpec, ReplyForm
from afield.engines.torch.sampler import draw
from afield.gateway import constraints, prompts
from afield.gateway.model_request import ModelRequest
from afield.gateway.schemas import SHAPES, enforceable
from afield.models.bitmasks import allowed
from afield.models.masks import ConstraintMasks
from afield.types import Constraint, Message, Sampling
from support.tiny_model import build_tokenizer
from support.tokenizers import load_tokenizer

LOOKUP: dict[str, Any] = {
    "type": "object",
    "properties": {
        "key": {"type": "string", "enum": ["seven", "a b", "9"]},
        "many": {"type": "integer", "minimum": 1, "maximum": 30},
        "words": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "short": {"type": "string", "minLength": 1, "maxLength": 3},
        "at": {"$ref": "#/$defs/place"},
    },
    "required": ["key", "many"],
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}
TOOLS = {
    "lookup": LOOKUP,
    "stop_it": {"type": "object", "properties": {}},
}
ENDS = ["</parameter>", "</arg_value>", "</arg_key>", "<|end|>", "<|message|>", "<|channel|>", "<|start|>"]


class Sampler:
    """Draws replies that a constraint allows, from nothing but its masks; it likes what ends something."""

    def __init__(self, directory: Path) -> None:
        tokenizer: Any = build_tokenizer()
        tokenizer.add_tokens(ENDS)
        tokenizer.save_pretrained(directory)
        self.tokenizer = tokenizer
        self.masks = ConstraintMasks(directory, len(tokenizer))
        self.stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
        texts = tokenizer.get_vocab().items()
        self.ends = {n for text, n in texts if text in ENDS or text[:1] in '"}]Ċ'}
        self.control = tokenizer.get_added_vocab()

    def draw(self, grammar: str, rng: random.Random, limit: int = 400) -> str:
        """Of one that finds no end within the limit, another."""
        while True:
            ids = self.ids(grammar, rng, limit)
            if ids[-1] == self.stop:
                return self.tokenizer.decode(ids[:-1])

    def ids(self, grammar: str, rng: random.Random, limit: int = 400) -> list[int]:
        walker = self.masks.walk(Constraint(grammar=grammar, stop_ids=(self.stop,)))
        ids: list[int] = []
        while len(ids) < limit:
            may = allowed(walker.mask, self.masks.vocabulary).nonzero().flatten().tolist()
            assert may, self.tokenizer.decode(ids)
            liked = [token for token in may if token in self.ends]
            token = rng.choice(liked if liked and rng.random() < 0.4 else may)
            if self.stop in may and rng.random() < 0.5:
                token = self.stop
            assert walker.accept(token)
            ids.append(token)
            if token == self.stop:
                break
        return ids


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> Sampler:
    return Sampler(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def policy_tokens() -> ChatTokenizer:
    return load_tokenizer()


SCHEMAS: dict[str, Any] = {
    "lookup": LOOKUP,
    "lengths": {"type": "string", "minLength": 2, "maxLength": 4},
    "types": {"type": ["string", "null", "integer"], "maxLength": 3, "minimum": 5},
    "values": {"type": "string", "enum": ["a", 1, 'b"c\n']},
    "untyped": {"minimum": 3, "exclusiveMaximum": 9.5},
    "required": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a", "b"]},
    "union": {"oneOf": [{"type": "integer"}, {"type": "array", "items": {"type": "null"}, "maxItems": 1}]},
    "tagged": {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": k}}, "required": ["k"]} for k in ("a", "b")
        ]
    },
    "pattern": {"type": "string", "pattern": "^[a-c]{2}(x|y)?$"},
    "address": {"type": "string", "format": "ipv4"},
    "nested": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "v": {"type": "boolean"},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["v", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "map": {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
    "keys": {"type": "object", "patternProperties": {"^k[0-9]$": {"type": "null"}}},
    "whole": {"type": "number", "multipleOf": 1},
    "some": {"type": "array", "minItems": 2, "maxItems": 2},
    "more": {"type": "array", "prefixItems": [{"type": "null"}], "minItems": 2, "maxItems": 2},
    "both": {
        "type": ["integer", "null"],
        "anyOf": [{"type": "string"}, {"type": "number", "minimum": 5}, {"type": "null"}],
    },
    "equal": {"enum": [True, 1, "1"], "const": 1},
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_replies_of_a_rewritten_schema_are_valid(sampler: Sampler, name: str) -> None:
    schema = SCHEMAS[name]
    checks = jsonschema.FormatChecker(["ipv4"])
    output = reply_grammar.json_value(enforceable(schema))
    grammar = reply_grammar.grammar(ReplyForm(), output=output)
    rng = random.Random(name)
    for _ in range(8):
        jsonschema.validate(json.loads(sampler.draw(grammar, rng)), schema, format_checker=checks)


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "integer", "multipleOf": 3}, "multipleOf"),
        ({"type": "object", "properties": {"a": {"not": {"type": "null"}}}}, "not"),
        ({"if": {"type": "string"}, "then": {"minLength": 2}}, "if"),
        ({"type": "string", "pattern": "(?=a)b"}, "pattern"),
        ({"type": "string", "format": "colour"}, "format"),
        ({"$ref": "#/$defs/missing"}, "$ref"),
        ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "$ref"),
        ({"$ref": "https://example.com/schema.json"}, "$ref"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "allOf"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "object", "properties": {}, "anyOf": [{"required": ["a"]}]}, "properties"),
        ({"type": "array", "contains": {"const": 1}}, "contains"),
        ({"type": "array", "items": False, "minItems": 1}, "minItems"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "required"),
        ({"type": "string", "anyOf": [{"type": "integer"}]}, "anyOf"),
        ({"properties": {f"p{n}": {} for n in range(65)}, "maxProperties": 2}, "maxProperties"),
    ],
)
def test_unenforceable_schema_names_its_keyword(schema: Any, keyword: str) -> None:
    with pytest.raises(ValueError, match=rf"keyword '{keyword.replace('$', '[$]')}'"):
        enforceable(schema)


MALFORMED: dict[str, list[Any]] = {
    "required": [5, "abc", [{}]],
    "properties": [5, [1], {"a": 5}],
    "patternProperties": [5, [1]],
    "additionalProperties": [5, []],
    "minProperties": ["1", True],
    "prefixItems": [5, [5], []],
    "items": [5, [{}]],
    "uniqueItems": ["x"],
    "pattern": [5],
    "format": [[], {}],
    "multipleOf": ["1", 0, True],
    "minimum": ["3", True],
    "$ref": [5, [], {}],
    "$defs": [5, {"a": 5}],
    "type": [5, [], {}, [5]],
    "enum": [5, None],
    "anyOf": [5, [], [5]],
    "nullable": ["x"],
    "propertyOrdering": [[{}]],
}


def test_malformed_schema_names_its_keyword() -> None:
    for keyword, values in MALFORMED.items():
        for value in values:
            bad = {"type": "object", keyword: value}
            for schema in (bad, {"oneOf": [bad, bad]}, {"type": "object", "anyOf": [{keyword: value}]}):
                with pytest.raises(ValueError, match=rf"keyword '{re.escape(keyword)}' .* must be"):
                    enforceable(schema)


def test_null_keywords_are_ignored() -> None:
    names = (keyword for keyword in SHAPES if keyword not in ("type", "enum"))
    assert enforceable({"type": "string", **dict.fromkeys(names)}) == {"type": "string"}
    assert enforceable({"const": None, "required": None}) == {"enum": [None]}


def test_keywords_of_other_types_are_dropped() -> None:
    schema = {"type": "string", "additionalProperties": False, "strict": True, "minItems": 3}
    assert enforceable(schema) == {"type": "string"}


def test_schemas_that_are_too_large_or_too_deep_are_refused() -> None:
    deep: Any = {"type": "string"}
    for _ in range(200):
        deep = {"type": "array", "items": deep}
    with pytest.raises(ValueError, match="too deeply"):
        enforceable(deep)
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(ValueError, match="too deeply"):
        enforceable(deep)
    with pytest.raises(ValueError, match="characters"):
        enforceable({"enum": ["x" * 200_000]})


def read(tool_format: ToolFormat | None, text: str, **more: Any) -> Message:
    tools = [Tool(name, "", schema, {}) for name, schema in TOOLS.items()]
    reader = ReplyReader(
        reasoning=more.get("reasoning"),
        thinking=more.get("opened", False),
        tool_format=tool_format,
        tools=tools,
    )
    reader.feed(text)
    reader.finish()
    assert not reader.malformed, text
    return reader.reply


def check_calls(message: Message) -> None:
    for call in message.tool_calls:
        arguments = json.loads(call.arguments)
        jsonschema.validate(arguments, TOOLS[call.name])


SPECS = [CallSpec(name, enforceable(schema)) for name, schema in TOOLS.items()]


@pytest.mark.parametrize("tool_format", FORMATS, ids=lambda known: known.name)
def test_forced_calls_are_read_in_every_format(sampler: Sampler, tool_format: ToolFormat) -> None:
    rng = random.Random(tool_format.name)
    form = ReplyForm(tool_format=tool_format)
    counts: set[int] = set()
    for several in (False, True):
        grammar = reply_grammar.grammar(form, calls=SPECS, forced=True, several=several)
        for _ in range(5):
            text = sampler.draw(grammar, rng)
            message = read(tool_format, text)
            assert not message.content.strip(), text
            assert message.tool_calls if several else len(message.tool_calls) == 1, text
            check_calls(message)
            counts.add(len(message.tool_calls))
    assert min(counts) == 1


CITY = {"type": "object", "properties": {"city": {"enum": ["x y"]}}, "required": ["city"]}
CODE = {"type": "object", "properties": {"code": {"type": "integer"}}, "required": ["code"]}
DEFINED: dict[str, Any] = {"$defs": {"City": CITY, "Code": CODE}}
ROOTS: dict[str, Any] = {
    "reference": {"$ref": "#/$defs/City", **DEFINED},
    "nullable": {**CITY, "nullable": True},
    "alternatives": {"anyOf": [CITY, CODE]},
    "references": {
        "anyOf": [{"$ref": "#/$defs/City"}, {"$ref": "#/$defs/Code"}, {"type": "null"}],
        **DEFINED,
    },
}


def asking(schema: Any, *, name: str = "go", forced: bool = True) -> ModelRequest:
    tools = (Tool(name, "", schema, {}),)
    return ModelRequest(
        dialect="chat", model="m", messages=(), tools=tools, must_call=forced, parallel_calls=False
    )


@pytest.mark.parametrize("name", ["qwen_xml", "glm", "minimax", "hermes"])
@pytest.mark.parametrize("root", ROOTS)
def test_call_arguments_follow_schemas_that_allow_objects(sampler: Sampler, root: str, name: str) -> None:
    known = next(known for known in FORMATS if known.name == name)
    spec = constraints.call_spec("lookup", ROOTS[root], forced=True)
    grammar = reply_grammar.grammar(ReplyForm(tool_format=known), calls=[spec], forced=True, several=False)
    rng = random.Random(root)
    for _ in range(3):
        (call,) = read(known, sampler.draw(grammar, rng)).tool_calls
        arguments = json.loads(call.arguments)
        assert arguments
        jsonschema.validate(arguments, {"type": "object", "anyOf": [CITY, CODE]})


def test_argument_schema_without_objects_is_refused(policy_tokens: ChatTokenizer) -> None:
    made = constraints.constraint(policy_tokens, asking({"anyOf": [CITY, {"type": "null"}]}))
    assert '"null"' not in made.grammar
    for schema in ({"type": "array"}, {"type": "string"}, {"enum": [1]}, {"type": "object", "required": 5}):
        with pytest.raises(ValueError, match="tool 'go'"):
            constraints.constraint(policy_tokens, asking(schema))
        assert "go" in constraints.constraint(policy_tokens, asking(schema, forced=False)).grammar
    with pytest.raises(ValueError, match="without a name"):
        constraints.constraint(policy_tokens, asking(CITY, name=""))
    constraints.constraint(policy_tokens, asking(CITY, name="", forced=False))
    with pytest.raises(ValueError, match="cannot be written"):
        reply_grammar.SPELLINGS["glm"].call(CallSpec("go", {"type": "string"}))


def test_recursive_alternatives_terminate() -> None:
    loop = {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "integer"}]}
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": loop}}
    call = reply_grammar.SPELLINGS["glm"].call(CallSpec("go", enforceable(schema)))
    assert '"json_schema": {"type": "integer"' in json.dumps(call)


def test_large_tool_schemas_are_compiled_in_a_thread() -> None:
    assert constraints.size(asking(CITY)) < prompts.INLINE_CHARACTERS
    assert constraints.size(asking({"enum": ["x" * prompts.INLINE_CHARACTERS]})) > prompts.INLINE_CHARACTERS


@pytest.mark.parametrize("tool_format", FORMATS, ids=lambda known: known.name)
def test_one_call_at_most_may_follow_text(sampler: Sampler, tool_format: ToolFormat) -> None:
    rng = random.Random(tool_format.name)
    grammar = reply_grammar.grammar(ReplyForm(tool_format=tool_format), calls=SPECS, several=False)
    for _ in range(6):
        message = read(tool_format, sampler.draw(grammar, rng))
        assert len(message.tool_calls) <= 1
        check_calls(message)


def test_reasoning_precedes_the_constraint_within_its_budget(sampler: Sampler) -> None:
    rng = random.Random(5)
    hermes, think = FORMATS[0], REASONING[0]
    thought = 0
    for opened in (True, False):
        form = ReplyForm(tool_format=hermes, reasoning=think, opened=opened)
        grammar = reply_grammar.grammar(form, calls=SPECS, forced=True, several=False, budget=5)
        for _ in range(6):
            ids = sampler.ids(grammar, rng)
            text = sampler.tokenizer.decode(ids[:-1])
            message = read(hermes, text, reasoning=think, opened=opened)
            assert len(message.tool_calls) == 1 and not message.content
            if sampler.control["</think>"] in ids:  # else it is spelled in several tokens
                thought += 1
                assert sampler.control["<think>"] in ids or opened
                assert ids.index(sampler.control["</think>"]) <= 5 + (not opened)
        check_calls(message)
    assert thought
    silent = reply_grammar.grammar(
        ReplyForm(tool_format=hermes, reasoning=think), calls=SPECS, forced=True, budget=0
    )
    assert "think" not in silent


def test_harmony_constrains_answers_and_calls(sampler: Sampler) -> None:
    rng = random.Random(6)
    form = ReplyForm(harmony=True)
    output = reply_grammar.json_value(enforceable(LOOKUP))
    called = 0
    for forced in (True, False):
        grammar = reply_grammar.grammar(form, output=output, calls=SPECS, forced=forced, budget=6)
        for _ in range(6):
            reader = HarmonyReader(tools=True)
            reader.feed(sampler.draw(grammar, rng))
            reader.finish()
            check_calls(reader.reply)
            assert bool(reader.reply.tool_calls) != bool(reader.reply.content)
            if reader.reply.content:
                assert not forced
                jsonschema.validate(json.loads(reader.reply.content), LOOKUP)
            called += bool(reader.reply.tool_calls)
    assert called >= 6


def test_only_allowed_token_has_probability_one() -> None:
    logits = torch.randn(2, 70)
    words = torch.zeros(3, dtype=torch.int32)
    words[2] = 1 << 3
    how = [Sampling(temperature=0.7), Sampling()]
    tokens, logprobs = draw(logits, how, [0.9, 0.5], {0: words})
    assert (tokens[0], logprobs[0]) == (67, 0.0)
    assert (tokens[1], logprobs[1]) == tuple(part[0] for part in draw(logits[1:], how[1:], [0.5]))


def test_mask_rejects_tokens_that_were_not_allowed(sampler: Sampler) -> None:
    grammar = reply_grammar.grammar(ReplyForm(), output=reply_grammar.choice(["ab"]))
    held = Constraint(grammar=grammar, stop_ids=(sampler.stop,))
    right = [*sampler.tokenizer.encode("ab"), sampler.stop]
    masks = sampler.masks.along(held, right)
    assert allowed(masks, sampler.masks.vocabulary).sum(-1).tolist() == [1] * len(right)
    with pytest.raises(ValueError, match="does not allow token"):
        sampler.masks.along(held, [sampler.stop])
    with pytest.raises(ValueError, match="cannot be compiled"):
        sampler.masks.walk(Constraint(grammar='{"type": "structural_tag"}'))


def test_cached_grammar_gives_the_same_masks(sampler: Sampler) -> None:
    """xgrammar's own cache, which vLLM and SGLang use, takes grammars for the same that differ only in ids
    of tokens at the same places: no two of ours do."""
    import xgrammar
    from transformers import AutoTokenizer

    info = xgrammar.TokenizerInfo.from_huggingface(
        AutoTokenizer.from_pretrained(sampler.masks.path), vocab_size=sampler.masks.vocabulary
    )
    keeping = xgrammar.GrammarCompiler(info, max_threads=1)
    rng = random.Random(8)
    outputs = [None, reply_grammar.json_value(LOOKUP), reply_grammar.regex("[a-c]{1,3}")]
    for opened in (True, False):
        form = ReplyForm(tool_format=FORMATS[0], reasoning=REASONING[0], opened=opened)
        for output in outputs:
            for calls, forced in ((SPECS, True), (SPECS, False), ((), False)):
                for budget in (None, 3):
                    grammar = reply_grammar.grammar(
                        form, output=output, calls=calls, forced=forced, several=bool(opened), budget=budget
                    )
                    compiled = keeping.compile_structural_tag(grammar)
                    theirs = xgrammar.GrammarMatcher(compiled, override_stop_tokens=[sampler.stop])
                    ids = sampler.ids(grammar, rng, limit=40)
                    held = Constraint(grammar=grammar, stop_ids=(sampler.stop,))
                    for mask, token in zip(sampler.masks.along(held, ids), ids, strict=True):
                        words = xgrammar.allocate_token_bitmask(1, sampler.masks.vocabulary)
                        theirs.fill_next_token_bitmask(words)
                        mine = allowed(mask, sampler.masks.vocabulary)
                        assert mine.equal(allowed(words[0], sampler.masks.vocabulary)), grammar
                        assert theirs.accept_token(token)


def test_trainers_without_masks_exclude_constrained_turns() -> None:
    from afield.integrations.verl.settings import VerlSettings

    assert VerlSettings(agent="a").constrained_turns == "exclude"
    with pytest.raises(ValueError, match="veRL rescores without the masks"):
        VerlSettings(agent="a", constrained_turns="train")
