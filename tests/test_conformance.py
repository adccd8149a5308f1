"""The conformance suite judges others, so it is judged first: each kind of damage has to be found."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from msgspec import structs

from afield.cli.main import main
from afield.conformance import suite
from afield.conformance.client import Client, Command, Stage
from afield.conformance.clients import CLIENTS, chosen
from afield.conformance.environments import interpreter, python_environment
from afield.conformance.faults import Faults
from afield.conformance.judge import Verdict, judge
from afield.conformance.model import write_model
from afield.conformance.scenario import Fault, Reply, Scenario, Use, last_marker, marker, steps
from afield.conformance.script import Sampler
from afield.errors import Unavailable, UsageError
from afield.seams import Record, SessionSpec
from afield.tokens.vocab import Vocabulary
from afield.types import Exclusion, TurnStatus

pytestmark = pytest.mark.anyio

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def look(thread: str, step: int) -> Use:
    return Use("look", {"thread": thread, "step": step})


async def walk(base_url: str, key: str) -> None:
    """A client of a few lines: asks, runs its tools, and asks again whatever happens to the line."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=2) as client:
        messages: list[Any] = [{"role": "user", "content": f"Walk. {marker('main', 0)}"}]
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


Judged = tuple[list[Any], Record]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def judged(tmp_path_factory: pytest.TempPathFactory, anyio_backend: str) -> Judged:
    """A walk of ten turns with a 500 and a lost connection on the way."""
    folder = tmp_path_factory.mktemp("walk")
    async with suite.gateway(steps(look), folder) as up:
        ticket = await up.gateway.open(SessionSpec(id="walk"))
        await walk(f"http://127.0.0.1:{up.port}/s/walk/v1", ticket.api_key)
        assert up.faults.fired == {"main-3": Fault.REFUSE, "main-5": Fault.CUT}
        assert up.script.unsaid() == [] and up.script.surprises == []
        return list(up.ledger), await up.gateway.finalize("walk")


async def test_a_faithful_record_is_ok(judged: Judged):
    ledger, record = judged
    verdict = judge(ledger, record, 1)
    assert verdict == Verdict(calls=11, matched=11, duplicates=0, branches=1)
    assert verdict.ok
    assert [turn.status for turn in record.turns].count(TurnStatus.ABORTED) == 1


# --- damage --------------------------------------------------------------------------------------


def last_turn_lost(record: Record) -> Record:
    return structs.replace(record, turns=record.turns[:-1])


def partial_lost(record: Record) -> Record:
    kept = tuple(turn for turn in record.turns if turn.status is not TurnStatus.ABORTED)
    return structs.replace(record, turns=kept)


def turn_invented(record: Record) -> Record:
    twin = structs.replace(record.turns[-1], id="twin")
    return structs.replace(record, turns=(*record.turns, twin))


def sampled_id_changed(record: Record) -> Record:
    first = record.turns[0]
    other = structs.replace(first, token_ids=(first.token_ids[0] + 1, *first.token_ids[1:]))
    return structs.replace(record, turns=(other, *record.turns[1:]))


def first_row(record: Record, **changes: Any) -> Record:
    """The record with another first trajectory, which may be one that cannot be built."""
    row = structs.replace(record.trajectories[0])
    for name, value in changes.items():
        structs.force_setattr(row, name, tuple(value))
    return structs.replace(record, trajectories=(row, *record.trajectories[1:]))


def trained_id_changed(record: Record) -> Record:
    ids = list(record.trajectories[0].token_ids)
    ids[record.trajectories[0].loss_mask.index(1)] += 1
    return first_row(record, token_ids=ids)


def context_id_changed(record: Record) -> Record:
    ids = list(record.trajectories[0].token_ids)
    ids[0] += 1
    return first_row(record, token_ids=ids)


def logprob_changed(record: Record) -> Record:
    values = list(record.trajectories[0].logprobs)
    values[record.trajectories[0].loss_mask.index(1)] -= 0.5
    return first_row(record, logprobs=values)


def mask_too_short(record: Record) -> Record:
    mask = list(record.trajectories[0].loss_mask)
    mask[mask.index(1)] = 0
    return first_row(record, loss_mask=mask)


def mask_too_long(record: Record) -> Record:
    mask = list(record.trajectories[0].loss_mask)
    mask[mask.index(1) - 1] = 1
    return first_row(record, loss_mask=mask)


def row_missing(record: Record) -> Record:
    return structs.replace(record, trajectories=())


def row_twice(record: Record) -> Record:
    return structs.replace(record, trajectories=record.trajectories * 2)


def reason_missing(record: Record) -> Record:
    return structs.replace(record, excluded=())


def trained_and_excluded(record: Record) -> Record:
    return structs.replace(record, excluded=(*record.excluded, Exclusion(record.turns[0].id, 1, "side")))


def left_dangling(record: Record) -> Record:
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
]


