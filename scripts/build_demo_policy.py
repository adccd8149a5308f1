"""Build the demo's start checkpoint, `src/afield/demo/policy/`: tokenizer, template, a small transformer.

The warm start follows the format of the demo's agents always, and is right only part of the time: it
mixes up tools, it mixes up items, and it often rounds the number it found. About a fifth of its answers are
correct, so there is something to learn. Every prompt is rendered
through the checkpoint's own chat template with the system prompts and tool schemas the agents really
send. The seed is fixed; a rebuild gives a policy of equal quality.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from langchain_core.utils.function_calling import convert_to_openai_tool
from strands.models.openai import OpenAIModel
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from afield.demo import shop
from afield.demo.agents import langgraph_agent, openai_agent, strands_agent

POLICY = Path(__file__).resolve().parent.parent / "src/afield/demo/policy"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
SPECIAL += ["<tool_response>", "</tool_response>", "<think>", "</think>"]
TOOL = {"price": "get_price", "stock": "get_stock"}
EXACT = {"price": "It costs ${number}.", "stock": "There are {number} left."}
VAGUE = {"price": "It costs about ${number}.", "stock": "There are about {number} left."}

# How often a demonstration is right, decision by decision.
RIGHT_TOOL, RIGHT_ITEM, EXACT_NUMBER = 0.9, 0.67, 0.3
# How often one starts with an answer out of nowhere (not trained) and looks it up when told to.
NUDGED = 0.04
# Noise on the weights, as a share of their size, while the warm start takes its gradients.
SHAKE = 0.1


class Harness(NamedTuple):
    """What an agent sends besides the question."""

    system: str
    nudge: str
    tools: list[dict[str, Any]]


@functools.cache
def harnesses() -> list[Harness]:
    specs = [strands_agent.get_price.tool_spec, strands_agent.get_stock.tool_spec]
    strands_tools = OpenAIModel(model_id="demo").format_request([], specs)["tools"]
    langgraph_tools = [convert_to_openai_tool(tool) for tool in langgraph_agent.TOOLS]
    return [
        Harness(openai_agent.SYSTEM, openai_agent.NUDGE, openai_agent.TOOLS),
        Harness(strands_agent.SYSTEM, strands_agent.NUDGE, strands_tools),
        Harness(langgraph_agent.SYSTEM, langgraph_agent.NUDGE, langgraph_tools),
    ]


# --- demonstrations ------------------------------------------------------------------------------


class Demonstration(NamedTuple):
    harness: int
    question: tuple[str, str]  # field, item
    looked_up: tuple[str, str]
    number: int
    exact: bool
    guess: int | None


def demonstrate(rng: random.Random) -> Demonstration:
    field, item = rng.choice(list(TOOL)), rng.choice(shop.ITEMS)
    other = next(f for f in TOOL if f != field)
    return Demonstration(
        harness=rng.randrange(len(harnesses())),
        question=(field, item),
        looked_up=(
            field if rng.random() < RIGHT_TOOL else other,
            item if rng.random() < RIGHT_ITEM else rng.choice([i for i in shop.ITEMS if i != item]),
        ),
        number=rng.choice(shop.NUMBERS),
        exact=rng.random() < EXACT_NUMBER,
        guess=rng.choice(shop.NUMBERS) if rng.random() < NUDGED else None,
    )


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def call(field: str, item: str) -> dict[str, Any]:
    function = {"name": TOOL[field], "arguments": json.dumps({"item": item})}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def vague(field: str, number: int) -> str:
    return VAGUE[field].format(number=round(number, -1))


def conversation(demo: Demonstration) -> list[dict[str, Any]]:
    (field, item), harness = demo.question, harnesses()[demo.harness]
    messages = [{"role": "system", "content": harness.system}, user(shop.QUESTIONS[field].format(item=item))]
    if demo.guess is not None:
        messages += [assistant(VAGUE[field].format(number=demo.guess)), user(harness.nudge)]
    messages.append(call(*demo.looked_up))
    messages.append({"role": "tool", "content": str(demo.number)})
    answer = EXACT[field].format(number=demo.number) if demo.exact else vague(field, demo.number)
    messages.append(assistant(answer))
    return messages


# --- tokenizer -----------------------------------------------------------------------------------


def build_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE. Pieces may span words, but end with a line, a number or a JSON string value."""
    tokenizer = Tokenizer(models.BPE())
    text = r'(?:(?!(?<=": "))[^\n\d])'
    pieces = Regex(rf'\d{{1,2}}|(?<=": ")[^"\n\d]+|\n?{text}+\n|\n?{text}+|\n')
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pieces, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        # More than a whole question occurs, so that the item asked about stays a piece of its own.
        min_frequency=len(texts) // 12,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    spoken = [piece for text in texts for piece in re.split("|".join(map(re.escape, SPECIAL)), text)]
    words = [str(word) for word in [*range(10, 100), *shop.ITEMS] for _ in texts]
    tokenizer.train_from_iterator([*spoken, *words], trainer)
    return tokenizer


