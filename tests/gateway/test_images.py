"""Images in messages: kept by the digest of their content, recorded as the engine expands them."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

import openai
import pytest

from afield.chat import ChatTokenizer
from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.interfaces.engine import GenerateRequest
from support.gateways import running
from support.tiny_vision_model import png
from templates.models import write_template

pytestmark = pytest.mark.anyio

TEMPLATE = """
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}{% if part.type == 'image' %}<|picture|>
{%- else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
BYTES = png("red")
URL = "data:image/png;base64," + base64.b64encode(BYTES).decode()
ASKED: Any = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "before "},
            {"type": "image_url", "image_url": {"url": URL}},
            {"type": "text", "text": " after"},
        ],
    }
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_template(tmp_path / "model", TEMPLATE, ["<|picture|>"], ["<|im_end|>"])


def seeing(model: Path) -> ScriptedEngine:
    tokens = ChatTokenizer.load(model)
    picture = tokens.encode_raw("<|picture|>")
    assert len(picture) == 1

    def script(call: GenerateRequest) -> ScriptedReply:
        return ScriptedReply(token_ids=tuple(tokens.encode_raw("A cat.<|im_end|>")))

    return ScriptedEngine(script, image_id=picture[0], image_length=5)


async def test_image_is_recorded_as_expanded_by_the_engine(model: Path, tmp_path: Path) -> None:
    engine = seeing(model)
    tokens = ChatTokenizer.load(model)
    (picture,) = tokens.encode_raw("<|picture|>")
    async with running(engine, tmp_path / "store", model) as up:
        agent = await up.agent()
        first = await agent.chat.completions.create(model="m", messages=ASKED)
        reply = {"role": "assistant", "content": first.choices[0].message.content}
        more: Any = [*ASKED, reply, {"role": "user", "content": "Sure?"}]
        stream = await agent.chat.completions.create(model="m", messages=more, stream=True)
        assert [chunk async for chunk in stream]
        _, answer = await up.ask("GET", "/sessions/r.1/turns?prompt_ids=1")
        record = await up.client.finalize("r.1")
    one, two = answer["turns"]
    assert one["prompt_ids"].count(picture) == two["prompt_ids"].count(picture) == 5
    assert two["parent"] == one["id"] and two["tier"] == "append"
    digest = hashlib.sha256(BYTES).hexdigest()
    assert one["messages"][0]["images"] == [{"digest": digest, "at": len("before ")}]
    (row,) = record.trajectories
    assert list(row.token_ids[: len(one["prompt_ids"])]) == one["prompt_ids"]
    assert row.owned == len(one["token_ids"]) + len(two["token_ids"])
    # What was sent is the prompt with one place for the image; what was seen is what is recorded.
    assert [call.prompt_ids for call in engine.recorded] == [
        tuple(one["prompt_ids"]),
        tuple(two["prompt_ids"]),
    ]


async def test_another_image_is_another_conversation(model: Path, tmp_path: Path) -> None:
    async with running(seeing(model), tmp_path / "store", model) as up:
        agent = await up.agent()
        await agent.chat.completions.create(model="m", messages=ASKED)
        other = base64.b64encode(png("blue")).decode()
        changed: Any = [dict(ASKED[0])]
        changed[0]["content"] = [{"type": "image_url", "image_url": {"url": f"data:;base64,{other}"}}]
        await agent.chat.completions.create(model="m", messages=changed)
        record = await up.client.finalize("r.1")
    assert len(record.trajectories) == 2


async def test_engine_without_images_gets_400(model: Path, tmp_path: Path) -> None:
    async with running(ScriptedEngine([]), tmp_path / "store", model) as up:
        agent = await up.agent()
        with pytest.raises(openai.BadRequestError, match="takes no images"):
            await agent.chat.completions.create(model="m", messages=ASKED)


async def test_template_without_images_gets_400(tmp_path: Path) -> None:
    async with running(ScriptedEngine([], image_id=5), tmp_path / "store") as up:
        agent = await up.agent()
        with pytest.raises(openai.BadRequestError, match="no place for images"):
            await agent.chat.completions.create(model="m", messages=ASKED)


async def test_invalid_base64_image_gets_400(model: Path, tmp_path: Path) -> None:
    async with running(seeing(model), tmp_path / "store", model) as up:
        agent = await up.agent()
        broken: Any = [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:;base64,%"}}]}
        ]
        with pytest.raises(openai.BadRequestError, match="not base64"):
            await agent.chat.completions.create(model="m", messages=broken)
