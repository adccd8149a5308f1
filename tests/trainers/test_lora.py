import json
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from afield.engines.torch.engine import TorchEngine
from afield.errors import UsageError
from afield.models.rounding import Rounding
from afield.settings.trainer import LoraOptions
from afield.trainers.grpo import GRPO
from afield.trainers.model import PolicyModel
from afield.types import Group, Outcome, Policy, Rollout, RolloutResult, Sampling, Split, Task
from support.gateways import POLICY, Running, running
from support.tiny_model import build_tiny_model

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])
RANK_4 = LoraOptions(rank=4, alpha=8)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("lora") / "model", hidden=32, tied=True)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def loaded(path: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()


def trained(path: Path, steps: int = 3, **how) -> PolicyModel:
    policy = PolicyModel(path, device=CPU, lora=how.pop("lora", RANK_4), **how)
    train(policy, steps)
    return policy


def train(policy: PolicyModel, steps: int) -> None:
    optimizer = torch.optim.SGD(policy.trainable, lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        with policy.autocast():
            loss = -policy.model(IDS).logits.float().log_softmax(-1)[0, :-1, :].max(-1).values.sum()
        loss.backward()
        optimizer.step()


def test_fresh_adapters_change_nothing_and_trained_ones_do(model_path):
    plain = logits(loaded(model_path))
    policy = PolicyModel(model_path, device=CPU, lora=RANK_4)
    assert torch.equal(logits(policy.model), plain)
    train(policy, 3)
    assert float((logits(policy.model) - plain).abs().max()) > 1e-2


def test_only_adapters_train(model_path):
    policy = trained(model_path)
    names = [name for name, p in policy.model.named_parameters() if p.requires_grad]
    assert names
    assert all("lora_" in name for name in names)
    assert sum(p.numel() for p in policy.trainable) == sum(t.numel() for t in policy.state().values())
    assert len(policy.state()) == 2 * 2 * 7  # A and B, two layers, seven linear ones in each
    assert all(p.dtype == torch.float32 for p in policy.trainable)


def test_the_reference_is_the_same_model_without_its_adapters(model_path):
    policy = trained(model_path)
    moved = logits(policy.model)
    with policy.reference() as start:
        assert start is policy.model
        assert torch.equal(logits(start), logits(loaded(model_path)))
    assert torch.equal(logits(policy.model), moved)
    assert policy.trainable
    with pytest.raises(RuntimeError, match="inside"), policy.reference():
        raise RuntimeError("inside")
    assert torch.equal(logits(policy.model), moved)


def test_engines_get_the_whole_model_with_adapters_merged(model_path, tmp_path):
    policy = trained(model_path)
    before = {name: tensor.clone() for name, tensor in policy.state().items()}
    policy.export(tmp_path / "v1")
    exported = loaded(tmp_path / "v1")
    assert float((logits(exported) - logits(policy.model)).abs().max()) < 1e-5
    assert load_file(tmp_path / "v1" / "model.safetensors").keys() == exported.state_dict().keys()
    assert json.loads((tmp_path / "v1" / "config.json").read_text())["tie_word_embeddings"] is False
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.state().items())


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "down_proj")])
def test_exported_adapter_is_read_by_peft(model_path, tmp_path, targets):
    policy = trained(model_path, lora=LoraOptions(rank=2, alpha=6, targets=targets))
    policy.export_adapter(tmp_path / "adapter")
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "weight_probe.json",
    ]
    read = peft.PeftModel.from_pretrained(loaded(model_path), str(tmp_path / "adapter"))
    assert torch.equal(logits(read), logits(policy.model))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (2, 6, 0.0)
    if targets != ("all-linear",):
        assert sorted(config["target_modules"]) == sorted(targets)


def test_adapters_are_put_back_bit_for_bit(model_path):
    first = trained(model_path)
    second = PolicyModel(model_path, device=CPU, lora=RANK_4)
    second.load_state({name: tensor.clone() for name, tensor in first.state().items()})
    assert torch.equal(logits(first.model), logits(second.model))
    train(first, 2)
    train(second, 2)
    assert torch.equal(logits(first.model), logits(second.model))


