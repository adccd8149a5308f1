"""Timing of `generate` and `generate_batch` of `transformers`."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from bench.engine.workload import Load, prompts, timed


def sampling(new: int, **rest: Any) -> GenerationConfig:
    """The whole distribution at temperature 1, as rollouts are sampled; no token ends an answer."""
    return GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=new, eos_token_id=None,
        pad_token_id=0, **rest,
    )  # fmt: skip


def generate(model: Any, load: Load, compiled: bool) -> dict[str, Any]:
    ids = torch.tensor(prompts(load, model.config.vocab_size, 3), device=model.device)
    ways: dict[str, dict[str, Any]] = {
        "dynamic": {},
        "static": {"cache_implementation": "static", "disable_compile": True},
    }
    if compiled:
        ways["static, compiled"] = {"cache_implementation": "static"}

    def run(way: str, new: int) -> float:
        config = sampling(new, **ways[way])
        mask = torch.ones_like(ids)
        took, out = timed(
            model.device, lambda: model.generate(ids, attention_mask=mask, generation_config=config)
        )
        assert out.shape == (load.requests, load.prompt + new), out.shape
        return took

    trials: dict[str, float] = {}
    for way in ways:
        run(way, load.trial)
        trials[way] = load.requests * load.trial / run(way, load.trial)
    best = max(trials, key=lambda way: trials[way])
    seconds = [run(best, load.new) for _ in "ab"]
    took = min(seconds)
    return {
        "tok_s": round(load.requests * load.new / took),
        "cache": best,
        "runs_s": [round(s, 2) for s in seconds],
        "tok_s_first_tokens": {way: round(rate) for way, rate in trials.items()},
        "ms_per_step": round(1000 * took / load.new, 1),
    }


def generate_batch(model: Any, load: Load) -> dict[str, Any]:
    """Continuous batching. Its manager stays between the runs, so that only the first one sets it up."""
    requests = prompts(load, model.config.vocab_size, 3)
    blocks = -(-(load.prompt + load.batch_new) // 32) * load.requests + 64
    options = ContinuousBatchingConfig(
        block_size=32,
        num_blocks=blocks,
        max_batch_tokens=max(load.requests, min(4096, load.requests * load.prompt)),
        max_requests_per_batch=load.requests,
    )
    config = sampling(load.batch_new)

    def run() -> dict[str, Any]:
        return model.generate_batch(
            requests, generation_config=config, continuous_batching_config=options, persistent_manager=True
        )

    first_s, _ = timed(model.device, run)
    took, out = timed(model.device, run)
    tokens = sum(len(result.generated_tokens) for result in out.values())
    assert tokens == load.requests * load.batch_new, tokens
    return {
        "tok_s": round(tokens / took),
        "new": load.batch_new,
        "s": round(took, 2),
        "first_run_s": round(first_s, 2),
    }
