"""A vision-language model small enough for tests, in the directory format every real one has.

`build_tiny_vision_model(directory)` writes a Qwen2-VL (or Qwen2.5-VL, Qwen3-VL, LLaVA) with random weights
from a fixed seed, the tokenizer of `tiny_model` with the tokens that stand for images, a
preprocessor_config.json and a ChatML template that places images. `png(colour)` is a picture of one colour.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import AddedToken
from transformers import GenerationConfig, PreTrainedTokenizerFast

from support.tiny_model import CHAT_TEMPLATE, build_tokenizer

IMAGE, VIDEO, START, END = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
PATCH, MERGE = 4, 2
MEAN, STD = [0.5, 0.5, 0.5], [0.25, 0.25, 0.25]
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava")


def vision_template(image: str = f"{START}{IMAGE}{END}") -> str:
    """The template of `tiny_model` with contents that may be lists of parts."""
    macro = (
        "{%- macro shown(content) -%}{%- if content is string -%}{{ content }}{%- else -%}"
        "{%- for part in content -%}{%- if part.type == 'image' -%}" + image + "{%- else -%}"
        "{{ part.text }}{%- endif -%}{%- endfor -%}{%- endif -%}{%- endmacro -%}\n"
    )
    body = CHAT_TEMPLATE.replace("{{- messages[0].content }}", "{{- shown(messages[0].content) }}")
    body = body.replace("{{- message.content }}", "{{- shown(message.content) }}")
    return macro + body.replace("+ message.content +", "+ shown(message.content) +")


def build_vision_tokenizer(image: str) -> PreTrainedTokenizerFast:
    tokenizer = build_tokenizer()
    tokens = [AddedToken(text, special=True, normalized=False) for text in (START, END, IMAGE, VIDEO)]
    tokenizer.add_tokens(tokens, special_tokens=True)  # pyright: ignore[reportArgumentType]
    tokenizer.chat_template = vision_template(image)
    return tokenizer


def build_tiny_vision_model(
    directory: Path, *, family: str = "qwen2_vl", seed: int = 0, layers: int = 2, max_positions: int = 1024
) -> Path:
    tokenizer = build_vision_tokenizer(IMAGE if family == "llava" else f"{START}{IMAGE}{END}")
    ids = {
        "image_token_id": tokenizer.convert_tokens_to_ids(IMAGE),
        "video_token_id": tokenizer.convert_tokens_to_ids(VIDEO),
        "vision_start_token_id": tokenizer.convert_tokens_to_ids(START),
        "vision_end_token_id": tokenizer.convert_tokens_to_ids(END),
    }
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,  # of 32, the least that vLLM computes on a CPU
        "num_key_value_heads": 1,
        "max_position_embeddings": max_positions,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
    }
    config = _config(family, text, ids)
    kind = getattr(
        transformers, transformers.AutoModelForImageTextToText._model_mapping[type(config)].__name__
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind(config).to(torch.float32)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(_preprocessor(family)))
    if family == "llava":  # what its processor needs to know beside it
        told = {
            "patch_size": 8,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        }
        told |= {"processor_class": "LlavaProcessor", "image_token": IMAGE}
        (directory / "processor_config.json").write_text(json.dumps(told))
    return directory


def _config(family: str, text: dict[str, Any], ids: dict[str, int]) -> Any:
    shared = {"tie_word_embeddings": False, **ids}
    if family == "llava":
        vision = transformers.CLIPVisionConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=16,
            patch_size=8, initializer_range=0.2,
        )  # fmt: skip
        return transformers.LlavaConfig(
            text_config=transformers.LlamaConfig(**text),
            vision_config=vision,
            image_token_id=ids["image_token_id"],
            image_token_index=ids["image_token_id"],
            vision_feature_layer=-2,
            image_seq_length=4,
            tie_word_embeddings=False,
        )
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    vision: dict[str, Any] = {
        "depth": 2, "num_heads": 2, "patch_size": PATCH, "spatial_merge_size": MERGE,
        "temporal_patch_size": 2, "in_channels": 3, "initializer_range": 0.2,
    }  # fmt: skip
    if family == "qwen2_vl":
        vision |= {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
        return transformers.Qwen2VLConfig(
            text_config={**text, "rope_parameters": {**rope, "type": "mrope"}}, vision_config=vision, **shared
        )
    if family == "qwen2_5_vl":
        vision |= {
            "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "window_size": 16,
            "fullatt_block_indexes": [1], "tokens_per_second": 2,
        }  # fmt: skip
        return transformers.Qwen2_5_VLConfig(
            text_config={**text, "rope_parameters": {**rope, "type": "mrope"}}, vision_config=vision, **shared
        )
    vision |= {
        "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }  # fmt: skip
    rope = {**rope, "mrope_interleaved": True}
    return transformers.Qwen3VLConfig(
        text_config={**text, "head_dim": 32, "rope_parameters": rope}, vision_config=vision, **shared
    )


def _preprocessor(family: str) -> dict[str, Any]:
    if family == "llava":
        return {
            "image_processor_type": "CLIPImageProcessor", "processor_class": "LlavaProcessor",
            "size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16},
            "image_mean": MEAN, "image_std": STD,
        }  # fmt: skip
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen3VLProcessor" if family == "qwen3_vl" else "Qwen2VLProcessor",
        "size": {"shortest_edge": 64, "longest_edge": 1024},
        "patch_size": PATCH, "temporal_patch_size": 2, "merge_size": MERGE,
        "image_mean": MEAN, "image_std": STD,
    }  # fmt: skip


def png(colour: tuple[int, int, int] | str, size: tuple[int, int] = (16, 16)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, colour).save(out, "PNG")
    return out.getvalue()
