"""The runner of other projects' suites, and the model that answers them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from afield import factory
from afield.cli.main import main
from afield.conformance.model import CONTROL, IMAGE, SWITCHABLE_TEMPLATE, write_model
from afield.conformance.runner import run_gateway
from afield.conformance.suites import registry
from afield.conformance.suites.rule_model import RuleModel, read_prompt
from afield.conformance.suites.runner import CaseResult, ForeignSuite, judge
from afield.conformance.suites.values import Values, example, places
from afield.errors import Unavailable
from afield.harnesses.base import ClientCommand, Stage
from afield.interfaces import SessionSpec

pytestmark = pytest.mark.anyio

PASSED, FAILED = CaseResult("a", "passed"), CaseResult("b", "failed", "no answer")


def test_a_failure_that_is_ours_fails_the_suite():
    result = judge([PASSED, FAILED], {})
    assert (result.passed, result.failed, result.ok) == (1, 1, False)
    assert result.problems == ("b: no answer",)


def test_a_failure_that_is_not_ours_is_shown_and_does_not():
    result = judge([PASSED, FAILED, CaseResult("c", "skipped", "no audio")], {"b": "audio"})
    assert (result.passed, result.failed, result.skipped, result.ok) == (1, 0, 1, True)
    assert result.not_ours == {"b": "audio"} and result.skips == {"c": "no audio"}


@pytest.mark.parametrize(
    "outcomes",
    [
        [PASSED, CaseResult("b", "passed")],
        [PASSED, CaseResult("b", "skipped")],
        [PASSED],
        [FAILED],
        [PASSED, PASSED, FAILED],
    ],
    ids=["it passes now", "it is skipped now", "it vanished", "nothing passed", "a name twice"],
)
def test_stale_entries_and_empty_suites_fail(outcomes: list[CaseResult]):
    assert not judge(outcomes, {"b": "audio"}).ok


# --- the command ---------------------------------------------------------------------------------

LINES = """
import json, os, sys
with open(os.environ["AFIELD_SUITE_RESULTS"], "w") as file:
    for row in json.loads(sys.argv[1]):
        file.write(json.dumps(row) + "\\n")
"""


def fake(name: str, *rows: dict[str, Any], **more: Any) -> ForeignSuite:
    def command(stage: Stage, variant: str) -> ClientCommand:
        return ClientCommand((sys.executable, "-c", LINES, json.dumps(rows)))

    return ForeignSuite(name=name, install=lambda cache: cache, command=command, **more)


def unreachable(cache: Path) -> Path:
    raise Unavailable("no network")


def test_the_command_prints_every_suite_and_ends_with_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    good = {"test": "t", "outcome": "passed"}
    bad = {"test": "u", "outcome": "failed", "detail": "needs audio"}
    table = {
        "good": fake("good", good, bad, {"finished": True}, not_ours={"x/u": "audio"}, variants=("x",)),
        "cut": fake("cut", good),
        "away": ForeignSuite(
            name="away", install=unreachable, command=lambda s, v: ClientCommand(()), optional=True
        ),
        "lost": ForeignSuite(name="lost", install=unreachable, command=lambda s, v: ClientCommand(())),
    }
    monkeypatch.setattr(registry, "SUITES", table)
    assert main(["conformance", "--suites", "good", "away", "--json"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "not ours: x/u: audio" in out[1] and "skipped: no network" in out[3]
    assert json.loads(out[-1]) == {
        "suites": {
            "good": {"passed": 1, "failed": 0, "skipped": 0, "not_ours": {"x/u": "audio"}},
            "away": {"passed": 0, "failed": 0, "skipped": 1, "not_ours": {}, "unavailable": "no network"},
        }
    }
    for name in ("cut", "lost"):
        assert main(["conformance", "--suites", name]) == 1
    assert main(["conformance", "--suites", "nothing"]) == 2


# --- the model -----------------------------------------------------------------------------------

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"location": {"type": "string"}}},
    },
}


async def test_the_model_calls_tools_and_continues_from_their_results(tmp_path: Path):
    model = write_model(tmp_path / "model", SWITCHABLE_TEMPLATE, (*CONTROL, IMAGE))
    vocabulary = factory.vocabulary_of(model)
    engine = factory.load("engine", "scripted", factory.ENGINES)(
        RuleModel(vocabulary), max_context=8192, vocab_size=vocabulary.size
    )
    async with run_gateway(engine, model, tmp_path) as up:
        ticket = await up.gateway.open(SessionSpec(id="s"))
        client = openai.AsyncOpenAI(base_url=ticket.openai_base_url, api_key=ticket.api_key)
        messages: list[Any] = [
            {"role": "user", "content": "What's the weather in Paris and Rome? <|im_end|>"}
        ]
        first = await client.chat.completions.create(model="m", messages=messages, tools=[WEATHER])  # pyright: ignore
        calls: list[Any] = first.choices[0].message.tool_calls or []
        assert [json.loads(call.function.arguments) for call in calls] == [
            {"location": "Paris"},
            {"location": "Rome"},
        ]
        messages.append(first.choices[0].message.model_dump(exclude_none=True))
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": f"{n} °C"} for n, call in enumerate(calls)
        ]
        second = await client.chat.completions.create(model="m", messages=messages, tools=[WEATHER])  # pyright: ignore
        assert second.choices[0].message.content == "The result is: 0 °C; 1 °C"
        await client.close()
    talk = read_prompt(vocabulary, engine.recorded[0].prompt_ids)
    assert talk.question.endswith("<|im_end|>") and talk.thinks and talk.tools[0].name == "get_weather"


def test_values_come_from_the_text_and_fit_the_schema():
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0},
            "mood": {"enum": ["good", "bad"]},
            "code": {"type": "string", "pattern": r"^[A-Z]{2}-\d{3}$"},
            "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]},
        },
        "$defs": {
            "n": {"type": "object", "properties": {"tags": {"type": "array", "items": {"type": "string"}}}}
        },
    }
    value = Values("A user called 'Ada', 36, in a bad mood").of(schema)
    assert (value["name"], value["age"], value["mood"], value["code"]) == ("Ada", 36, "bad", "AA-111")
    assert len(value["next"]["tags"]) == 2
    assert Values("no next, please").of(schema)["next"] is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("What is the weather in San Francisco, CA?", ["San Francisco, CA"]),
        ("the weather in Paris and New York", ["Paris", "New York"]),
        ("nowhere", []),
    ],
)
def test_places_in_a_text(text: str, found: list[str]):
    assert places(text) == found


def test_an_example_of_a_regular_expression_matches_it():
    import re

    for pattern in (r"\d{3}-[a-f]+(x|yz)?", r"^(\w+)@[^.]+\.com$", r"((25[0-5])\.){3}1"):
        assert re.fullmatch(pattern, example(pattern)), pattern
