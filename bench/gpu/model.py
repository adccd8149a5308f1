"""A randomly initialised model directory with a tokenizer and a chat template, for benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SIZES: dict[str, dict[str, Any]] = {
    "0.38b": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32_768,
    },
    "0.5b": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32_768,
    },
    "1.5b": {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32_768,
    },
    "8b": {
        "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131_072,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 2048,
    },
}  # fmt: skip
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content"
    " + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"
)


def tokenizer(size: int) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer; ids above the bytes are words that only the model samples."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġw{number}" for number in range(size - len(alphabet) - len(CONTROL))]
    vocabulary = {text: number for number, text in enumerate([*alphabet, *words])}
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )


def write_model(directory: Path, size: str, device: str, dtype: torch.dtype) -> Path:
    """Write the model. No sampled reply ends early: the rows of control tokens are never likely."""
    sizes = SIZES[size]
    tokens = tokenizer(sizes["vocab_size"])
    config = Qwen3Config(
        **sizes,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokens.eos_token_id,
        pad_token_id=tokens.pad_token_id,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model: Any = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        # As peaked as a trained model's distribution: a flat one would hide a wrong log-probability.
        model.lm_head.weight.mul_(4)
    model.save_pretrained(directory)
    tokens.save_pretrained(directory)
    return directory
