"""Model directories for the token tests: the tiny model's tokenizer with one of several templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from afield.tokens import Tool
from afield.types import Message, ToolCall
from tiny_model import CHAT_TEMPLATE, build_tokenizer

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


def write_model(directory: Path, name: str) -> Path:
    build_tokenizer().save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(template(name))
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
