"""Rows with images against stock veRL's own code: its positions, its actor's inputs, its numbers. No Ray."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.utils import tensordict_utils
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from afield import trajectories
from afield.engines.torch.engine import TorchEngine
from afield.integrations.verl import agent_loop, rows
from afield.interfaces.engine import GenerateRequest
from afield.models.vision import Vision
from afield.turn_tree import TurnTree
from afield.types import (
    FinishReason,
    Image,
    ImageRef,
    ImageSpan,
    Message,
    Outcome,
    Rollout,
    RolloutResult,
    Sampling,
    Task,
    Turn,
    TurnStatus,
    VersionSpan,
)
from support.tiny_vision_model import build_tiny_vision_model, png

pytestmark = pytest.mark.real
PROMPT = {"uid": "u", "global_steps": 4, "index": 0, "raw_prompt": [{"role": "user", "content": "hi"}]}
PICTURES = [png("red"), png((0, 30, 200), (32, 16))]


def image(data: bytes) -> Image:
    return Image(digest=hashlib.sha256(data).hexdigest(), media_type="image/png", data=data)


async def sampled(model: Path, image_id: int) -> list[Turn]:
    """Two turns that the embedded engine samples: one image before the first, another before the second; and
    a turn without any."""
    turns: list[Turn] = []
    async with TorchEngine(model) as engine:

        async def turn(
            name: str, parent: Turn | None, before: list[int], delta: list[int], shown: int
        ) -> Turn:
            call = GenerateRequest(
                id=name,
                session_id="s",
                prompt_ids=(*before, *delta),
                sampling=Sampling(),
                max_tokens=5,
                stop_ids=(),
                images=tuple(image(data) for data in PICTURES[:shown]),
                draw=name,
            )
            chunks = [chunk async for chunk in engine.generate(call)]
            ids = tuple(token for chunk in chunks for token in chunk.token_ids)
            known = len(parent.delta_ids) + len(parent.token_ids) if parent else 0
            new = (chunks[0].prompt_ids or call.prompt_ids)[known:]
            run = [n for n, token in enumerate(new) if token == image_id]
            spans = (ImageSpan(image(PICTURES[shown - 1]).digest, run[0], len(run)),) if run else ()
            return Turn(
                id=name,
                root=f"root {bool(shown)}",
                parent=parent.id if parent else None,
                delta_ids=new,
                images=spans,
                token_ids=ids,
                logprobs=tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
                versions=(VersionSpan(0, len(ids), 0, 0),),
                finish_reason=FinishReason.LENGTH,
                status=TurnStatus.COMMITTED,
                sampling=Sampling(),
                messages=(Message(role="user", images=tuple(ImageRef(s.digest, 0) for s in spans)),),
            )

        first = await turn("t1", None, [], [5, 6, image_id, 9], 1)
        before = [5, 6, image_id, 9, *first.token_ids]
        turns += [
            first,
            await turn("t2", first, before, [7, image_id, 8], 2),
            await turn("t3", None, [], [3, 4], 0),
        ]
    return turns


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl", "llava"])
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, rows.RolloutRows]:
    model = build_tiny_vision_model(tmp_path_factory.mktemp("vision"), family=request.param)
    vision = Vision.load(model)
    assert vision is not None
    turns = asyncio.run(sampled(model, vision.image_id))
    rollout = Rollout(id="r", exp_id="x", group_id="g", task=Task("task", {}))
    whole = RolloutResult(
        rollout=rollout,
        outcome=Outcome(rollout_id="r", attempt=1, reward=1.0),
        trajectories=trajectories.linear(TurnTree(turns)).trajectories,
        turns=tuple(turns),
        images=tuple(map(image, PICTURES)),
    )
    session = rows.rollout_rows(whole, 0, image_id=vision.image_id)
    assert isinstance(session, rows.RolloutRows)
    return model, session


def test_veRLs_own_actor_inputs_give_the_sampled_log_probabilities(
    made: tuple[Path, rows.RolloutRows],
) -> None:
    path, session = made
    vision = Vision.load(path)
    fields = [entry.fields for entry in rows.queue_entries(PROMPT, session, vision=vision)]
    assert [len(row.images) for row in session.rows] == [2, 0]
    batch = list_of_dict_to_tensordict(fields)
    tensordict_utils.assign_non_tensor(batch, use_remove_padding=False, temperature=1.0, pad_token_id=0)
    inputs, _ = FSDPEngineWithLMHead.prepare_model_inputs(SimpleNamespace(pad_to_length=None), batch)
    inputs.pop("images_seqlens", None)
    model: Any = AutoModelForImageTextToText.from_pretrained(path).eval()
    with torch.no_grad():
        scores = model(**inputs, use_cache=False).logits.log_softmax(-1)
    for n, row in enumerate(session.rows):
        ids = row.prompt_ids + row.response_ids
        places = [
            p for p in range(len(row.prompt_ids), len(ids)) if row.response_mask[p - len(row.prompt_ids)]
        ]
        own = [float(scores[n, p - 1, ids[p]]) for p in places]
        told = [row.response_logprobs[p - len(row.prompt_ids)] for p in places]
        assert own == pytest.approx(told, abs=1e-4)


def test_positions_are_those_that_veRLs_agent_loop_computes(made: tuple[Path, rows.RolloutRows]) -> None:
    path, session = made
    vision = Vision.load(path)
    assert vision is not None
    model: Any = AutoModelForImageTextToText.from_pretrained(path)
    bound = {"get_rope_index": model.model.get_rope_index} if vision.mrope else {}
    worker = SimpleNamespace(
        processor=SimpleNamespace(image_token_id=vision.image_id, video_token_id=None, **bound)
    )
    stock = getattr(AgentLoopWorker, "__ray_metadata__", SimpleNamespace(modified_class=AgentLoopWorker))
    for entry in rows.queue_entries(PROMPT, session, vision=vision):
        ids = entry.fields["input_ids"][None]
        shown = dict(entry.fields["multi_modal_inputs"]) | {"mm_token_type_ids": torch.zeros_like(ids)}
        expected = stock.modified_class._compute_position_ids(worker, ids, torch.ones_like(ids), shown)
        assert torch.equal(entry.fields["position_ids"], expected.squeeze(0))


def test_an_agent_loops_output_has_the_pictures(made: tuple[Path, rows.RolloutRows]) -> None:
    _, session = made
    first, second = agent_loop.outputs(session)
    assert [picture.size for picture in (first.multi_modal_data or {})["images"]] == [(16, 16), (32, 16)]
    assert second.multi_modal_data is None


def test_a_placeholder_that_the_model_sampled_leaves_its_rollout_out(
    made: tuple[Path, rows.RolloutRows],
) -> None:
    _, session = made
    taken = session.result.turns[0].token_ids[0]
    told = rows.rollout_rows(session.result, 0, image_id=taken)
    assert isinstance(told, str) and "sampled the placeholder of images" in told