def save_tokenizer(texts: list[str], directory: Path) -> PreTrainedTokenizerBase:
    build_tokenizer(texts).save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": SPECIAL[1:],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return AutoTokenizer.from_pretrained(directory)


# --- supervised warm start -----------------------------------------------------------------------


class Renderer:
    """Demonstrations to ids and loss mask. What messages add to a prompt is rendered once and remembered."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = functools.cache(self._render_added)

    def text(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], ask: bool = False) -> str:
        return self._tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=ask
        )

    def row(self, demo: Demonstration) -> tuple[list[int], list[int]]:
        messages = conversation(demo)
        ids: list[int] = []
        mask: list[int] = []
        for end in range(1, len(messages)):
            if messages[end]["role"] != "assistant":
                continue
            start = max((i + 1 for i in range(end) if messages[i]["role"] == "assistant"), default=0)
            prompt, reply = self._added(
                demo.harness, json.dumps(messages[start:end]), json.dumps(messages[end])
            )
            trained = int(end > 2 or demo.guess is None)
            ids += [*prompt, *reply]
            mask += [0] * len(prompt) + [trained] * len(reply)
        return ids, mask

    def _render_added(self, harness: int, context: str, reply: str) -> tuple[list[int], list[int]]:
        before, answer = json.loads(context), json.loads(reply)
        tools = harnesses()[harness].tools
        if before[0]["role"] == "system":
            opening = ""
        else:  # the turns before these do not matter to what is added, only that there are some
            before = [{"role": "system", "content": ""}, user(""), assistant(""), *before]
            opening = self.text(before[:3], tools).removesuffix("\n")
        prompt = self.text(before, tools, ask=True).removeprefix(opening)
        whole = self.text([*before, answer], tools).removeprefix(opening)
        sampled = whole.removeprefix(prompt).removesuffix("\n")
        return self._encode(prompt), self._encode(sampled)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def build_model(tokenizer: Any) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=math.ceil(len(tokenizer) / 16) * 16,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


@contextmanager
def shaken(model: Any, level: float) -> Iterator[None]:
    """Weights a little off, by `level` of their size; as they were when the block ends."""
    noise = [level * p.detach().square().mean().sqrt() * torch.randn_like(p) for p in model.parameters()]
    for parameter, off in zip(model.parameters(), noise, strict=True):
        parameter.data.add_(off)
    yield
    for parameter, off in zip(model.parameters(), noise, strict=True):
        parameter.data.sub_(off)


def warm_start(model: Any, renderer: Renderer, rng: random.Random, steps: int, lr: float) -> None:
    """Gradients are taken at weights a little off, so that the format survives being trained further."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01, betas=(0.9, 0.98))
    for step in range(steps):
        rows = [renderer.row(demonstrate(rng)) for _ in range(48)]
        width = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([i + [0] * (width - len(i)) for i, _ in rows])
        mask = torch.tensor([m + [0] * (width - len(m)) for _, m in rows], dtype=torch.bool)
        for group in optimizer.param_groups:
            group["lr"] = (
                lr * min(1.0, (step + 1) / 50) * (0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)
            )
        needed = mask[:, 1:].any(dim=0).nonzero().flatten()
        chosen = mask[:, 1:][:, needed]
        optimizer.zero_grad()
        with shaken(model, SHAKE):
            logits = model(ids, logits_to_keep=needed).logits
            loss = torch.nn.functional.cross_entropy(logits[chosen], ids[:, 1:][:, needed][chosen])
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step:5d}  loss {loss.item():.4f}  width {width}")


def main() -> None:
    arguments = argparse.ArgumentParser(description="Build the demo's start checkpoint.")
    arguments.add_argument(
        "--out", type=Path, default=POLICY, help="directory; holds chat_template.jinja already"
    )
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--steps", type=int, default=1400)
    arguments.add_argument("--lr", type=float, default=3e-3)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    rng = random.Random(options.seed)

    from transformers.utils.chat_template_utils import render_jinja_template

    template = (options.out / "chat_template.jinja").read_text()
    texts = []
    for _ in range(4000):
        demo = demonstrate(rng)
        rendered, _ = render_jinja_template(
            [conversation(demo)], tools=harnesses()[demo.harness].tools, chat_template=template
        )
        texts.append(rendered[0])
    tokenizer = save_tokenizer(texts, options.out)
    print(f"{len(tokenizer)} tokens")

    model = build_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    warm_start(model, Renderer(tokenizer), rng, options.steps, options.lr)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(options.out)


if __name__ == "__main__":
    main()
