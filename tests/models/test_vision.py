"""Vision-language models end to end: captured in every dialect, recorded, rescored, trained with pixels."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from msgspec import structs
from PIL import Image as Pillow
from transformers import AutoModelForImageTextToText

from afield import trajectories
from afield.batches.groups import from_groups
from afield.batches.rows import rows_of
from afield.engines.torch.engine import TorchEngine
from afield.errors import UsageError
from afield.integrations.trl import rows as trl_rows
from afield.interfaces import SessionRecord
from afield.interfaces.engine import GenerateRequest
from afield.models.vision import Vision
from afield.orchestrator.rollout import rollout_result
from afield.orchestrator.state import RolloutStore
from afield.runs.training_record import decode
from afield.settings.trainer import LoraOptions
from afield.trainers.diagnostics import BatchDiagnostics
from afield.trainers.frozen import Frozen
from afield.trainers.grpo import GRPO
from afield.trainers.tinker import rows_from_groups
from afield.turn_tree import TurnTree, chain
from afield.types import (
    FinishReason,
    Group,
    Image,
    ImageRef,
    ImageSpan,
    Message,
    Outcome,
    Rollout,
    RolloutResult,
    Sampling,
    Split,
    Task,
    Turn,
    TurnStatus,
    VersionSpan,
)
from support.gateways import Running, running
from support.tiny_model import build_tiny_model
from support.tiny_vision_model import FAMILIES, build_tiny_vision_model, png

pytestmark = pytest.mark.anyio
RED, BLUE, WIDE = png("red"), png((0, 30, 200)), png((10, 200, 30), (32, 16))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("vision")
    return {family: build_tiny_vision_model(root / family, family=family) for family in FAMILIES}


@pytest.fixture(scope="module")
def model(models: dict[str, Path]) -> Path:
    return models["qwen2_vl"]


@pytest.fixture
async def up(model: Path, tmp_path: Path) -> AsyncIterator[Running]:
    async with running(TorchEngine(model), tmp_path / "store", model) as gateway:
        yield gateway


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url(data: bytes) -> str:
    return f"data:image/png;base64,{b64(data)}"


def image(data: bytes) -> Image:
    return Image(digest=hashlib.sha256(data).hexdigest(), media_type="image/png", data=data)


def chat(*parts: str | bytes) -> dict[str, Any]:
    content: list[Any] = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": url(part)}}
        for part in parts
    ]
    return {"role": "user", "content": content}


def finished(record: SessionRecord, name: str = "r", reward: float = 1.0) -> RolloutResult:
    rollout = Rollout(id=name, exp_id="x", group_id="g", task=Task("task", {}))
    return rollout_result(rollout, Outcome(rollout_id=name, attempt=1, reward=reward), record, 1)


def group(*members: RolloutResult) -> Group:
    return Group(id="g", task_id="task", epoch=0, split=Split.TRAIN, finished=members)


def apart(trainer: GRPO, groups: list[Group]) -> float:
    """How far the trainer's log-probabilities are from the sampler's, for the worst token."""
    audit = BatchDiagnostics()
    trainer.optimizer.score(trainer.batch(groups).rows, audit)
    assert audit.tokens["diff"]
    return audit.worst.diff


# --- the engine ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
async def test_engine_with_images_matches_the_model(models: dict[str, Path], family: str) -> None:
    path = models[family]
    vision = Vision.load(path)
    assert vision is not None
    whole = AutoModelForImageTextToText.from_pretrained(path).eval()
    async with TorchEngine(path) as engine:
        assert (await engine.info()).images

        async def sampled(ids: list[int], *images: bytes) -> list[int]:
            call = GenerateRequest(
                id=f"{ids} {images}",
                session_id="s",
                prompt_ids=tuple(ids),
                sampling=Sampling(),
                max_tokens=6,
                stop_ids=(),
                images=tuple(map(image, images)),
            )
            chunks = [chunk async for chunk in engine.generate(call)]
            prompt = chunks[0].prompt_ids
            assert prompt is not None
            tokens = [token for chunk in chunks for token in chunk.token_ids]
            pictures = [vision.pixels(one) for one in call.images]
            row = torch.tensor([[*prompt, *tokens]])
            inputs: dict[str, Any] = {
                name: torch.cat([torch.from_numpy(picture.inputs[name]) for picture in pictures])
                for name in pictures[0].inputs
            }
            if vision.mrope:
                inputs["mm_token_type_ids"] = (row == vision.image_id).int()
            with torch.no_grad():
                scores = whole(input_ids=row, **inputs).logits[0].log_softmax(-1)
            own = [float(scores[len(prompt) - 1 + n, token]) for n, token in enumerate(tokens)]
            logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs]
            assert own == pytest.approx(logprobs, abs=1e-4)
            return tokens

        mark = vision.image_id
        first = await sampled([5, 6, mark, 9], RED)
        # The same ids with another image: only what stands before it may be reused.
        reused = engine.counters.reused_tokens
        await sampled([5, 6, mark, 9], BLUE)
        assert engine.counters.reused_tokens - reused <= 2
        reused = engine.counters.reused_tokens
        await sampled([5, 6, mark, 9, *first, 8, mark, 7], RED, WIDE)
        assert engine.counters.reused_tokens - reused >= 8
        with pytest.raises(ValueError, match="2 images, but its prompt has 1 image placeholder"):
            await sampled([5, mark], RED, BLUE)


async def test_sampled_placeholder_is_not_an_image(model: Path) -> None:
    vision = Vision.load(model)
    assert vision is not None
    mark = vision.image_id
    call = GenerateRequest(
        id="c",
        session_id="s",
        prompt_ids=(5, mark, 9, mark, 7),
        sampling=Sampling(),
        max_tokens=5,
        stop_ids=(),
        images=(image(WIDE),),
        image_places=(1,),
    )
    async with TorchEngine(model) as engine:
        chunks = [chunk async for chunk in engine.generate(call)]
    prompt, span = chunks[0].prompt_ids, ImageSpan(image(WIDE).digest, 1, 8)
    assert prompt == (5, *[mark] * 8, 9, mark, 7)
    tokens = tuple(token for chunk in chunks for token in chunk.token_ids)
    turn = Turn(
        id="t1",
        root="r",
        delta_ids=prompt,
        images=(span,),
        token_ids=tokens,
        logprobs=tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
        versions=(VersionSpan(0, len(tokens), 0, 0),),
        finish_reason=FinishReason.LENGTH,
        status=TurnStatus.COMMITTED,
        sampling=Sampling(),
        messages=(Message(role="user", images=(ImageRef(span.digest, 0),)),),
    )
    assembled = trajectories.linear(TurnTree([turn]))
    record = SessionRecord(
        trajectories=assembled.trajectories, excluded=(), turns=(turn,), images=call.images
    )
    assert apart(GRPO(model, lr=1e-3), [group(finished(record))]) < 1e-4


# --- the dialects ----------------------------------------------------------------------------------


async def test_a_conversation_with_images_is_recorded_and_rescored_exactly(
    up: Running, model: Path, tmp_path: Path
) -> None:
    agent = await up.agent()
    messages: list[Any] = [chat("What is ", RED, "?")]
    for more in ([chat("And ", WIDE, BLUE)], [{"role": "user", "content": "Sure?"}], [chat(RED)]):
        reply = await agent.chat.completions.create(model="m", messages=messages, max_tokens=6)
        messages += [{"role": "assistant", "content": reply.choices[0].message.content or ""}, *more]
    reply = await agent.chat.completions.create(model="m", messages=messages, max_tokens=6)
    _, answer = await up.ask("GET", "/sessions/r.1/turns?prompt_ids=1")
    record = await up.client.finalize("r.1")
    assert reply.usage and reply.usage.prompt_tokens == len(answer["turns"][-1]["prompt_ids"])
    assert {one.digest for one in record.images} == {image(data).digest for data in (RED, BLUE, WIDE)}
    assert [one.data for one in record.images if one.digest == image(WIDE).digest] == [WIDE]
    assert max(len(row.images) for row in record.trajectories) == 4
    # A trainer elsewhere gets what was kept, pixels and all.
    rollout_store = RolloutStore(tmp_path / "rollout_store")
    rollout_store.put(finished(record))
    trainer = GRPO(model, lr=1e-3)
    assert apart(trainer, [group(rollout_store.get("r"))]) < 1e-4
    other = finished(record, "s", 0.0)
    report = GRPO(model, lr=1e-3, record_training=True).step([group(rollout_store.get("r"), other)])
    recorded = decode(report.records["r"])
    sampled = {turn.id: turn.logprobs for turn in record.turns}
    for turn in recorded.turns:
        values = recorded.columns["logprob"][turn.start : turn.start + turn.tokens]
        assert list(values) == pytest.approx(sampled[turn.id], abs=1e-4)
    # Other pixels are another distribution: the comparison above can fail.
    swapped = {image(RED).digest: BLUE, image(BLUE).digest: RED}
    images = tuple(structs.replace(one, data=swapped.get(one.digest, one.data)) for one in record.images)
    assert apart(GRPO(model, lr=1e-3), [group(structs.replace(rollout_store.get("r"), images=images))]) > 1e-2


async def test_a_constrained_reply_about_an_image_is_rescored_under_its_constraint(
    up: Running, model: Path
) -> None:
    agent = await up.agent()
    schema: Any = {"type": "object", "properties": {"c": {"enum": ["red", "blue"]}}, "required": ["c"]}
    schema |= {"additionalProperties": False}
    reply = await agent.chat.completions.create(
        model="m",
        messages=[chat("Colour?", RED)],  # pyright: ignore
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": schema, "strict": True},
        },
        max_tokens=60,
    )
    assert json.loads(reply.choices[0].message.content or "")["c"] in ("red", "blue")
    record = await up.client.finalize("r.1")
    assert record.trajectories[0].images
    assert apart(GRPO(model, lr=1e-3), [group(finished(record))]) < 1e-4


REQUESTS: dict[str, tuple[str, Any]] = {
    "chat, in a tool's result": (
        "/v1/chat/completions",
        {
            "model": "m",
            "max_tokens": 4,
            "messages": [
                {"role": "user", "content": "look"},
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"id": "c1", "type": "function", "function": {"name": "see", "arguments": "{}"}}
                    ],
                },
                {**chat("here: ", RED), "role": "tool", "tool_call_id": "c1"},
            ],
        },
    ),
    "responses": (
        "/v1/responses",
        {
            "model": "m",
            "max_output_tokens": 4,
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "look "},
                        {"type": "input_image", "image_url": url(RED)},
                    ],
                }
            ],
        },
    ),
    "responses, in a tool's result": (
        "/v1/responses",
        {
            "model": "m",
            "max_output_tokens": 4,
            "input": [
                {"role": "user", "content": "look"},
                {"type": "function_call", "call_id": "c1", "name": "see", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "c1",
                    "output": [{"type": "input_image", "image_url": url(RED)}],
                },
            ],
        },
    ),
    "anthropic, in a tool's result": (
        "/v1/messages",
        {
            "model": "m",
            "max_tokens": 4,
            "messages": [
                {"role": "user", "content": "look"},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "c1", "name": "see", "input": {}}],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "c1",
                            "content": [
                                {
                                    "type": "image",
                                    "source": {"type": "base64", "media_type": "image/png", "data": b64(RED)},
                                }
                            ],
                        }
                    ],
                },
            ],
        },
    ),
    "gemini": (
        "/v1beta/models/m:generateContent",
        {
            "generationConfig": {"maxOutputTokens": 4},
            "contents": [
                {
                    "role": "user",
                    "parts": [{"text": "look "}, {"inlineData": {"mimeType": "image/png", "data": b64(RED)}}],
                }
            ],
        },
    ),
}


async def test_stored_responses_show_their_images(up: Running) -> None:
    client = await up.agent("stored.1")
    content: Any = [
        {"type": "input_text", "text": "look "},
        {"type": "input_image", "image_url": url(RED), "detail": "auto"},
    ]
    ask: Any = {"model": "m", "input": [{"role": "user", "content": content}], "max_output_tokens": 4}
    response = await client.responses.create(**ask)
    assert await client.responses.retrieve(response.id) == response
    include: Any = ["message.input_image.image_url"]
    (item,) = (await client.responses.input_items.list(response.id, include=include)).data
    assert [part.model_dump(exclude_none=True) for part in item.content] == content
    (item,) = (await client.responses.input_items.list(response.id)).data
    assert item.content[1].image_url is None
    with pytest.raises(openai.BadRequestError, match="not available for a prompt with images"):
        more = {"prompt_logprobs": 0}
        await client.chat.completions.create(model="m", messages=[chat("look ", RED)], extra_body=more)  # type: ignore[list-item]


async def test_every_dialect_has_images_rescored_exactly(up: Running, model: Path) -> None:
    records: dict[str, SessionRecord] = {}
    for n, (name, (path, body)) in enumerate(REQUESTS.items(), 1):
        session = f"r{n}.1"
        await up.agent(session)
        key = up.agents[-1].api_key
        status, answer = await up.ask("POST", f"/s/{session}{path}", body, key=key)
        assert status == 200, (name, answer)
        records[name] = await up.client.finalize(session)
    trainer = GRPO(model, lr=1e-3)
    for n, (name, record) in enumerate(records.items()):
        (row,) = record.trajectories
        assert [one.digest for one in row.images] == [image(RED).digest], name
        assert apart(trainer, [group(finished(record, f"r{n}"))]) < 1e-4, name


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"\x89PNG not really", "cannot be read"),
        (RED[:45], "cannot be read"),
        (b"%PDF-1.4", "cannot be read"),
    ],
    ids=["garbage", "cut off", "another format"],
)
async def test_invalid_image_is_refused_with_its_message(up: Running, data: bytes, told: str) -> None:
    agent = await up.agent()
    messages: Any = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}, chat(data)]
    with pytest.raises(openai.BadRequestError, match=rf"messages\[2\]: the image {told}"):
        await agent.chat.completions.create(model="m", messages=messages)


async def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded(up: Running) -> None:
    out = io.BytesIO()
    Pillow.new("1", (8_000, 8_000)).save(out, "PNG")
    agent = await up.agent()
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\]: the image has 8000 x 8000 pixels"):
        await agent.chat.completions.create(model="m", messages=[chat(out.getvalue())])  # pyright: ignore


async def test_ambiguous_image_is_reencoded_as_pixels(up: Running, model: Path) -> None:
    out = io.BytesIO()
    Pillow.new("RGBA", (16, 16), (255, 0, 0, 0)).save(out, "PNG")
    agent = await up.agent()
    await agent.chat.completions.create(model="m", messages=[chat(out.getvalue())], max_tokens=4)  # pyright: ignore
    record = await up.client.finalize("r.1")
    (kept,) = record.images
    assert kept.digest == image(out.getvalue()).digest and kept.data is not None
    picture = Pillow.open(io.BytesIO(kept.data))
    assert (picture.mode, picture.getpixel((3, 3))) == ("RGB", (255, 255, 255))
    assert apart(GRPO(model, lr=1e-3), [group(finished(record))]) < 1e-4


async def test_an_image_at_a_url_is_refused_by_an_engine_that_fetches_nothing(up: Running) -> None:
    agent = await up.agent()
    message: Any = {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": "http://h/a.png"}}],
    }
    with pytest.raises(openai.BadRequestError, match=r"only known by its URL .* send its bytes"):
        await agent.chat.completions.create(model="m", messages=[message])


# --- training --------------------------------------------------------------------------------------


async def two(up: Running) -> list[RolloutResult]:
    """Two rollouts of one task, one better than the other."""
    made: list[RolloutResult] = []
    for n, reward in enumerate((1.0, 0.0)):
        agent = await up.agent(f"r{n}.1")
        await agent.chat.completions.create(model="m", messages=[chat("Colour?", RED)], max_tokens=6)  # pyright: ignore
        made.append(finished(await up.client.finalize(f"r{n}.1"), f"r{n}", reward))
    return made


async def test_step_trains_the_vision_tower_and_published_weights_are_sampled(
    up: Running, model: Path, tmp_path: Path
) -> None:
    groups = [group(*await two(up))]
    trainer = GRPO(model, lr=1e-3, max_logprob_diff=1e-4)
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    report = trainer.step(groups)
    assert report.rollouts == 2 and report.metrics["sampler_trainer_logprob_diff_max"] < 1e-4
    moved = {
        name for name, weight in trainer.model.named_parameters() if not torch.equal(weight, before[name])
    }
    assert any(name.startswith("model.visual.") for name in moved)
    assert any(name.startswith("model.language_model.") for name in moved)
    trainer.publish(tmp_path / "weights", version=1, dtype="float32")
    await up.gateway.engine.load(1, str(tmp_path / "weights"))
    agent = await up.agent("after.1")
    await agent.chat.completions.create(model="m", messages=[chat("Colour?", RED)], max_tokens=6)  # pyright: ignore
    record = await up.client.finalize("after.1")
    assert record.trajectories[0].versions[0].low == 1
    assert apart(trainer, [group(finished(record))]) < 1e-4
    assert apart(GRPO(model, lr=1e-3), [group(finished(record))]) > 1e-4


@pytest.mark.parametrize("family", ["qwen2_vl", "llava"])
async def test_an_adapter_is_merged_into_a_checkpoint_with_older_names(
    models: dict[str, Path], family: str, tmp_path: Path
) -> None:
    lora = LoraOptions(rank=2, alpha=4.0, publish="adapter")
    trainer = GRPO(models[family], lr=1e-3, lora=lora)
    for layer in trainer.model.modules():
        for factor in getattr(layer, "lora_B", {}).values():
            torch.nn.init.normal_(factor.weight, std=0.3)
    trainer.publish(tmp_path / "adapter", version=1, dtype="float32")
    async with TorchEngine(models[family]) as engine:
        await engine.load(1, str(tmp_path / "adapter"))
        call = GenerateRequest(
            id="c", session_id="s", prompt_ids=(5, 6, 7), sampling=Sampling(), max_tokens=3, stop_ids=()
        )
        chunks = [chunk async for chunk in engine.generate(call)]
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    with torch.no_grad():
        scores = trainer.model(input_ids=torch.tensor([[5, 6, 7, *tokens]])).logits[0].log_softmax(-1)
    own = [float(scores[2 + n, token]) for n, token in enumerate(tokens)]
    assert own == pytest.approx([p for chunk in chunks for p in chunk.logprobs], abs=1e-4)


async def test_pixels_are_never_left_out_silently(up: Running, model: Path, tmp_path: Path) -> None:
    members = await two(up)
    groups = [group(*members)]
    with pytest.raises(UsageError, match="r0, turn t1: it has images, whose pixels no batch format carries"):
        from_groups(groups)
    with pytest.raises(UsageError, match="r0, turn t1: it has images, and TRL"):
        trl_rows.check(members[0], rows_of(members[0])[0], 1.0)
    blind = build_tiny_model(tmp_path / "blind", max_positions=1024)
    with pytest.raises(UsageError, match=r"rollout r0, turn t1: it has images, .* no vision part"):
        GRPO(blind, lr=1e-3).step(groups)
    lost = [group(*(structs.replace(member, images=()) for member in members))]
    with pytest.raises(UsageError, match="is missing from the rollout"):
        GRPO(model, lr=1e-3).step(lost)
    with pytest.raises(UsageError, match="is missing from the rollout"):
        rows_from_groups(lost)
    # A record of an engine that did not say where its images stand.
    row = structs.replace(members[0].trajectories[0], images=())
    turn = structs.replace(members[0].turns[0], images=())
    older = structs.replace(members[0], trajectories=(row,), turns=(turn,), images=())
    with pytest.raises(UsageError, match="sampled with 1 images; the record says where 0 of them stand"):
        GRPO(model, lr=1e-3).step([group(older, members[1])])
    assert Frozen(model).step(groups).rollouts == 2
    assert [len(datum.images) for datum in rows_from_groups(groups)] == [1, 1]


def test_the_position_of_an_image_distinguishes_conversations() -> None:
    one, other = (Message(role="user", content="a b", images=(ImageRef("d", at),)) for at in (0, 2))
    echoed = Message(role="user", content=" a b ", images=(ImageRef("d", 1),))
    assert chain("r", [one]) != chain("r", [other])
    assert chain("r", [one]) == chain("r", [echoed])
