"""A causal language model small enough for tests, in the directory format every real one has.

`build_tiny_model(directory)` writes config.json, model.safetensors, generation_config.json and a
byte-level BPE tokenizer with ChatML special tokens and a chat template that speaks hermes tool
calls. The weights are random, from a fixed seed: it answers nonsense, but deterministically.
`reseed(directory, into, seed)` writes the same model with other weights, as a trainer would.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
FAMILIES: dict[str, type[PreTrainedConfig]] = {
    "qwen3": Qwen3Config,
    "qwen2": Qwen2Config,
    "llama": LlamaConfig,
}
VOCABULARY = 400

CORPUS = [
    "system\nYou are a helpful assistant. Answer in one word.",
    'user\nWhat is the value of key "seven"? Look it up, then answer with the value.',
    'assistant\n{"name": "lookup", "arguments": {"key": "seven"}}',
    'user\n{"value": 42}\nThe answer is 42.',
    "# Tools\n\nThese functions can be called. One JSON schema per line:",
    '{"type": "function", "function": {"name": "lookup", "description": "Look a key up", "parameters": '
    '{"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}}}',
    "To call a function, answer with its name and arguments as JSON:",
    "the quick brown fox jumps over the lazy dog; pack my box with five dozen jugs",
]

CHAT_TEMPLATE = """\
{%- set ns = namespace(in_tools=false) %}
{%- set has_system = messages and messages[0].role == 'system' %}
{%- if tools or has_system %}
{{- '<|im_start|>system\n' }}
{%- if has_system %}{{- messages[0].content }}{% endif %}
{%- if tools %}
{%- if has_system %}{{- '\n\n' }}{% endif %}
{{- '# Tools\n\nThese functions can be called. One JSON schema per line:\n<tools>' }}
{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{% endfor %}
{{- '\n</tools>\n\nTo call a function, answer with its name and arguments as JSON:\n' }}
{{- '<tool_call>\n{"name": NAME, "arguments": ARGUMENTS}\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if not ns.in_tools %}{{- '<|im_start|>user' }}{% endif %}
{%- set ns.in_tools = true %}
{{- '\n<tool_response>\n' }}{{- message.content }}{{- '\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}
{{- '<|im_end|>\n' }}
{%- set ns.in_tools = false %}
{%- endif %}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\n' }}
{%- if message.reasoning_content %}
{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
{%- endif %}
{%- if message.content %}{{- message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{- '\n' }}{% endif %}
{{- '<tool_call>\n{"name": ' }}{{- call.function.name | tojson }}{{- ', "arguments": ' }}
{%- if call.function.arguments is string %}{{- call.function.arguments }}
{%- else %}{{- call.function.arguments | tojson }}{% endif %}
{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif not (loop.first and has_system) %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in CONTROL]
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY - len(MARKERS),
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def build_tiny_model(
    directory: Path,
    *,
    family: str = "qwen3",
    layers: int = 2,
    hidden: int = 64,
    tied: bool = False,
    seed: int = 0,
    max_positions: int = 2048,
    shard_size: str = "1GB",
) -> Path:
    """Write a randomly initialised model with grouped-query attention (4 heads, 2 key-value heads)."""
    tokenizer = build_tokenizer()
    heads = {"head_dim": hidden // 4} if family != "qwen2" else {}
    config = FAMILIES[family](
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        # Far above the usual 0.02: a flat distribution would hide a wrong log-probability.
        initializer_range=0.2,
        **heads,
    )
    write_weights(config, directory, seed, shard_size)
    tokenizer.save_pretrained(directory)
    return directory


def reseed(directory: Path, into: Path, seed: int, shard_size: str = "1GB") -> Path:
    """The model of `directory` with other random weights, saved to `into`."""
    shutil.copytree(directory, into, ignore=shutil.ignore_patterns("*.safetensors*"))
    write_weights(AutoConfig.from_pretrained(directory), into, seed, shard_size)
    return into


def write_weights(config: PreTrainedConfig, directory: Path, seed: int, shard_size: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(
        eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(directory, max_shard_size=shard_size)
