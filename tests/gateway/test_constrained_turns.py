"""Constrained turns from a client to the trainer: enforced, recorded, and rescored under the same masks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import torch
from msgspec import structs

from afield.batches.rows import Row
from afield.chat import ChatTokenizer
from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.engines.sglang.engine import SglangEngine
from afield.engines.torch.engine import TorchEngine
from afield.engines.vllm.engine import VllmEngine
from afield.interfaces import Chunk, GenerateRequest, SessionSpec
from afield.trainers import logprobs, micro_batches
from afield.trainers.model import PolicyModel
from afield.trainers.optimizer import Optimizer
from afield.types import FinishReason, Sampling, Trajectory
from support.constrained import (
    ROOM,
    SCHEMAS,
    TOOLS,
    USER,
    Answer,
    ask_everything,
    recorded,
    rescored,
    trained,
)
from support.fake_sglang import FakeSglang, serving_sglang
from support.fake_vllm import FakeVllm, serving
from support.gateways import running, vocabulary
from support.tiny_model import build_tiny_model

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize("fixed_steps", [False, True])
async def test_constrained_turns_are_enforced_and_rescored(
    model: Path, tmp_path: Path, fixed_steps: bool
) -> None:
    async with running(TorchEngine(model, fixed_steps=fixed_steps), tmp_path / "store", model) as up:
        await ask_everything(await up.agent(sampling=Sampling(temperature=1.0)))
        turns = await recorded(up)
    assert len(turns) >= 7 and all(turn.constraint for turn in turns)
    ended = [turn for turn in turns if turn.finish_reason is FinishReason.STOP]
    assert {tag for turn in ended for tag in turn.tags} == set()
    rows = trained(turns)
    assert sum(row.owned for row in rows) == sum(len(turn.token_ids) for turn in turns)
    assert rescored(model, rows) < 1e-4
    assert rescored(model, rows, "padded") < 1e-4
    # Without the masks the same tokens are far less likely.
    free = [structs_without(row) for row in rows]
    assert rescored(model, free) > 0.5


def structs_without(row: Trajectory) -> Trajectory:
    return structs.replace(row, turns=tuple(structs.replace(turn, constraint=None) for turn in row.turns))


async def test_gradient_uses_the_constrained_distribution(model: Path, tmp_path: Path) -> None:
    async with running(TorchEngine(model), tmp_path / "store", model) as up:
        client = await up.agent(sampling=Sampling(temperature=0.7))
        form = {"structured_outputs": {"regex": "[a-f]{3}-[0-9]{2}"}}
        for extra in (form, {}):
            await client.chat.completions.create(model="m", messages=USER, max_tokens=30, extra_body=extra)
        turns = await recorded(up)
    policy = PolicyModel(model, device=torch.device("cpu"))
    rows = [
        Row(rollout_id=f"r{n}", trajectory=row, advantages=(1.0,)) for n, row in enumerate(trained(turns))
    ]
    found = {}
    for chunked in (True, False):
        updates = Optimizer(policy, lr=0.0)
        updates.zero_grad()
        logprobs._linear[policy.model] = chunked  # the chunked head and the model's own logits agree
        (batch,) = updates.micro_batches(rows)
        micro_batches.token_logprobs(policy.model, batch).sum().backward()
        found[chunked] = torch.cat([p.grad.flatten().clone() for p in policy.trainable if p.grad is not None])
        policy.model.zero_grad()
    assert found[True].norm() > 0
    assert float((found[True] - found[False]).norm() / found[False].norm()) < 1e-4


async def test_anthropic_tool_choice_and_output_format(model: Path, tmp_path: Path) -> None:
    import anthropic  # takes a second, which every worker would spend

    tools: list[Any] = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    async with running(TorchEngine(model), tmp_path / "store", model) as up:
        ticket = await up.client.open(SessionSpec(id="r.1", sampling=Sampling(temperature=1.0)))
        url = ticket.openai_base_url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=url, api_key=ticket.api_key, max_retries=0) as client:
            for choice in ({"type": "any"}, {"type": "tool", "name": "lookup"}):
                single = {"disable_parallel_tool_use": choice["type"] == "tool"}
                made = None
                while made is None or made.stop_reason == "max_tokens":
                    made = await client.messages.create(
                        model="m",
                        max_tokens=ROOM,
                        messages=USER,
                        tools=tools,
                        tool_choice={**choice, **single},
                    )
                uses = [block for block in made.content if block.type == "tool_use"]
                assert uses and made.stop_reason == "tool_use"
                assert len(uses) == 1 or choice["type"] == "any"
                for use in uses:
                    jsonschema.validate(use.input, SCHEMAS[use.name])
        turns = await recorded(up)
    assert all(turn.constraint for turn in turns)
    assert rescored(model, trained(turns)) < 1e-4


async def test_a_reply_cut_off_by_max_tokens_ends_with_length(model: Path, tmp_path: Path) -> None:
    async with running(TorchEngine(model), tmp_path / "store", model) as up:
        client = await up.agent()
        completion = await client.chat.completions.create(
            model="m", messages=USER, max_tokens=3, tools=TOOLS, tool_choice="required"
        )
        assert (
            completion.choices[0].finish_reason == "length" and not completion.choices[0].message.tool_calls
        )
        (turn,) = await recorded(up)
    assert turn.finish_reason is FinishReason.LENGTH
    assert rescored(model, trained([turn])) < 1e-4


async def test_constrained_turns_are_excluded_by_session_policy(model: Path, tmp_path: Path) -> None:
    async with running(TorchEngine(model), tmp_path / "store", model) as up:
        client = await up.agent(constrained_turns="exclude")
        common: Any = {"model": "m", "messages": USER, "max_tokens": 5}
        await client.chat.completions.create(**common, tools=TOOLS, tool_choice="required")
        await client.chat.completions.create(**common)
        record = await up.client.finalize("r.1")
    assert [(e.turn, e.tokens, e.reason) for e in record.excluded] == [("t1", 5, "constrained")]
    assert [turn.id for row in record.trajectories for turn in row.turns] == ["t2"]


async def test_constraints_are_ignored_by_session_policy(model: Path, tmp_path: Path) -> None:
    async with running(TorchEngine(model), tmp_path / "store", model) as up:
        client = await up.agent(constrained_turns="ignore")
        await client.chat.completions.create(
            model="m", messages=USER, max_tokens=5, tools=TOOLS, tool_choice="required"
        )
        (turn,) = await recorded(up)
        record = await up.client.finalize("r.1")
    assert turn.constraint is None and "ignored:tool_choice" in turn.tags
    assert not record.excluded and [t.id for row in record.trajectories for t in row.turns] == ["t1"]


class Stopping(TorchEngine):
    """Ends at stop strings wherever they come, as servers do."""

    def __init__(self, model: Path, decode: Callable[[Sequence[int]], str]) -> None:
        super().__init__(model)
        self.calls: list[GenerateRequest] = []
        self._decode = decode

    async def generate(self, call: GenerateRequest) -> AsyncGenerator[Chunk]:
        self.calls.append(call)
        ids: list[int] = []
        async with aclosing(super().generate(structs.replace(call, stop=(), stream=True))) as chunks:
            async for chunk in chunks:
                ids += chunk.token_ids
                hit = any(stop in self._decode(ids) for stop in call.stop)
                yield structs.replace(chunk, finish=FinishReason.STOP) if hit else chunk
                if hit:
                    return


async def test_stop_string_does_not_restart_the_grammar(model: Path, tmp_path: Path) -> None:
    engine = Stopping(model, ChatTokenizer.load(model).decode)
    async with running(engine, tmp_path / "store", model) as up:
        client = await up.agent()
        completion = await client.chat.completions.create(
            model="m", messages=USER, max_tokens=ROOM, tools=TOOLS, tool_choice="required", stop=["name"]
        )
        (turn,) = await recorded(up)
    assert len(engine.calls) == 1 and completion.choices[0].message.tool_calls
    assert rescored(model, trained([turn])) < 1e-4


async def test_grammar_without_a_match_gets_400(model: Path, tmp_path: Path) -> None:
    async with running(TorchEngine(model), tmp_path / "store", model) as up:
        client = (await up.agent()).with_options(max_retries=0)
        with pytest.raises(openai.BadRequestError, match="guided_regex"):
            await client.completions.create(
                model="m", prompt="x", max_tokens=ROOM, extra_body={"guided_regex": "ab[^\\s\\S]"}
            )


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "keyword": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
        "response_format.*'not'",
    ),
    "regex": ({"extra_body": {"guided_regex": "(?<=a)b"}}, "guided_regex.*regex"),
    "grammar": ({"extra_body": {"guided_grammar": "nonsense"}}, "compiled"),
}


@pytest.mark.parametrize("name", BAD)
async def test_unenforceable_constraint_is_refused_or_ignored(model: Path, tmp_path: Path, name: str) -> None:
    asked, told = BAD[name]
    async with running(TorchEngine(model), tmp_path / "store", model) as up:
        strict = await up.agent()
        with pytest.raises(openai.BadRequestError, match=told):
            await strict.chat.completions.create(model="m", messages=USER, max_tokens=4, **asked)
        if name == "keyword":
            lax = await up.agent("r.2", unsupported="ignore")
            await lax.chat.completions.create(model="m", messages=USER, max_tokens=4, **asked)
            (turn,) = await recorded(up, "r.2")
            assert "ignored:response_format" in turn.tags and turn.constraint is None


def said(text: str, model: Path) -> ScriptedReply:
    return ScriptedReply(token_ids=tuple(vocabulary(model).encode(f"{text}<|im_end|>")))


async def test_scripted_engine_applies_the_constraint(model: Path, tmp_path: Path) -> None:
    right = '{"word": "yes", "times": 3, "note": "x"}'
    engine = ScriptedEngine([said(right, model), said("No.", model)], model=model)
    async with running(engine, tmp_path / "store", model) as up:
        client = await up.agent()
        common: Any = {"model": "m", "messages": USER, "response_format": Answer}
        common["extra_body"] = {"thinking_token_budget": 2}
        assert (await client.chat.completions.parse(**common)).choices[0].message.content == right
        with pytest.raises(openai.BadRequestError, match="script"):
            await client.chat.completions.parse(**common)
        drawn = (await client.chat.completions.parse(**common, max_tokens=ROOM)).choices[0].message.parsed
        assert isinstance(drawn, Answer)  # by the masks, since no answer is left


@pytest.mark.parametrize("kind", ["vllm", "vllm completions", "sglang"])
async def test_servers_get_the_grammar_as_structural_tag(model: Path, tmp_path: Path, kind: str) -> None:
    """The servers' wire forms, with the embedded engine behind them."""
    sglang = kind == "sglang"
    fake: Any = (
        FakeSglang(TorchEngine(model)) if sglang else FakeVllm(TorchEngine(model), scale_out=kind == "vllm")
    )
    async with serving_sglang(fake) if sglang else serving(fake) as url:
        engine: Any = SglangEngine(url, vocab_size=400) if sglang else VllmEngine(url, vocab_size=400)
        async with running(engine, tmp_path / "store", model) as up:
            assert (await engine.info()).constraints
            client = await up.agent()
            for stream in (False, True):
                completion: Any = await client.chat.completions.create(
                    model="m",
                    messages=USER,
                    max_tokens=60,
                    tools=TOOLS,
                    tool_choice="required",
                    stream=stream,
                )
                if stream:
                    assert [chunk async for chunk in completion]
            turns = await recorded(up)
    given = fake.bodies[-1] if kind == "vllm completions" else fake.bodies[-1]["sampling_params"]
    sent = given["structural_tag"] if sglang else given["structured_outputs"]["structural_tag"]
    assert turns[-1].constraint is not None and sent == turns[-1].constraint.grammar
    assert given["stop_token_ids"] == list(turns[-1].constraint.stop_ids)
    assert rescored(model, trained(turns)) < 1e-4


async def test_server_without_enforcement_is_detected(model: Path, tmp_path: Path) -> None:
    scripted_engine = ScriptedEngine(lambda _: ScriptedReply(token_ids=tuple(range(20, 60))))
    async with (
        serving(FakeVllm(scripted_engine)) as url,
        running(VllmEngine(url), tmp_path / "store", model) as up,
    ):
        strict, lax = await up.agent(), await up.agent("r.2", unsupported="ignore")
        body: Any = {"model": "m", "messages": USER, "tools": TOOLS, "tool_choice": "required"}
        with pytest.raises(openai.BadRequestError, match=r"tool_choice: the engine \(vllm\) cannot"):
            await strict.chat.completions.create(**body)
        await lax.chat.completions.create(**body, max_tokens=3)
        (turn,) = await recorded(up, "r.2")
    assert turn.tags == ("ignored:tool_choice",) and turn.constraint is None
