"""What may be kept out of the loss: nothing by guessing, and every reason from one table."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any, get_args, get_type_hints

import pytest
from msgspec import structs

from afield import RolloutClient, factory, trajectories
from afield.chat import Tool
from afield.cli.flags import flag_layer
from afield.cli.main import parser
from afield.client import connect
from afield.errors import UsageError
from afield.gateway import side_calls
from afield.gateway.model_request import ModelRequest
from afield.integrations.verl import settings as verl_settings
from afield.orchestrator.state import RunDirectory
from afield.runs.exclusions import (
    FINGERPRINTS,
    REASONS,
    Fingerprint,
    Ground,
    check_reason,
    digest,
    version_of,
)
from afield.settings.sessions import SessionPolicies, policies_of
from afield.settings.train import TrainConfig, train_config
from afield.turn_tree import TurnTree
from afield.types import FinishReason, Message, Sampling, Turn, TurnStatus, VersionSpan
from support.client_gateway import threaded_gateway, yes_agent
from support.dialect_clients import Heard, read
from support.dialect_session import Client, answering, knock, said
from support.gateways import ADMIN
from support.invariants import Seen
from support.random_groups import Maker

pytestmark = pytest.mark.anyio
DECLARED = {"x-afield-side-call": "1"}


async def chat(client: Client, *messages: dict[str, Any], headers: Any = None, **options: Any) -> Heard:
    body = json.dumps({"model": "m", "messages": messages, **options}).encode()
    answer = await client.door("POST", "/v1/chat/completions", body, headers=headers)
    assert answer.status == 200, answer
    heard = read("chat", bool(options.get("stream")), answer.body)
    client.tools[heard.turn_id] = []
    return heard


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def reply(heard: Heard) -> dict[str, Any]:
    return {"role": "assistant", "content": heard.reply.content}


def excluded(seen: Seen) -> dict[str, str]:
    return {e["turn"]: e["reason"] for e in seen.linear["excluded"]}


# --- nothing by guessing -------------------------------------------------------------------------

TOPICAL = (
    "You research a topic for a title page: summarize this conversation, write its title and a commit message"
)


async def test_an_agent_whose_instructions_speak_of_titles_and_topics_is_trained(tmp_path: Path) -> None:
    async with answering(tmp_path, said("Mugs."), said("Cups."), said("Jugs.")) as there:
        client = await there.client()
        opening = [system(TOPICAL), user("Hi")]
        first = await chat(client, *opening)
        await chat(client, *opening, reply(first), user("And then?"))
        await chat(client, system("Generate a title."), user("Name it."))
        seen = await there.look(client)
        assert [turn["tags"] for turn in seen.turns] == [[], [], []]
        assert excluded(seen) == {}


@pytest.mark.parametrize("model", ["gemini-2.5-pro", "gpt-5-mini", "claude-haiku-4-5", "gemini-flash-lite"])
async def test_the_name_of_a_model_says_nothing_about_a_call(tmp_path: Path, model: str) -> None:
    async with answering(tmp_path, said("Mugs."), said("Cups.")) as there:
        client = await there.client()
        await chat(client, user("Hi"))
        await chat(client, user("Which one?"), model=model)
        assert excluded(await there.look(client)) == {}


async def test_a_call_for_a_single_token_is_trained(tmp_path: Path) -> None:
    async with answering(tmp_path, said("Mugs."), said("Yes or no.")) as there:
        client = await there.client()
        await chat(client, user("Hi"))
        await chat(client, user("Yes?"), max_tokens=1)
        seen = await there.look(client)
        assert [len(turn["token_ids"]) for turn in seen.turns][1] == 1
        assert excluded(seen) == {}


# --- the session's own word ----------------------------------------------------------------------


async def test_a_request_that_is_declared_a_side_call_is_out_of_the_loss(tmp_path: Path) -> None:
    async with answering(tmp_path, said("Mugs."), said("A title.")) as there:
        client = await there.client()
        await chat(client, user("Hi"))
        await chat(client, user("Name it."), headers=DECLARED)
        seen = await there.look(client)
        assert excluded(seen) == {"t2": "side:declared"}
        assert seen.by_id["t2"]["tags"] == ["side:declared"]


async def test_a_side_call_that_a_trained_turn_descends_from_is_trained(tmp_path: Path) -> None:
    async with answering(tmp_path, said("Mugs."), said("Cups."), said("Jugs.")) as there:
        client = await there.client()
        first = await chat(client, user("Hi"), headers=DECLARED)
        second = await chat(client, user("Hi"), reply(first), user("More."), headers=DECLARED)
        assert excluded(await there.look(client)) == {"t1": "side:declared", "t2": "side:declared"}
        await chat(client, user("Hi"), reply(first), user("More."), reply(second), user("And?"))
        assert excluded(await there.look(client)) == {}


@pytest.mark.parametrize(("policy", "left_out"), [("exclude", True), ("declared", True), ("train", False)])
async def test_the_session_decides_about_declared_side_calls(
    tmp_path: Path, policy: Any, left_out: bool
) -> None:
    async with answering(tmp_path, said("Mugs."), said("Cups.")) as there:
        client = await there.client(side_calls=policy)
        await chat(client, user("Hi"))
        await chat(client, user("Name it."), headers=DECLARED)
        assert excluded(await there.look(client)) == ({"t2": "side:declared"} if left_out else {})


async def test_a_declaration_that_is_not_understood_is_refused_with_what_to_send(tmp_path: Path) -> None:
    async with answering(tmp_path, said("Mugs.")) as there:
        client = await there.client()
        body = json.dumps({"model": "m", "messages": [user("Hi")]}).encode()
        path, headers = "/v1/chat/completions", {"x-afield-side-call": "maybe"}
        answer = await client.door("POST", path, body, headers=headers)
        assert answer.status == 400
        assert b"maybe" in answer.body and b"send 1" in answer.body
        seen = await there.look(client)
        assert seen.turns == []


# --- fingerprints --------------------------------------------------------------------------------

NAMING = "Name this session in five words at most."
FINGERPRINT = Fingerprint(
    harness="opencode",
    request="title",
    dialect="chat",
    agent="opencode",
    first="1.18.3",
    last="1.18.33",
    system=digest(NAMING),
    roles=("user", "user"),
    texts=(digest("A title, please:\n"),),
)
HEADERS = {"user-agent": "opencode/1.18.33 ai-sdk/provider-utils/4.0.23 runtime/bun/1.3.14"}
REQUEST = ModelRequest(
    dialect="chat",
    messages=(
        Message(role="system", content=NAMING),
        Message(role="user", content="A title, please:\n"),
        Message(role="user", content="Fix the build."),
    ),
)


def recognised(request: ModelRequest = REQUEST, user_agent: str = HEADERS["user-agent"]) -> str | None:
    return side_calls.tag_of({"user-agent": user_agent}, request, [FINGERPRINT])


def test_a_request_with_every_mark_of_a_known_side_request_is_one() -> None:
    assert recognised() == "side:opencode/title"
    other = structs.replace(REQUEST.messages[2], content="Something else altogether.")
    assert recognised(structs.replace(REQUEST, messages=(*REQUEST.messages[:2], other)))


def with_message(n: int, **changes: Any) -> ModelRequest:
    messages = list(REQUEST.messages)
    messages[n] = structs.replace(messages[n], **changes)
    return structs.replace(REQUEST, messages=tuple(messages))


@pytest.mark.parametrize(
    "request_",
    [
        with_message(0, content=NAMING + " "),
        with_message(0, content=NAMING.lower()),
        with_message(0, role="user"),
        with_message(1, content="A title, please:"),
        with_message(2, role="assistant"),
        structs.replace(REQUEST, messages=REQUEST.messages[:2]),
        structs.replace(REQUEST, messages=(*REQUEST.messages, Message(role="user", content="Hi"))),
        structs.replace(REQUEST, dialect="anthropic"),
        structs.replace(REQUEST, tools=(Tool("bash", "", {}, {}),)),
        structs.replace(REQUEST, after="t1"),
        structs.replace(REQUEST, messages=()),
    ],
)
def test_one_difference_makes_it_an_ordinary_request(request_: ModelRequest) -> None:
    assert recognised(request_) is None


@pytest.mark.parametrize(
    ("user_agent", "is_side"),
    [
        ("opencode/1.18.3", True),
        ("opencode/1.18.20 bun", True),
        ("opencode/1.18.2", False),
        ("opencode/1.18.34", False),
        ("opencode/1.19.0", False),
        ("opencode/1.18", False),
        ("opencode/1.18.20-beta", False),
        ("opencode/latest", False),
        ("opencode", False),
        ("opencoder/1.18.20", False),
        ("my-agent/1.18.20", False),
        ("", False),
    ],
)
def test_only_versions_that_were_looked_at_count(user_agent: str, is_side: bool) -> None:
    assert (recognised(user_agent=user_agent) is not None) == is_side


def test_a_fingerprint_counts_only_where_the_session_excludes_known_side_requests() -> None:
    turn = _turns(FINGERPRINTS[0].reason)
    assert side_calls.excluded_turns(turn, {}, "exclude") == {"t1": FINGERPRINTS[0].reason}
    assert side_calls.excluded_turns(turn, {}, "declared") == {}
    assert side_calls.excluded_turns(turn, {}, "train") == {}


def test_tags_that_were_guesses_exclude_nothing() -> None:
    for tag in ("side:title", "side:probe", "side:small-model"):
        assert side_calls.excluded_turns(_turns(tag), {}, "exclude") == {}


def _turns(tag: str) -> list[Turn]:
    turn = Turn(
        id="t1",
        root="r",
        delta_ids=(1, 2),
        token_ids=(3,),
        logprobs=(-0.5,),
        versions=(VersionSpan(0, 1, 0, 0),),
        finish_reason=FinishReason.STOP,
        status=TurnStatus.COMMITTED,
        sampling=Sampling(),
        tags=(tag,),
    )
    return [turn]


def test_registered_fingerprints_are_well_formed() -> None:
    for fingerprint in FINGERPRINTS:
        assert version_of(fingerprint.first) <= version_of(fingerprint.last)
        assert all(len(text) == 64 for text in (fingerprint.system, *fingerprint.texts))
        assert len(fingerprint.texts) <= len(fingerprint.roles)
        assert REASONS[fingerprint.reason].ground is Ground.FINGERPRINT
    assert len({(f.reason, f.first) for f in FINGERPRINTS}) == len(FINGERPRINTS)


# --- the table of reasons ------------------------------------------------------------------------


def test_every_reason_has_a_ground_and_a_remedy() -> None:
    assert all(reason.remedy for reason in REASONS.values())
    assert {reason.ground for reason in REASONS.values()} == set(Ground)


def test_a_reason_that_is_not_registered_excludes_nothing() -> None:
    with pytest.raises(ValueError, match="'a hunch' is not a reason to exclude a turn"):
        check_reason("a hunch")


@pytest.mark.parametrize("seed", range(50))
def test_no_excluded_side_call_has_a_trained_descendant(seed: int) -> None:
    random = Random(seed)
    turns = [
        structs.replace(turn, tags=("side:declared",)) if random.random() < 0.5 else turn
        for turn in Maker(seed, None).forest().turns
    ]
    recorded = {turn.id: "undelivered" for turn in turns if random.random() < 0.2}
    left_out = side_calls.excluded_turns(turns, recorded, "exclude")
    tagged = TurnTree(turns)
    trained = {
        r.id for row in trajectories.linear(tagged, left_out | recorded).trajectories for r in row.turns
    }
    for turn_id in trained:
        assert not {step.id for step in tagged.path(turn_id)} & set(left_out)
    wrongly = {t.id for t in turns if t.tags and t.id in trained}
    below = {a.id for turn_id in trained for a in tagged.path(turn_id)[:-1]}
    assert wrongly <= below, "a side call was trained, and nothing trained descends from it"


# --- the policies of sessions, from every entry point ---------------------------------------------

POLICIES = {
    "side_calls": "train",
    "abandoned_answers": "train",
    "unsupported": "ignore",
    "constrained_turns": "exclude",
    "thinking": "template",
    "escape": "faithful",
    "render": "strict",
    "client_sampling": ["temperature", "seed"],
}


def as_given(holder: SessionPolicies) -> dict[str, Any]:
    return {name: list(v) if isinstance(v, tuple) else v for name, v in policies_of(holder).items()}


def test_a_run_hands_its_policies_to_its_sessions(tmp_path: Path) -> None:
    config = train_config(None, {"agent": "a.py:a", "model": "m", **POLICIES})
    assert as_given(factory.rollout_config(config, RunDirectory(tmp_path / "run"))) == POLICIES


def test_the_command_line_and_a_file_set_policies(tmp_path: Path) -> None:
    words = ["--side-calls", "train", "--thinking", "template", "--escape", "faithful", "--render", "strict"]
    words += ["--abandoned-answers", "train", "--unsupported", "ignore", "--constrained-turns", "exclude"]
    words += ["--client-sampling", "temperature, seed"]
    args = parser().parse_args(["train", "a.py:a", "--model", "m", "--tasks", "t.jsonl", *words])
    flags = flag_layer(args, TrainConfig).values
    assert as_given(train_config(None, {k: v for k, v in flags.items() if k in POLICIES}, model="m"))
    (tmp_path / "run.toml").write_text('[train]\nmodel = "m"\n' + toml(POLICIES))
    assert as_given(train_config(tmp_path / "run.toml", {})) == POLICIES
    assert as_given(train_config(None, {"model": "m", **flags})) == POLICIES


def toml(values: dict[str, Any]) -> str:
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())


def test_a_client_and_a_launch_take_policies() -> None:
    plan = connect._rollout_config("exp", "m", dict(POLICIES))
    assert as_given(plan) == POLICIES


def test_every_session_of_a_plan_is_opened_with_its_policies(tmp_path: Path) -> None:
    with threaded_gateway(tmp_path) as there:
        names = {"agent": yes_agent, "gateway": there.url, "admin_key": ADMIN, "exp_id": "exp", **POLICIES}
        with RolloutClient.open(**names, directory=tmp_path / "run") as client:
            finished = client.submit({}, input_id="a").result(60)
            assert finished.outcome.reward == 1.0
            assert as_given(there.spec("exp-a-r0.1")) == POLICIES


def test_verl_settings_accept_every_session_policy() -> None:
    settings = verl_settings.read_settings(POLICIES)
    assert as_given(settings) == POLICIES


@pytest.mark.parametrize("name", POLICIES)
def test_an_unknown_policy_is_refused_with_those_there_are(name: str) -> None:
    wrong = ["guess"] if name == "client_sampling" else "guess"
    first = POLICIES[name][0] if name == "client_sampling" else POLICIES[name]
    for refused in (
        lambda: train_config(None, {"model": "m", name: wrong}),
        lambda: connect._rollout_config("exp", "m", {name: wrong}),
        lambda: verl_settings.read_settings({name: wrong}),
    ):
        with pytest.raises(UsageError, match=rf"{name} = 'guess' must be one of: .*{first}"):
            refused()


@pytest.mark.parametrize("name", POLICIES)
async def test_the_gateway_refuses_an_unknown_policy_with_those_there_are(tmp_path: Path, name: str) -> None:
    async with answering(tmp_path) as there:
        body = {"id": "r.1", name: ["guess"] if name == "client_sampling" else "guess"}
        answer = await knock(there.app, "POST", "/sessions", json.dumps(body).encode(), key=ADMIN)
        assert answer.status == 400
        chosen = POLICIES[name][0] if name == "client_sampling" else POLICIES[name]
        assert "guess" in answer.body.decode()
        assert f"choose from: {', '.join(_words(name))}" in answer.body.decode()
        assert chosen in _words(name)


def _words(name: str) -> list[str]:
    hint = get_type_hints(SessionPolicies)[name]
    return [word for part in get_args(hint) for word in (get_args(part) or [part]) if isinstance(word, str)]
