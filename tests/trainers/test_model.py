import json
import logging
import random
from pathlib import Path

import pytest
import torch
import transformers
from msgspec import structs
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from afield.batches.rows import Row
from afield.errors import UsageError
from afield.trainers.micro_batches import Padded, split_micro_batches, token_logprobs
from afield.trainers.model import PolicyModel
from afield.trainers.tree_attention import TokenTree
from afield.types import Trajectory, TurnRange, VersionSpan
from support.tiny_model import build_tiny_model

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "bos_token_id": 1}
FAMILIES: dict[str, tuple[str, dict]] = {
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "llama": ("LlamaConfig", {}),
    "smollm2": ("LlamaConfig", {"tie_word_embeddings": True}),
    "smollm3": ("SmolLM3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 64}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": None}),
    "phi3": ("Phi3Config", {}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 8, "sliding_window": 64}),
    "gpt-neox": ("GPTNeoXConfig", {}),
    "olmo2": ("Olmo2Config", {}),
    "gpt2": ("GPT2Config", GPT2 | {"eos_token_id": 2}),
}
# These cannot be run over a tree: soft caps, sinks, biases by distance, a state that runs along the row.
PADDED: dict[str, tuple[str, dict]] = {
    "gemma2": ("Gemma2Config", {"head_dim": 8, "sliding_window": 4}),
    "gpt-oss": ("GptOssConfig", {"head_dim": 8, "num_local_experts": 4, "rope_parameters": None}),
    "mistral with a short window": ("MistralConfig", {"sliding_window": 4}),
    "falcon": ("FalconConfig", {}),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(directory: Path, kind: str, settings: dict) -> Path:
    config: PreTrainedConfig = getattr(transformers, kind)(**(SMALL | settings))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory


def rows(seed: int = 0, vocabulary: int = 96) -> list[Row]:
    """Three conversations of two turns after the same prompt, the second of which branches."""
    rng = random.Random(seed)
    stem = tuple(rng.randrange(3, vocabulary) for _ in range(8))
    made: list[Row] = []
    for number in range(3):
        ids, owned = list(stem), []
        for turn in range(2):
            ids += [rng.randrange(3, vocabulary) for _ in range(3)]
            owned.append(TurnRange(f"t{turn}", len(ids), len(ids) + 4, 0.8))
            ids += [rng.randrange(3, vocabulary) for _ in range(4)]
        made.append(
            Row(rollout_id=f"r{number}", trajectory=trajectory(ids, owned), advantages=(1.0 - number, 0.5))
        )
    branch = made[0].trajectory.token_ids[:16]
    ids = [*branch, *(rng.randrange(3, vocabulary) for _ in range(7))]
    row = trajectory(ids, [TurnRange("t9", 18, len(ids), 1.0)])
    return [*made, Row(rollout_id="r0", index=1, trajectory=row, advantages=(0.7,))]


def trajectory(ids: list[int], turns: list[TurnRange]) -> Trajectory:
    owned = {place for turn in turns for place in range(turn.start, turn.end)}
    return Trajectory(
        token_ids=tuple(ids),
        loss_mask=tuple(int(place in owned) for place in range(len(ids))),
        logprobs=tuple(-4.0 if place in owned else 0.0 for place in range(len(ids))),
        versions=tuple(VersionSpan(turn.start, turn.end, 0, 0) for turn in turns),
        turns=tuple(turns),
        weight=1.0,
    )


def begun(row: Row) -> Row:
    """Its first turn alone."""
    turn = row.trajectory.turns[0]
    ids = list(row.trajectory.token_ids[: turn.end])
    return structs.replace(row, trajectory=trajectory(ids, [turn]), advantages=row.advantages[:1])


def gradient(policy: PolicyModel, layout=None, given: list[Row] | None = None) -> torch.Tensor:
    policy.model.zero_grad()
    for batch in split_micro_batches(
        given or rows(), 1000, CPU, layout or policy.layout, policy.tree_context
    ):
        policy.set_attention(policy.model, batch.layout)
        with policy.autocast():
            logp = token_logprobs(policy.model, batch)
        (-logp * batch.advantage * batch.weight).sum().backward()
    return torch.cat([p.grad.flatten() for p in policy.trainable if p.grad is not None])


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_as_a_tree_with_the_gradient_of_padded_rows(tmp_path, family):
    path = build(tmp_path / "model", *FAMILIES[family])
    tree = PolicyModel(path, device=CPU)
    padded = PolicyModel(path, device=CPU, layout="padded")
    assert (tree.layout, padded.layout) == ("tree", "padded")
    assert padded.model.config._attn_implementation != tree.model.config._attn_implementation
    assert apart(gradient(tree), gradient(padded)) < 1e-5


@pytest.mark.parametrize("family", PADDED)
def test_a_model_family_without_tree_support_is_padded_and_logged(tmp_path, family, caplog):
    path = build(tmp_path / "model", *PADDED[family])
    with caplog.at_level(logging.WARNING, "afield.trainers"):
        policy = PolicyModel(path, device=CPU)
    assert policy.layout == "padded"
    assert "rows are padded instead" in caplog.text
    plain = PolicyModel(path, device=CPU, layout="padded")
    assert policy.model.config._attn_implementation == plain.model.config._attn_implementation
    assert torch.equal(gradient(policy), gradient(plain))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["MistralConfig", "Gemma3TextConfig"])
