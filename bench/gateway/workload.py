"""Workload of the gateway benchmark: equal prompts, answers and turns for every server.

The tokenizer is trained once on the standard library's sources, so nothing is downloaded. The prompt has 600
tokens with two tools; the answer has 200 tokens and ends in a tool call. Each turn adds that answer and a
short tool result, 32k tokens at turn 128.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import sysconfig
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from bench import ROOT

PROMPT, ANSWER, RESULT, TURNS = 600, 200, 48, 128
VOCABULARY = 16_000
SOURCES = ("argparse.py", "typing.py", "pathlib.py", "logging/__init__.py", "asyncio/tasks.py", "datetime.py")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
NUMBER = b"000000000"
TEMPLATE = ROOT / "src" / "afield" / "demo" / "policy" / "chat_template.jinja"
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command in the project's shell and return what it prints",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string", "description": "The command line to run"}},
                "required": ["command"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "edit",
            "description": "Replace one text in a file by another",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "old": {"type": "string"},
                    "new": {"type": "string"},
                },
                "required": ["path", "old", "new"],
            },
        },
    },
]
ARGUMENTS = '{"command": "grep -rn format_help argparse.py"}'


class Workload:
    """The model directory, the answer, and the bodies of requests."""

    def __init__(self, cache: Path) -> None:
        self.model = model_directory(cache)
        self.tokenizer = Tokenizer.from_file(str(self.model / "tokenizer.json"))
        self.text = corpus()
        self._ids = self.tokenizer.encode(self.text[:600_000], add_special_tokens=False).ids
        self.system = self._slice(0, 250)
        self.user = self._slice(1_000, PROMPT - 250 - self._tools_length())
        self.result = self._slice(2_000, RESULT)
        self.ids = self._answer()

    def opening(self, number: int) -> list[dict[str, Any]]:
        user = {"role": "user", "content": f"{number:09d} {self.user}"}
        return [{"role": "system", "content": self.system}, user]

    def body(self, messages: list[dict[str, Any]], *, stream: bool = False, ids: bool = False) -> bytes:
        """`ids` for clients of servers that only pass on what is asked of them."""
        wish: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        if ids:
            wish |= {"logprobs": True, "return_token_ids": True}
        body = {"model": "policy", "messages": messages, "tools": TOOLS, "max_tokens": 512, **wish}
        return json.dumps(body, separators=(",", ":")).encode()

    def tool_result(self, number: int) -> str:
        return f"{number:09d} {self.result}"

    def assistant(self, call_id: str = "call_0") -> dict[str, Any]:
        """The answer as a client sends it back."""
        text, _, _ = self.tokenizer.decode(self.ids, skip_special_tokens=False).partition("\n<tool_call>")
        call = {"name": "bash", "arguments": ARGUMENTS}
        calls = [{"id": call_id, "type": "function", "function": call}]
        return {"role": "assistant", "content": text, "tool_calls": calls}

    def stranger(self, number: int) -> list[dict[str, Any]]:
        """A conversation as long as the longest here, in other words each time."""
        messages = self.opening(number)
        for turn in range(1, TURNS + 1):
            at = (number * 7_919 + turn * 613) % (len(self._ids) - ANSWER)
            answer = {**self.assistant(f"call_{turn}"), "content": self._slice(at, ANSWER - RESULT)}
            result = f"{number + turn} {self._slice(at + ANSWER - RESULT, RESULT)}"
            messages += [answer, {"role": "tool", "tool_call_id": f"call_{turn}", "content": result}]
        return messages

    def answer(self) -> dict[str, Any]:
        """What the upstream has to know to give this answer."""
        message = self.assistant()
        pieces = self.pieces()
        marker = pieces.index("<tool_call>") - 1
        return {"ids": self.ids, "pieces": pieces, "message": message, "text": marker}

    def pieces(self) -> list[str]:
        """What each id of the answer spells; the text is plain ASCII, so each is whole."""
        return [self.tokenizer.decode([token], skip_special_tokens=False) for token in self.ids]

    def _answer(self) -> list[int]:
        call = '\n<tool_call>\n{"name": "bash", "arguments": ' + ARGUMENTS + "}\n</tool_call><|im_end|>"
        tail = self.tokenizer.encode(call, add_special_tokens=False).ids
        return self._ids[3_000 : 3_000 + ANSWER - len(tail)] + tail

    def _slice(self, start: int, length: int) -> str:
        return self.tokenizer.decode(self._ids[start : start + length])

    def _tools_length(self) -> int:
        text = "".join(json.dumps(tool["function"]) for tool in TOOLS)
        return len(self.tokenizer.encode(text, add_special_tokens=False).ids) + 50


def corpus() -> str:
    """Plain text that is on every machine with this Python, and the same on each."""
    home = Path(sysconfig.get_paths()["stdlib"])
    text = "\n".join((home / name).read_text(encoding="utf-8") for name in SOURCES)
    return text.encode("ascii", "ignore").decode()


def model_directory(cache: Path) -> Path:
    """A tokenizer and a chat template, as a gateway loads them; no weights, the upstream has none."""
    key = f"{platform.python_version()} {VOCABULARY} {SOURCES} {TEMPLATE.read_text()}"
    home = cache / f"policy-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if (home / "config.json").exists():
        return home
    home.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus().splitlines(keepends=True), trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    tokenizer.save(str(home / "tokenizer.json"))
    shutil.copy(TEMPLATE, home / "chat_template.jinja")
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (home / "tokenizer_config.json").write_text(json.dumps(settings))
    end = tokenizer.token_to_id("<|im_end|>")
    config = {
        "eos_token_id": end,
        "max_position_embeddings": 131_072,
        "vocab_size": tokenizer.get_vocab_size(with_added_tokens=True),
    }
    (home / "config.json").write_text(json.dumps(config))
    return home
