"""Steps of fixed shapes: the same tokens and log-probabilities as plain steps, whatever joins or leaves.

Here they are computed, not recorded: recording needs CUDA, where bench/engine/throughput.py checks the same.
"""

from __future__ import annotations

import ast
import random
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from afield.engines.torch.cuda_graphs import CudaGraphRunner, StepShape, length_bucket, rows_bucket
from afield.engines.torch.decode_kernels import PLAIN, DecodeKernels, fit, swap_layers
from afield.engines.torch.decoder import DecodeCall, DecodeParams, Decoder, SampledTokens
from afield.engines.torch.kv_cache import KVCache, folded_attention, use_slots
from afield.engines.torch.sampler import draw, pick
from afield.engines.torch.weights import parameters
from support.paths import ROOT
from support.tiny_model import build_tiny_model, reseed

SOURCE = ROOT / "src"
TOLERANCE = 1e-4
CONTEXT = 320
in_every_way = pytest.mark.parametrize("ways", [None, PLAIN], ids=["by_mask", "by_lane"])


@pytest.fixture(scope="module", autouse=True)
def on_one_thread_without_gradients() -> Iterator[None]:
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model") / "v0")


@pytest.fixture(scope="module")
def other_directory(directory: Path) -> Path:
    return reseed(directory, directory.with_name("v1"), seed=1)


class Collected:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.pieces: list[SampledTokens] = []

    def put(self, sampled: SampledTokens) -> None:
        self.pieces.append(sampled)

    def fail(self, reason: str) -> None:
        raise AssertionError(reason)

    def refuse(self, reason: str) -> None:
        raise AssertionError(reason)

    @property
    def token_ids(self) -> list[int]:
        return [token for piece in self.pieces for token in piece.token_ids]

    @property
    def logprobs(self) -> list[float]:
        return [logprob for piece in self.pieces for logprob in piece.logprobs]

    @property
    def versions(self) -> list[int]:
        return [piece.version for piece in self.pieces for _ in piece.token_ids]