def test_rows_that_outgrow_a_window_are_padded_beside_the_tree_of_the_others(tmp_path, kind, checkpointing):
    path = build(tmp_path / "model", kind, {"head_dim": 8, "sliding_window": 16})
    given = [*rows(), *(begun(row) for row in rows()[:2])]
    mixed = PolicyModel(path, device=CPU, checkpointing=checkpointing)
    passes = split_micro_batches(given, 1000, CPU, mixed.layout, mixed.tree_context)
    assert [(type(batch.layout), len(batch.rows)) for batch in passes] == [(TokenTree, 2), (Padded, 4)]
    padded = PolicyModel(path, device=CPU, layout="padded")
    assert apart(gradient(mixed, given=given), gradient(padded, given=given)) < 1e-5
    wide = PolicyModel(build(tmp_path / "wide", kind, {"head_dim": 8, "sliding_window": 64}), device=CPU)
    assert apart(gradient(mixed, given=given), gradient(wide, given=given)) > 1e-3, "the window matters"


@pytest.mark.parametrize("layout", ["tree", "padded"])
@pytest.mark.parametrize("family", ["qwen3", "gpt2", "phi3"])
def test_checkpointing_changes_no_gradient(tmp_path, family, layout):
    path = build(tmp_path / "model", *FAMILIES[family])
    plain = PolicyModel(path, device=CPU, layout=layout)
    spared = PolicyModel(path, device=CPU, layout=layout, checkpointing=True)
    assert torch.equal(gradient(spared), gradient(plain))
    assert (computed(plain), computed(spared)) == (1, 2)


def computed(policy: PolicyModel) -> int:
    """How often a forward and a backward pass compute something in a layer."""
    layer = next(m for m in policy.model.modules() if isinstance(m, GradientCheckpointingLayer))
    seen: list[int] = []
    inside = next(m for m in layer.modules() if not list(m.children()))
    hook = inside.register_forward_hook(lambda *_: seen.append(1))
    gradient(policy)
    hook.remove()
    return len(seen)


def test_checkpointing_that_would_switch_dropout_on_is_refused(tmp_path):
    settings = {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.1}
    path = build(tmp_path / "model", "OPTConfig", settings)
    with pytest.raises(UsageError, match="OPTForCausalLM has dropout under activation checkpointing"):
        PolicyModel(path, device=CPU, checkpointing=True)
    PolicyModel(path, device=CPU)


def test_rows_may_be_as_long_as_their_numbers_are_exact(tmp_path, caplog):
    window = build(tmp_path / "window", "MistralConfig", {"sliding_window": 64})
    with caplog.at_level(logging.WARNING, "afield.trainers"):
        assert PolicyModel(window, device=CPU).context == 128
    assert "rows of more than 64 tokens are padded" in caplog.text
    stretched = {
        "rope_type": "dynamic",
        "factor": 4.0,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 32,
    }
    assert (
        PolicyModel(build(tmp_path / "s", "LlamaConfig", {"rope_parameters": stretched}), device=CPU).context
        == 32
    )
    off = build(tmp_path / "off", "Qwen2Config", {"use_sliding_window": False, "sliding_window": 64})
    assert PolicyModel(off, device=CPU).context == 128


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("policy") / "model", hidden=32, tied=True)


@torch.no_grad()
def moved(policy: PolicyModel) -> PolicyModel:
    for parameter in policy.trainable:
        parameter.add_(0.01 * torch.ones_like(parameter))
    return policy


def test_the_reference_stays_where_the_policy_began(model_path):
    policy = PolicyModel(model_path, device=CPU, reference=True)
    with torch.no_grad():
        before = policy.model(IDS).logits
        moved(policy)
        with policy.reference() as start:
            assert torch.equal(start(IDS).logits, before)
        assert not torch.equal(policy.model(IDS).logits, before)
    with pytest.raises(UsageError, match="reference=True"), PolicyModel(model_path, device=CPU).reference():
        pass


def test_bfloat16_is_the_arithmetic_and_float32_what_is_kept(model_path, tmp_path):
    policy = PolicyModel(model_path, device=CPU, dtype="bfloat16")
    assert {p.dtype for p in policy.trainable} == {torch.float32}
    exact = gradient(PolicyModel(model_path, device=CPU))
    rough = gradient(policy)
    assert rough.dtype == torch.float32
    assert 0 < apart(rough, exact) < 0.1
    policy.export(tmp_path / "v1")
    assert {t.dtype for t in load_file(tmp_path / "v1" / "model.safetensors").values()} == {torch.float32}


def test_a_state_put_back_is_the_same_bit_for_bit(model_path, tmp_path):
    first, second = moved(PolicyModel(model_path, device=CPU)), PolicyModel(model_path, device=CPU)
    torch.save(first.state(), tmp_path / "state.pt")
    second.load_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(gradient(first), gradient(second))
    assert second.model.get_input_embeddings().weight is second.model.get_output_embeddings().weight


def test_exports_are_whole_and_untied(model_path, tmp_path):
    policy = moved(PolicyModel(model_path, device=CPU))
    policy.export(tmp_path / "v1")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "v1", dtype="float32")
    with torch.no_grad():
        assert float((loaded(IDS).logits - policy.model(IDS).logits).abs().max()) < 1e-5
    assert json.loads((tmp_path / "v1" / "config.json").read_text())["tie_word_embeddings"] is False
    assert (tmp_path / "v1" / "tokenizer.json").is_file()


def test_a_model_that_lacks_a_tensor_is_refused(model_path, tmp_path):
    policy = PolicyModel(model_path, device=CPU)
    policy.export(tmp_path / "v1")
    file = tmp_path / "v1" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"lacks the tensor 'model\.norm\.weight'"):
        PolicyModel(tmp_path / "v1", device=CPU)
