"""The same rollouts give the same gradients, whichever form they are trained in.

Random forests (branches, sub-agents, twins, prompts that rollouts and groups share) are assembled as a row
per turn, as merged rows, and run padded or as a tree, whole and split by memory; the naive loop over single
sequences is the judge.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from afield import trajectories
from afield.batches.rows import Row
from afield.trainers.losses import LossInputs, Objective, compute_loss
from afield.trainers.micro_batches import MicroBatch, split_micro_batches, token_logprobs
from afield.trainers.packing import pack, split
from afield.trainers.prefix_attention import PrefixAttention, plan_attention
from afield.trainers.tree_attention import Kernel, TokenTree, install_tree_attention
from afield.turn_tree import TurnTree
from afield.types import FinishReason, Sampling, Trajectory, Turn, TurnStatus, VersionSpan

VOCABULARY = 40
FORESTS = 50
CPU = torch.device("cpu")
SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCABULARY, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made(kind: str) -> PreTrainedModel:
    torch.manual_seed(7)
    if kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True))
    else:
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False))
    with torch.no_grad():  # so that log-probabilities differ
        for parameter in model.parameters():
            parameter.mul_(2.0 if parameter.ndim > 1 else 1.0)
    install_tree_attention(model)
    return model.eval()


# --- random rollouts -----------------------------------------------------------------------------


class Wild:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def ids(self, least: int, most: int) -> tuple[int, ...]:
        return tuple(self.random.randrange(VOCABULARY) for _ in range(self.random.randint(least, most)))

    def forest(self, name: str, prompts: list[tuple[int, ...]]) -> TurnTree:
        """Turns that go on from any turn before them, or start anew from one of the prompts."""
        forest = TurnTree()
        for number in range(self.random.randint(1, 9)):
            forest.add(self.turn(f"{name}.t{number}", forest, prompts))
        return forest

    def turn(self, name: str, forest: TurnTree, prompts: list[tuple[int, ...]]) -> Turn:
        parent = self.random.choice([None, *forest.turns, *forest.turns]) if forest.turns else None
        sampled = self.ids(1, 6)
        delta = self.ids(0, 5) if parent else self.random.choice(prompts) + self.ids(0, 2)
        if parent and self.random.random() < 0.2:  # a twin: another turn said the same
            delta, sampled = (1, 2), (3, 4, 5)
        return Turn(
            id=name,
            root=parent.root if parent else name,
            parent=parent.id if parent else None,
            delta_ids=delta,
            token_ids=sampled,
            logprobs=tuple(-self.random.uniform(0.5, 5.0) for _ in sampled),
            versions=(VersionSpan(0, len(sampled), 0, 0),),
            finish_reason=FinishReason.STOP,
            status=TurnStatus.COMMITTED,
            sampling=Sampling(temperature=self.random.choice((0.7, 1.0, 1.3))),
        )


def rollouts(seed: int) -> list[tuple[str, TurnTree, float]]:
    wild = Wild(seed)
    prompts = [wild.ids(3, 12) for _ in range(2)]
    names = [f"r{number}" for number in range(wild.random.randint(2, 5))]
    return [(name, wild.forest(name, prompts), wild.random.uniform(-2, 2)) for name in names]


Assembly = Callable[[TurnTree], trajectories.Assembled]


def rows_of(found: list[tuple[str, TurnTree, float]], form: Assembly) -> list[Row]:
    rows: list[Row] = []
    for name, forest, advantage in found:
        for trajectory in form(forest).trajectories:
            rows.append(
                Row(
                    rollout_id=name,
                    index=len(rows),
                    trajectory=trajectory,
                    advantages=(advantage,) * len(trajectory.turns),
                )
            )
    return rows


# --- gradients -----------------------------------------------------------------------------------

OBJECTIVE = Objective(clip=(0.2, 0.28), importance_cap=2.0)


def gradient(model: PreTrainedModel, passes: list[MicroBatch]) -> Tensor:
    """Of our loss: against the sampler, as if the step had begun with another policy than it ends with."""
    model.zero_grad()
    for batch in passes:
        logp = token_logprobs(model, batch)
        proximal = logp.detach() + 0.15 * torch.sin(batch.sampler)
        tokens = LossInputs(logp, proximal, batch.sampler, batch.advantage, batch.weight, batch.row)
        compute_loss(tokens, OBJECTIVE).total.backward()
    return flat(model)


def naive(model: PreTrainedModel, found: list[tuple[str, TurnTree, float]]) -> Tensor:
    """Call by call, as the engine saw them, each sequence alone, PPO written out."""
    model.zero_grad()
    for _, forest, advantage in found:
        total = sum(len(turn.token_ids) for turn in forest.turns)
        for turn in forest.turns:
            before = forest.ids(turn.id)[: -len(turn.token_ids)]
            ids = torch.tensor([[*before, *turn.token_ids]])
            logits = model(input_ids=ids, use_cache=False).logits[0, len(before) - 1 : -1]
            scored = torch.log_softmax(logits / turn.sampling.temperature, -1)
            logp = scored.gather(1, ids[0, len(before) :, None]).squeeze(1)
            sampler = torch.tensor(turn.logprobs)
            proximal = logp.detach() + 0.15 * torch.sin(sampler)
            ratio = torch.exp(logp - proximal)
            gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
            weight = torch.exp(proximal - sampler).clamp(max=2.0)
            (-(gain * weight).sum() / total).backward()
    return flat(model)


def flat(model: PreTrainedModel) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).clone()


def apart(a: Tensor, b: Tensor) -> float:
    return float((a.detach() - b.detach()).norm() / b.detach().norm())


@pytest.mark.parametrize("seed", range(FORESTS))
def test_rows_per_turn_merged_rows_and_the_tree_give_the_naive_gradient(
    seed: int, record_property: Callable[[str, object], None]
) -> None:
    model = made("qwen3" if seed % 2 else "llama")
    found = rollouts(seed)
    truth = naive(model, found)
    merged, single = rows_of(found, trajectories.linear), rows_of(found, trajectories.per_turn)
    forms = {
        "per turn, padded": split_micro_batches(single, 200, CPU, "padded"),
        "per turn, tree": split_micro_batches(single, 10_000, CPU, "tree"),
        "merged, padded": split_micro_batches(merged, 200, CPU, "padded"),
        "merged, tree": split_micro_batches(merged, 10_000, CPU, "tree"),
        "merged, tree split": split_micro_batches(merged, 40, CPU, "tree"),
    }
    off = {name: apart(gradient(model, passes), truth) for name, passes in forms.items()}
    record_property("relative_error", max(off.values()))
    assert max(off.values()) <= 1e-5, off


@pytest.mark.parametrize("kernel", ["per_sequence", "prefix"])
@pytest.mark.parametrize("again", [False, True])
def test_layers_computed_again_change_no_gradient(kernel: Kernel, again: bool) -> None:
    """With gradient checkpointing attention's results are kept, and its inputs come from the second pass."""
    for seed in range(3):
        found = rollouts(seed)
        model = made("llama")
        truth = naive(model, found)
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        passes = [
            over(batch, kernel)
            for batch in split_micro_batches(rows_of(found, trajectories.linear), 10_000, CPU)
        ]
        assert apart(gradient(model, passes), truth) <= 1e-5
        together = gradient_of_two(model, passes)
        assert apart(together, 2 * truth) <= 1e-5


