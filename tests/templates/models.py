"""Model directories for the token tests: the tiny model's tokenizer with one of several templates.

The templates beside this file are written in the manners of model families. The first comment of each
lists the control tokens it needs besides the tiny model's, and the tokens its model would stop at.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from afield.chat import Tool
from afield.types import Message, ToolCall
from support.tiny_model import CHAT_TEMPLATE, build_tokenizer

HERE = Path(__file__).parent
NAMES = ["tiny", "thinking", "moving", "endless"]

RAW_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look a key up: <b>fast</b> & 'quoted' — été",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}
TOOL = Tool("lookup", RAW_TOOL["function"]["description"], RAW_TOOL["function"]["parameters"], RAW_TOOL)


def template(name: str) -> str:
    return CHAT_TEMPLATE if name == "tiny" else (HERE / f"{name}.jinja").read_text()


ALL = ["tiny", *sorted(path.stem for path in HERE.glob("*.jinja"))]


def write_model(directory: Path, name: str) -> Path:
    control, stops = needs(template(name))
    return write_template(directory, template(name), control, stops)


def needs(source: str) -> tuple[list[str], list[str]]:
    """The control tokens and the stop tokens that a template's first comment lists."""
    comment = source[: source.find("-#}")]
    control = re.search(r"control: ([^;]*)", comment)
    stops = re.search(r"stop: (.*)", comment)
    return (control[1].split() if control else []), (stops[1].split() if stops else [])


def write_template(directory: Path, source: str, control: list[str], stops: list[str]) -> Path:
    tokenizer = build_tokenizer()
    known = tokenizer.get_vocab()
    # As published models have it: tags are ordinary added tokens, the rest is special.
    for text in dict.fromkeys([*control, *stops]):
        if text not in known:
            tag = re.fullmatch(r"</?[a-z_:]+>", text) is not None and text not in stops
            tokenizer.add_tokens(
                [AddedToken(text, special=not tag, normalized=False)], special_tokens=not tag
            )
    if stops:
        tokenizer.eos_token = stops[0]
    tokenizer.save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(source)
    if stops:
        ids = tokenizer.convert_tokens_to_ids(stops)
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return directory


def oracle(directory: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(directory)


def call(key: str, id: str = "call_1") -> ToolCall:
    return ToolCall(id, "lookup", f'{{"key": "{key}"}}')


def sampled(directory: Path, text: str) -> list[int]:
    """Ids a model could have sampled for the text, markers and control tokens as tokens of their own."""
    return Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text, add_special_tokens=False).ids


SYSTEM = Message(role="system", content="Be brief.")
QUESTION = Message(role="user", content="What is the value of seven? 北京 🐍")
CALLING = Message(role="assistant", content="Looking.", reasoning="I need it.", tool_calls=(call("seven"),))
RESULT = Message(role="tool", content='{"value": 42}', tool_call_id="call_1")
ANSWER = Message(role="assistant", content="It is 42.", reasoning="Found it.")
CONVERSATION = [SYSTEM, QUESTION, CALLING, RESULT, ANSWER, Message(role="user", content="And eight?")]