@pytest.mark.parametrize(("damage", "told"), DAMAGE, ids=[damage.__name__ for damage, _ in DAMAGE])
async def test_damage_is_found(judged: Judged, damage: Callable[[Record], Record], told: str):
    ledger, record = judged
    verdict = judge(ledger, damage(record), 1)
    assert any(told in problem for problem in verdict.problems), verdict


async def test_a_call_the_ledger_lacks_is_found(judged: Judged):
    ledger, record = judged
    assert not judge(ledger[:-1], record, 1).ok


async def test_another_number_of_branches_is_found(judged: Judged):
    ledger, record = judged
    assert judge(ledger, record, 2).problems == ("1 branches, expected 2",)


async def test_a_retry_that_was_sampled_and_trained_twice_is_a_duplicate(judged: Judged):
    """The second answer to the same prompt is faithful to the engine, and still one too many."""
    ledger, record = judged
    last, row = record.turns[-1], record.trajectories[-1]
    logprobs = tuple(p - 1 for p in last.logprobs)
    again = structs.replace(ledger[-1], logprobs=logprobs)
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
    verdict = judge([*ledger, again], doubled, 2)
    assert (verdict.matched, verdict.duplicates) == (12, 1)
    assert not verdict.ok


# --- what the judge is given ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    path = write_model(tmp_path_factory.mktemp("model")) / "tokenizer.json"
    return Vocabulary(path.read_bytes(), path)


def test_words_are_sampled_another_way_each_time_and_never_as_a_tokenizer_would(vocabulary: Vocabulary):
    words = Reply(text="naïve 北京 ☂ 🚲 and on", reasoning="why?", uses=(look("main", 1),)).words()
    sampler = Sampler(vocabulary)
    ways = {tuple(sampler.sample(words, random.Random(n))) for n in range(20)}
    assert {vocabulary.decode(ids) for ids in ways} == {words}
    assert len(ways) == 20
    assert tuple(vocabulary.encode(words)) not in ways


def test_a_thread_stands_at_its_last_marker():
    assert last_marker(f"{marker('main', 1)} then {marker('sub', 12)} and [at main-$((1+1))]") == "sub-12"
    assert last_marker("nowhere") is None


def test_a_fault_happens_once():
    faults = Faults({"main-1": Fault.REFUSE})
    body = f'{{"messages": ["{marker("main", 1)}"]}}'.encode()
    assert [faults.of(body), faults.of(body)] == [Fault.REFUSE, None]
    assert faults.fired == {"main-1": Fault.REFUSE}


def test_a_fault_where_nothing_is_said_is_refused():
    with pytest.raises(ValueError, match="main-7"):
        Scenario(replies={"main-0": Reply(text="x")}, faults={"main-7": Fault.CUT}, branches=1)


# --- the suite -----------------------------------------------------------------------------------


def client(code: str) -> Client:
    def commands(stage: Stage) -> list[Command]:
        return [Command((sys.executable, "-c", code))]

    return Client(
        name="idle", install=lambda cache: cache, commands=commands, scenario=steps(look), timeout_s=20
    )


async def test_a_client_that_does_nothing_is_not_ok(tmp_path: Path):
    verdict = await suite.check(client("pass"), tmp_path, tmp_path / "run", "")
    assert "never asked at 'main-0'" in verdict.problems
    assert "the fault at main-3 never happened" in verdict.problems


async def test_a_client_that_fails_is_not_ok(tmp_path: Path):
    verdict = await suite.check(client("raise SystemExit(3)"), tmp_path, tmp_path / "run", "")
    assert "ended with code 3" in verdict.problems[0]


async def test_a_client_that_cannot_be_installed_is_skipped_with_the_reason_and_not_ok(tmp_path: Path):
    def install(cache: Path) -> Path:
        raise Unavailable("npm is not installed here")

    verdict = await suite.check(
        structs.replace(client("pass"), install=install), tmp_path, tmp_path / "run", ""
    )
    assert verdict.problems == ("skipped: npm is not installed here",)
    assert not verdict.ok


def test_what_terminus_2_kept_is_held_against_the_ledger(tmp_path: Path, judged: Judged):
    ledger = [entry for entry in judged[0] if entry.token_ids]
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
        return CLIENTS["terminus-2"].inspect(stage, ledger)

    assert kept(ledger) == []
    assert "9 turns" in kept(ledger[1:])[0]
    assert "10 of 10 turns" in kept(ledger, shift=1)[0]
    assert "0 turns" in kept([])[0]


def test_an_unknown_client_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]):
    assert main(["conformance", "emacs"]) == 2
    assert "mini-swe-agent" in capsys.readouterr().err
    assert chosen([]) == list(CLIENTS.values())


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


def test_a_scenario_for_every_client_named_in_the_requirements():
    wanted = {"claude-code", "codex", "opencode", "mini-swe-agent", "strands", "langgraph"}
    wanted |= {"openai-agents", "terminus-2"}
    assert wanted <= set(CLIENTS)
    with pytest.raises(UsageError, match="choose from"):
        chosen(["nobody"])