def over(batch: MicroBatch, kernel: Kernel) -> MicroBatch:
    packed = pack([row.trajectory.token_ids for row in batch.rows])
    return batch._replace(layout=TokenTree(packed, CPU, kernel))


def gradient_of_two(model: PreTrainedModel, passes: list[MicroBatch]) -> Tensor:
    """Two forward passes over one tree before a backward pass over both."""
    model.zero_grad()
    for batch in passes:
        total: Any = 0.0
        for _ in range(2):
            logp = token_logprobs(model, batch)
            proximal = logp.detach() + 0.15 * torch.sin(batch.sampler)
            tokens = LossInputs(logp, proximal, batch.sampler, batch.advantage, batch.weight, batch.row)
            total = total + compute_loss(tokens, OBJECTIVE).total
        total.backward()
    return flat(model)


def test_a_model_that_does_not_attend_over_trees_is_refused_not_trained_wrongly() -> None:
    model = made("llama")
    model.set_attn_implementation("sdpa")
    batch = split_micro_batches(rows_of(rollouts(3), trajectories.linear), 10_000, CPU, "tree")[0]
    with pytest.raises(NotImplementedError, match="has no tree attention"):
        token_logprobs(model, batch)


# --- packing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_a_forest_has_every_common_beginning_once_and_tokens_see_only_their_ancestors(seed: int) -> None:
    wild = random.Random(seed)
    sequences = [
        [wild.randrange(3) for _ in range(wild.randrange(1, 12))] for _ in range(wild.randrange(1, 9))
    ]
    packed = pack(sequences)
    assert len(packed.ids) == len({tuple(s[: n + 1]) for s in sequences for n in range(len(s))})
    for sequence, path in zip(sequences, packed.paths, strict=True):
        assert [packed.ids[token] for token in path] == sequence
        for depth, token in enumerate(path):
            seen = [kv for kv in range(len(packed.ids)) if kv <= token < packed.end[kv]]
            assert seen == path[: depth + 1]


@pytest.mark.parametrize("bound", [1, 10, 25, 1000])
def test_no_part_of_a_split_forest_exceeds_the_bound_and_nothing_is_left_out(bound: int) -> None:
    wild = random.Random(bound)
    prompt = [wild.randrange(5) for _ in range(8)]
    sequences = [prompt + [wild.randrange(5) for _ in range(wild.randrange(1, 9))] for _ in range(12)]
    parts = split(sequences, bound)
    assert sorted(number for part in parts for number in part) == list(range(12))
    for part in parts:
        assert len(part) == 1 or len(pack([sequences[number] for number in part]).ids) <= bound


