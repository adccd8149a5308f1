"""Images through a real vLLM on the CPU: recorded as it expands them, rescored with pixels by our trainer."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.real.vllm_server import serving_vllm, with_torchvision

from afield.engines.vllm.engine import VllmEngine
from afield.orchestrator.rollout import rollout_result
from afield.trainers.diagnostics import BatchDiagnostics
from afield.trainers.grpo import GRPO
from afield.types import Group, Outcome, Rollout, Split, Task
from support.gateways import running
from support.tiny_vision_model import build_tiny_vision_model, png

pytestmark = [pytest.mark.real, pytest.mark.anyio]
RED, BLUE = png("red"), png((0, 30, 200), (24, 16))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_vision_model(tmp_path_factory.mktemp("vision"), max_positions=2048)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("vllm") / "vllm.log"
    with serving_vllm(model, log, settings=with_torchvision()) as url:
        yield url


def chat(*parts: str | bytes) -> dict[str, Any]:
    def shown(part: str | bytes) -> dict[str, Any]:
        if isinstance(part, str):
            return {"type": "text", "text": part}
        url = f"data:image/png;base64,{base64.b64encode(part).decode()}"
        return {"type": "image_url", "image_url": {"url": url}}

    return {"role": "user", "content": [shown(part) for part in parts]}


async def test_a_conversation_with_images_is_rescored_exactly(
    server: str, model: Path, tmp_path: Path
) -> None:
    async with running(VllmEngine(server, images=True), tmp_path / "store", model) as up:
        members = []
        for n in range(2):
            agent = await up.agent(f"r{n}.1")
            messages: list[Any] = [chat("What is ", RED if n else BLUE, "?")]
            for more in ([chat("And ", BLUE, " or ", RED)], [{"role": "user", "content": "Sure?"}], []):
                reply = await agent.chat.completions.create(model="m", messages=messages, max_tokens=6)
                content = reply.choices[0].message.content or ""
                messages += [{"role": "assistant", "content": content}, *more]
            record = await up.client.finalize(f"r{n}.1")
            assert max(len(row.images) for row in record.trajectories) == 3
            rollout = Rollout(id=f"r{n}", exp_id="x", group_id="g", task=Task("task", {}))
            outcome = Outcome(rollout_id=f"r{n}", attempt=1, reward=float(n))
            members.append(rollout_result(rollout, outcome, record, 1))
    group = Group(id="g", task_id="task", epoch=0, split=Split.TRAIN, finished=tuple(members))
    trainer = GRPO(model, lr=1e-3)
    audit = BatchDiagnostics()
    trainer.optimizer.score(trainer.batch([group]).rows, audit)
    assert audit.tokens["diff"] and audit.worst.diff < 1e-4
    assert trainer.step([group]).rollouts == 2