def load(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@cache
def plain_model(directory: Path) -> Any:
    return load(directory)


def a_decoder(
    directory: Path, *, fixed: bool = True, max_slots: int = 32, ways: DecodeKernels | None = None
) -> Decoder:
    model = load(directory)
    fitted = fit(model, 12, light=ways is not None, ways=ways)
    assert fitted.ways is ways
    layers = model.config.num_hidden_layers
    slots = KVCache(layers, max_slots, CONTEXT, torch.float32, model.device, ways)
    return Decoder(
        model,
        slots,
        version=0,
        max_context=CONTEXT,
        prefill_tokens=200,
        weights=[parameter.tensor for parameter in parameters(model)],
        steps=CudaGraphRunner(model, slots, max_slots) if fixed else None,
    )


def add(decoder: Decoder, ask: DecodeParams) -> tuple[DecodeCall, Collected]:
    sink = Collected()
    request = DecodeCall(ask, sink)
    decoder.add(request)
    return request, sink


def drain(decoder: Decoder) -> None:
    for _ in range(5000):
        if decoder.idle:
            return
        decoder.step()
    raise AssertionError("the decoder never came to rest")


def a_prompt(seed: int, length: int) -> list[int]:
    return torch.randint(3, 400, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {},
    {"temperature": 1.3},
    {"temperature": 0.0},
    {"top_p": 0.9},
    {"temperature": 1.3, "top_k": 5},
]


def asks(count: int, kinds: int, longest: int = 60) -> list[DecodeParams]:
    """Ragged prompts, of which neighbours share the beginning, and answers that end in many ways."""
    return [
        DecodeParams(
            a_prompt(n // 4, 20) + a_prompt(n, 1 + 5 * (n % 9)),
            max_tokens=1 + (7 * n) % longest,
            seed=n,
            stop_ids=(n % 7, 50, 51, 52),
            stream=n % 3 == 0,
            **SAMPLINGS[n % kinds],
        )
        for n in range(count)
    ]


def served(decoder: Decoder, wanted: list[DecodeParams], *, per_step: int) -> list[Collected]:
    """Calls join a few at a time."""
    sinks: list[Collected] = []
    for n, ask in enumerate(wanted):
        sinks.append(add(decoder, ask)[1])
        if n % per_step == 0:
            decoder.step()
    drain(decoder)
    return sinks


def off(directories: dict[int, Path], ask: DecodeParams, sink: Collected) -> float:
    """Reported log-probabilities against a plain forward over the whole sequence, version by version."""
    sequence = torch.tensor([[*ask.prompt_ids, *sink.token_ids]])
    worst = 0.0
    for version in set(sink.versions):
        logits = plain_model(directories[version])(sequence).logits[0, len(ask.prompt_ids) - 1 : -1].double()
        scores = torch.log_softmax(logits / (ask.temperature or 1.0), dim=-1)
        for n, token in enumerate(sink.token_ids):
            if sink.versions[n] == version:
                worst = max(worst, abs(scores[n, token].item() - sink.logprobs[n]))
    return worst


@pytest.mark.parametrize("kinds", [4, 6])
@in_every_way
def test_fixed_steps_draw_what_plain_steps_draw(
    directory: Path, kinds: int, ways: DecodeKernels | None
) -> None:
    wanted = asks(40, kinds)
    plain = served(a_decoder(directory, fixed=False), wanted, per_step=3)
    fixed = served(a_decoder(directory, ways=ways), wanted, per_step=3)
    same = [(a, b) for a, b in zip(fixed, plain, strict=True) if a.token_ids == b.token_ids]
    # Sums in another order can turn a draw that falls on the border between two tokens.
    assert len(same) >= (40 if ways is None else 38)
    for a, b in same:
        assert torch.allclose(torch.tensor(a.logprobs), torch.tensor(b.logprobs), atol=TOLERANCE)
        assert [piece.finish for piece in a.pieces][-1] == b.pieces[-1].finish
        assert all(piece.finish is None for piece in a.pieces[:-1])


@in_every_way
def test_fixed_steps_report_the_log_probabilities_of_a_plain_forward(
    directory: Path, ways: DecodeKernels | None
) -> None:
    wanted = asks(24, 4)
    for ask, sink in zip(wanted, served(a_decoder(directory, ways=ways), wanted, per_step=2), strict=True):
        assert off({0: directory}, ask, sink) < TOLERANCE


@in_every_way
def test_second_turn_reuses_the_cache_that_fixed_decode_steps_wrote(
    directory: Path, ways: DecodeKernels | None
) -> None:
    decoder = a_decoder(directory, ways=ways)
    first = DecodeParams(a_prompt(0, 50), max_tokens=24, seed=1)
    _, said = add(decoder, first)
    drain(decoder)
    again = DecodeParams([*first.prompt_ids, *said.token_ids, *a_prompt(1, 9)], max_tokens=5, seed=2)
    _, more = add(decoder, again)
    drain(decoder)
    assert decoder.counters.reused_tokens == 50 + 24 - 1
    assert off({0: directory}, again, more) < TOLERANCE


@in_every_way
def test_a_prefix_that_ends_with_a_stop_token_is_reused_exactly(
    directory: Path, ways: DecodeKernels | None
) -> None:
    """The step after a stop token was launched before anybody saw it; what that wrote has to be right."""
    decoder = a_decoder(directory, ways=ways)
    every_token = tuple(range(0, 400, 3))
    firsts = [DecodeParams(a_prompt(n, 20), max_tokens=40, seed=n, stop_ids=every_token) for n in range(8)]
    said = [add(decoder, ask)[1] for ask in firsts]
    drain(decoder)
    assert all(sink.pieces[-1].finish == "stop" for sink in said)
    seconds = [
        DecodeParams([*ask.prompt_ids, *sink.token_ids, 9, 9], max_tokens=6, seed=1)
        for ask, sink in zip(firsts, said, strict=True)
    ]
    more = [add(decoder, ask)[1] for ask in seconds]
    drain(decoder)
    for ask, sink in zip(seconds, more, strict=True):
        assert off({0: directory}, ask, sink) < TOLERANCE


@in_every_way
def test_a_call_that_leaves_harms_neither_the_others_nor_who_takes_its_slot(
    directory: Path, ways: DecodeKernels | None
) -> None:
    decoder = a_decoder(directory, max_slots=8, ways=ways)
    staying = [DecodeParams(a_prompt(n, 10 + n), max_tokens=80, seed=n) for n in range(6)]
    sinks = [add(decoder, ask)[1] for ask in staying]
    for n in range(20):
        leaving, _ = add(decoder, DecodeParams(a_prompt(n % 6, 10), max_tokens=50, seed=99))
        decoder.step()
        decoder.step()
        decoder.drop(leaving)
    late = DecodeParams(a_prompt(3, 40), max_tokens=30, seed=7)
    staying, sinks = [*staying, late], [*sinks, add(decoder, late)[1]]
    drain(decoder)
    for ask, sink in zip(staying, sinks, strict=True):
        assert len(sink.token_ids) == ask.max_tokens
        assert off({0: directory}, ask, sink) < TOLERANCE


@in_every_way
def test_the_memory_grows_under_a_step_in_flight(directory: Path, ways: DecodeKernels | None) -> None:
    decoder = a_decoder(directory, ways=ways)
    wanted = [DecodeParams(a_prompt(n, 100), max_tokens=150, seed=n) for n in range(2)]
    sinks = [add(decoder, ask)[1] for ask in wanted]
    for _ in range(10):
        decoder.step()
    lengths = {2: CONTEXT, 3: CONTEXT}
    wanted += [DecodeParams(a_prompt(n, 9), max_tokens=lengths.get(n, 20), seed=n) for n in range(2, 20)]
    sinks += [add(decoder, ask)[1] for ask in wanted[2:]]
    drain(decoder)
    for ask, sink in zip(wanted[:4], sinks[:4], strict=True):
        assert len(ask.prompt_ids) + len(sink.token_ids) == min(CONTEXT, len(ask.prompt_ids) + ask.max_tokens)
        assert off({0: directory}, ask, sink) < TOLERANCE


@in_every_way
def test_tokens_in_flight_at_a_swap_are_the_old_version_s(
    directory: Path, other_directory: Path, ways: DecodeKernels | None
) -> None:
    decoder = a_decoder(directory, ways=ways)
    wanted = [DecodeParams(a_prompt(n, 10 + n), max_tokens=40, seed=n) for n in range(9)]
    sinks = [add(decoder, ask)[1] for ask in wanted]
    for _ in range(15):
        decoder.step()
    decoder.swap(5, [parameter.tensor for parameter in parameters(load(other_directory))])
    drain(decoder)
    for ask, sink in zip(wanted, sinks, strict=True):
        assert set(sink.versions) == {0, 5}
        assert sink.versions == sorted(sink.versions)
        assert len(sink.token_ids) == 40
        assert off({0: directory, 5: other_directory}, ask, sink) < TOLERANCE


def test_far_apart_slots_run_together_in_a_small_step(directory: Path) -> None:
    decoder = a_decoder(directory)
    wanted = [DecodeParams(a_prompt(n, 12), max_tokens=40 if n in (3, 30) else 4, seed=n) for n in range(32)]
    sinks = [add(decoder, ask)[1] for ask in wanted]
    drain(decoder)
    assert decoder.steps is not None
    assert {shape.rows for shape in decoder.steps.launched if shape.gathered} <= {1, 2}
    assert any(shape.gathered for shape in decoder.steps.launched)
    for n in (3, 30):
        assert len(sinks[n].token_ids) == 40
        assert off({0: directory}, wanted[n], sinks[n]) < TOLERANCE


def test_by_lane_no_shape_depends_on_lengths_or_on_which_slots_are_idle(directory: Path) -> None:
    decoder = a_decoder(directory, ways=PLAIN)
    wanted = [DecodeParams(a_prompt(n, 12), max_tokens=100 if n % 4 == 3 else 4, seed=n) for n in range(32)]
    sinks = [add(decoder, ask)[1] for ask in wanted]
    drain(decoder)
    assert decoder.steps is not None
    lengths = {shape.length for shape in decoder.steps.launched}
    assert len(lengths) <= 2  # before and after the memory grew
    assert decoder.steps.launched[StepShape(8, max(lengths), False)] > 50
    for n in (3, 31):
        assert len(sinks[n].token_ids) == 100
        assert off({0: directory}, wanted[n], sinks[n]) < TOLERANCE


@pytest.mark.parametrize("width", [1, 7])
def test_folding_grouped_queries_changes_nothing(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    query = torch.randn(3, 6, width, 8, generator=generator)
    key, value = torch.randn(2, 3, 2, 32, 8, generator=generator)
    hidden = torch.rand(3, 1, width, 32, generator=generator) < 0.5
    mask = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)
    plain = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True)
    assert torch.allclose(folded_attention(query, key, value, mask, 0.3), plain, atol=1e-6)


@pytest.mark.parametrize("vocabulary", [5, 128, 400, 1000])
def test_picking_by_blocks_is_drawing(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 4 * torch.randn(200, vocabulary, generator=generator)
    uniforms = torch.rand(200, dtype=torch.float64, generator=generator)
    temperatures = [(0.0, 0.5, 1.0, 1.7)[n % 4] for n in range(200)]
    wanted = [DecodeParams((), 1, 0, temperature=t) for t in temperatures]
    tokens, logprobs = pick(logits, torch.tensor(temperatures, dtype=torch.float64), uniforms)
    drawn, scored = draw(logits, wanted, uniforms.tolist())
    assert tokens.tolist() == drawn
    assert torch.allclose(logprobs, torch.tensor(scored), atol=1e-6)


@pytest.mark.parametrize("uniform", [0.0, 0.25, 0.5, 1 - 2**-53])
def test_a_token_without_probability_is_never_picked(uniform: float) -> None:
    logits = torch.full((3, 300), -torch.inf)
    logits[0, [7, 290]] = 1.0
    logits[1, 299] = 0.0
    logits[2, 127:129] = 2.0
    ones = torch.ones(3, dtype=torch.float64)
    tokens, logprobs = pick(logits, ones, uniform * ones)
    assert torch.isfinite(logprobs).all()
    assert tokens[1] == 299


class _HostSeen(TorchDispatchMode):
    """Every operation that touched a tensor of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        if any(tensor.device.type == "cpu" for tensor in tensors):
            self.operations.append(str(func))
        return result


def test_prompts_that_arrive_one_by_one_are_computed_together(directory: Path) -> None:
    """During the pause after a prompt, others wait while calls decode, unless they fill a step."""
    decoder = a_decoder(directory, ways=PLAIN)
    decoder._prefill_pause = 1e9  # pyright: ignore[reportPrivateUsage]
    first, _ = add(decoder, DecodeParams(a_prompt(0, 20), max_tokens=40, seed=0))
    while not first.tokens:
        decoder.step()
    small, _ = add(decoder, DecodeParams(a_prompt(1, 20), max_tokens=4, seed=1))
    for _ in range(5):
        decoder.step()
    assert len(first.tokens) >= 5
    assert not small.tokens
    large, _ = add(decoder, DecodeParams(a_prompt(2, 190), max_tokens=4, seed=2))  # with `small` above 200
    decoder.step()
    assert small.tokens
    assert not large.tokens
    drain(decoder)  # without calls that decode, nothing waits
    assert all(call.ended for call in (first, small, large))


def test_the_longest_common_prefix_is_that_of_a_plain_comparison(directory: Path) -> None:
    slots = KVCache(1, 32, 4096, torch.float32, torch.device("cpu"))
    shared = a_prompt(0, 1000)
    wild = random.Random(0)
    prompts = [[*shared[: wild.choice((0, 1, 63, 64, 65, 200, 999))], *a_prompt(n, 150)] for n in range(24)]
    for prompt in prompts:
        slot, _ = slots.take(prompt) or (0, 0)
        slots.advance([slot], [wild.randint(0, len(prompt)) - slots.computed(slot)])
    for length in (1, 5, 64, 65, 127, 128, 129, 700, 1000):
        ids = np.asarray(shared[:length])
        common = slots._common(ids)  # pyright: ignore[reportPrivateUsage]
        for row in range(len(prompts)):
            equal = slots._ids[row, :length] == ids  # pyright: ignore[reportPrivateUsage]
            whole = length if equal.all() else int(equal.argmin())
            most = slots.computed(row)
            assert min(int(common[row]), most) == min(whole, most)


@pytest.mark.parametrize(("gathered", "ways"), [(False, None), (True, None), (False, PLAIN)])
def test_a_step_neither_reads_from_nor_writes_to_the_host(
    directory: Path, gathered: bool, ways: DecodeKernels | None
) -> None:
    """On the meta device there are no numbers: to look at one raises, as it would spoil a recording."""
    model = load(directory).to("meta")
    use_slots(model)
    if ways is not None:
        swap_layers(model, ways)
    slots = KVCache(model.config.num_hidden_layers, 8, CONTEXT, torch.float32, model.device, ways)
    assert slots.take([1, 2, 3]) == (0, 0)
    steps = CudaGraphRunner(model, slots, 8)
    steps.replay(StepShape(8, 64, gathered))
    with _HostSeen() as seen:
        steps.replay(StepShape(8, 64, gathered))
    assert seen.operations == []


def test_shapes_are_few_and_never_too_small() -> None:
    assert sorted({rows_bucket(n) for n in range(1, 65)}) == [1, 2, 4, 8, 12, 16, 24, 32, 48, 64]
    for n in range(1, 5000):
        assert rows_bucket(n) >= n
        assert n <= length_bucket(n) <= max(64, n + max(63, n // 4))
    assert len({length_bucket(n) for n in range(1, 32769)}) < 40


def test_decoding_imports_only_numpy_torch_and_transformers() -> None:
    """Read from the sources, since importing torch in a new process takes seconds."""
    waiting = [
        f"afield.engines.torch.{name}"
        for name in ("cuda_graphs", "decode_kernels", "decoder", "kv_cache", "sampler")
    ]
    seen: set[str] = set()
    while waiting:
        if (name := waiting.pop()) not in seen:
            seen.add(name)
            waiting += imported(name)
    packages = {name.partition(".")[0] for name in seen} - sys.stdlib_module_names
    assert packages == {"afield", "numpy", "torch", "transformers"}
    own = {name for name in seen if name.startswith("afield.") and ".engines" not in name}
    assert own == {"afield.models", "afield.models.bitmasks", "afield.models.precision"}


def imported(name: str) -> set[str]:
    """Modules that a module of afield imports when it is loaded, with its parent packages."""
    path = SOURCE / name.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not path.is_file():
        return set()
    modules = {name.rpartition(".")[0]} - {""}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            modules |= {node.module, *(m for m in inner if is_module(m))}
    return modules


def is_module(name: str) -> bool:
    path = SOURCE / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()