@pytest.mark.parametrize("seed", range(20))
def test_a_forest_is_split_into_the_fewest_parts_where_least_is_computed_twice(seed: int) -> None:
    """Against all ways to cut what stands in order."""
    wild = random.Random(seed)
    starts = [[wild.randrange(9) for _ in range(wild.randrange(12))] for _ in range(3)]
    sequences = [
        wild.choice(starts) + [wild.randrange(9) for _ in range(wild.randrange(9))] for _ in range(9)
    ]
    bound = wild.randrange(12, 60)

    def told(parts: list[list[int]]) -> tuple[int, int, int]:
        sizes = [len(pack([sequences[number] for number in part]).ids) for part in parts]
        fits = all(size <= bound or len(part) == 1 for size, part in zip(sizes, parts, strict=True))
        return len(parts) if fits else 99, sum(sizes), sum(size * size for size in sizes)

    order = sorted(range(9), key=sequences.__getitem__)
    ways = (
        [order[start:end] for start, end in itertools.pairwise((0, *cuts, 9))]
        for count in range(9)
        for cuts in itertools.combinations(range(1, 9), count)
    )
    assert told(split(sequences, bound)) == min(map(told, ways))


def test_a_forest_of_two_trees_is_cut_between_them() -> None:
    one, other = [[tree] * 8 + [tree, turn] * 3 for tree in (1, 2) for turn in (3, 4, 5)], [[9] * 40]
    assert split(one, 41) == [[0, 1, 2], [3, 4, 5]]
    assert split([*other, *one], 64) == [[1, 2, 3, 4, 5, 6], [0]]


@pytest.mark.parametrize("count", [128, 256, 384])
def test_the_mask_by_blocks_is_the_mask_by_tokens(count: int) -> None:
    """What FlexAttention is told of blocks, checked token by token."""
    wild = random.Random(count)
    prompt = [wild.randrange(9) for _ in range(70)]
    sequences = [prompt]
    while len(pack(sequences).ids) < count:
        start = wild.choice(sequences)
        room = count - len(pack(sequences).ids)
        fresh = [wild.randrange(9, 99) for _ in range(min(room, wild.randrange(20, 90)))]
        sequences.append(start[: wild.randrange(1, len(start) + 1)] + fresh)
    packed = pack(sequences)
    tree = TokenTree(packed, CPU, "flex")
    token = torch.arange(len(packed.ids))
    end = torch.tensor(packed.end)
    wanted = (token[None] <= token[:, None]) & (token[:, None] < end[None])
    tiles = wanted.view(count // 128, 128, count // 128, 128).transpose(1, 2).flatten(2)
    blocks = tree.blocks
    assert blocks.full_kv_num_blocks is not None and blocks.full_kv_indices is not None
    some, whole = (
        listed(numbers[0, 0], places[0, 0])
        for numbers, places in (
            (blocks.kv_num_blocks, blocks.kv_indices),
            (blocks.full_kv_num_blocks, blocks.full_kv_indices),
        )
    )
    assert torch.equal(whole, tiles.all(-1))
    assert torch.equal(some | whole, tiles.any(-1))
    assert not (some & whole).any()


def listed(numbers: Tensor, places: Tensor) -> Tensor:
    matrix = torch.zeros(places.shape, dtype=torch.bool)
    for row, (number, line) in enumerate(zip(numbers.tolist(), places.tolist(), strict=True)):
        matrix[row, line[:number]] = True
    return matrix


@pytest.mark.parametrize("seed", range(20))
def test_rectangles_put_together_are_attention_over_the_forest(seed: int) -> None:
    wild = random.Random(seed)
    prompts = [[wild.randrange(9) for _ in range(wild.randrange(2, 9))] for _ in range(3)]
    sequences = [
        wild.choice(prompts) + [wild.randrange(9) for _ in range(wild.randrange(1, 6))] for _ in range(9)
    ]
    packed = pack(sequences)
    plan = plan_attention(packed.segments, CPU, min_prefix=1)
    assert seed > 3 or plan.blocks
    generator = torch.Generator().manual_seed(seed)
    given = [
        torch.randn(1, heads, len(packed.ids), 8, generator=generator).requires_grad_() for heads in (4, 2, 2)
    ]
    token, end = torch.arange(len(packed.ids)), torch.tensor(packed.end)
    seen = (token[None] <= token[:, None]) & (token[:, None] < end[None])
    wanted = scaled_dot_product_attention(*given, seen, scale=0.3, enable_gqa=True).transpose(1, 2)
    found = PrefixAttention.apply(*given, plan, 0.3)
    push = torch.randn(wanted.shape, generator=generator)
    pairs = zip(
        (found, *torch.autograd.grad(found, given, push)),
        (wanted, *torch.autograd.grad(wanted, given, push)),
        strict=True,
    )
    assert max(apart(a, b) for a, b in pairs) < 1e-5


def test_trajectories_are_never_split_over_passes() -> None:
    rows = rows_of(rollouts(11), trajectories.linear)
    passes = split_micro_batches(rows, 5, CPU, "tree")
    told: list[Trajectory] = [row.trajectory for batch in passes for row in batch.rows]
    assert sorted(t.token_ids for t in told) == sorted(row.trajectory.token_ids for row in rows)