def test_two_policies_start_with_the_same_adapters_and_leave_the_random_state_alone(model_path):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    one, other = (PolicyModel(model_path, device=CPU, lora=RANK_4).state() for _ in range(2))
    assert torch.equal(torch.rand(2), expected)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_in_bfloat16_only_what_trains_is_float32(model_path, tmp_path):
    policy = trained(model_path, dtype="bfloat16", steps=8)
    kinds = {(p.requires_grad, p.dtype) for p in policy.model.parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    with policy.autocast():
        ours = logits(policy.model).float()
    policy.export(tmp_path / "v0")
    merged = load_file(tmp_path / "v0" / "model.safetensors")
    # What adapters add is not rounded away: that is for a publication to do, and not to nearest.
    assert {t.dtype for n, t in merged.items() if "_proj" in n} == {torch.float32}
    policy.export(tmp_path / "v1", Rounding(dtype="bfloat16", version=1))
    assert {t.dtype for t in load_file(tmp_path / "v1" / "model.safetensors").values()} == {torch.bfloat16}
    assert float((logits(loaded(tmp_path / "v1")) - ours).abs().mean()) < 0.1


def test_layers_that_are_not_there_are_named(model_path):
    with pytest.raises(UsageError, match=r"\['nowhere'\] cannot be made"):
        PolicyModel(model_path, device=CPU, lora=LoraOptions(rank=4, targets=("nowhere",)))
    with pytest.raises(UsageError, match=r"'model\.embed_tokens' is not a linear one"):
        PolicyModel(model_path, device=CPU, lora=LoraOptions(rank=4, targets=("embed_tokens",)))


def test_a_checkpoint_of_other_adapters_is_refused(model_path):
    saved = trained(model_path).state()
    with pytest.raises(UsageError, match=r"has \[4, 32\] for .*lora_A.* the model \[2, 32\]"):
        PolicyModel(model_path, device=CPU, lora=LoraOptions(rank=2)).load_state(saved)
    with pytest.raises(UsageError, match="differ in the tensor"):
        PolicyModel(model_path, device=CPU).load_state(saved)


def test_without_adapters_there_are_none_to_export(model_path, tmp_path):
    policy = PolicyModel(model_path, device=CPU, lora=LoraOptions(rank=0))
    with pytest.raises(UsageError, match="set a LoRA rank"):
        policy.export_adapter(tmp_path / "adapter")


@pytest.mark.anyio
async def test_tokens_sampled_after_adapters_are_published_come_from_the_adapters(tmp_path: Path) -> None:
    """The trainer scores what the engine samples as the engine did, before and after a published step."""
    trainer = GRPO(POLICY, lr=0.01, device="cpu", lora=LoraOptions(rank=4, alpha=64, publish="adapter"))
    async with running(TorchEngine(POLICY, max_slots=4, device="cpu"), tmp_path / "store") as up:
        before = trainer.step([await sample_group(up, "g0")])
        assert before.metrics["grad_norm"] > 0
        trainer.publish(tmp_path / "v1", version=1, dtype="float32")
        adapters = load_file(tmp_path / "v1" / "adapter_model.safetensors")
        assert any(tensor.abs().max() > 0 for name, tensor in adapters.items() if "lora_B" in name)
        await up.client.publish(Policy("m", 1), str(tmp_path / "v1"))
        group = await sample_group(up, "g1")
    assert {span.low for turn in group.finished[0].turns for span in turn.versions} == {1}
    for report in (before, trainer.step([group])):
        assert report.tokens
        assert report.metrics["sampler_trainer_logprob_diff_max"] < 1e-3


async def sample_group(up: Running, name: str) -> Group:
    """Four rollouts of one call each; every second is rewarded."""
    finished = []
    for n in range(4):
        rollout = Rollout(id=f"{name}-{n}", exp_id="exp", group_id=name, task=Task("task", {}))
        client = await up.agent(f"{rollout.id}.1", sampling=Sampling(max_tokens=16))
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hello"}])
        record = await up.client.finalize(f"{rollout.id}.1")
        finished.append(
            RolloutResult(
                rollout=rollout,
                outcome=Outcome(rollout_id=rollout.id, attempt=1, reward=float(n % 2)),
                trajectories=record.trajectories,
                turns=record.turns,
            )
        )
    return Group(id=name, task_id="task", epoch=0, split=Split.TRAIN, finished=tuple(finished))
