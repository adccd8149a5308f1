"""`afield train` on pictures: a tiny vision-language model learns to say a letter of a colour it sees."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.processes import afield
from support.tiny_vision_model import build_tiny_vision_model

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
AGENT = """
import base64, io

import openai
from PIL import Image

import afield

CLIENT = openai.OpenAI(base_url="http://unset", api_key="unset")


@afield.agent
def agent(task: dict, rollout: afield.Context) -> float:
    out = io.BytesIO()
    Image.new("RGB", (16, 16), task["colour"]).save(out, "PNG")
    url = "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
    shown = [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": url}}]
    client = CLIENT.with_options(base_url=rollout.openai_base_url, api_key=rollout.api_key)
    messages = [{"role": "user", "content": shown}]
    reply = client.chat.completions.create(model=rollout.model_id, messages=messages, max_tokens=4)
    text = reply.choices[0].message.content or ""
    return text.count({"red": "e", "blue": "u"}[task["colour"]]) / 4 + 0.05 * any(map(str.islower, text))
"""


def test_a_model_learns_from_what_it_sees(tmp_path: Path) -> None:
    model = build_tiny_vision_model(tmp_path / "model")
    (tmp_path / "agent.py").write_text(AGENT)
    rows = [{"id": f"{colour}{n}", "colour": colour} for n in range(8) for colour in ("red", "blue")]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["train", f"{tmp_path / 'agent.py'}:agent", "--tasks", tmp_path / "tasks.jsonl", "--model", model]
    words += [
        "--steps",
        12,
        "--tasks-per-step",
        8,
        "--rollouts",
        8,
        "--lr",
        0.003,
        "--max-tokens",
        4,
        "--run",
        "r",
    ]
    code, out, err = afield(tmp_path, *words)
    assert code == 0, f"{out}\n{err}"
    (run,) = [path.parent for path in tmp_path.rglob("metrics.jsonl")]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward"] for line in lines]
    assert sum(rewards[-3:]) > 1.5 * sum(rewards[:3]), rewards
    assert max(line["trainer"]["sampler_trainer_logprob_diff_max"] for line in lines) < 1e-4
    # The pictures are in the rollouts, so that another trainer can learn from them.
    first = json.loads((run / "rollouts" / "step-0001.jsonl").read_text().splitlines()[0])
    assert first["images"][0]["data"] and first["trajectories"][0]["images"]
