"""Published weights are rounded stochastically: unbiased, the same bits everywhere, and nothing lost."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afield.errors import UsageError
from afield.models.rounding import (
    FILE,
    PublishedUpdate,
    Rounding,
    measure_update,
    random_bits,
    read_rounding,
    rounded,
    stream_key,
    write_rounding,
)

CPU = torch.device("cpu")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def neighbours(value: float, dtype: torch.dtype) -> tuple[float, float]:
    """The largest value of the dtype that is not above, and the smallest that is not below."""
    near = torch.tensor(value, dtype=torch.float32).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    held = near.to(dtype)
    below = above = held
    if float(held) > float(near):
        below = _next(held, down=True)
    elif float(held) < float(near):
        above = _next(held, down=False)
    return float(below), float(above)


def _next(held: torch.Tensor, *, down: bool) -> torch.Tensor:
    return torch.nextafter(held, torch.tensor(-math.inf if down else math.inf, dtype=held.dtype))


def of(value: float, name: str, count: int = 1, version: int = 1) -> torch.Tensor:
    return rounded(torch.full((count,), value), "w", Rounding(dtype=name, version=version))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", DTYPES)
@given(value=FINITE, version=st.integers(0, 1000))
@settings(max_examples=300, deadline=None)
def test_every_finite_value_becomes_one_of_its_two_neighbours(name: str, value: float, version: int) -> None:
    got = of(value, name, version=version)
    assert got.dtype == DTYPES[name]
    assert float(got) in neighbours(value, DTYPES[name])


@pytest.mark.parametrize("name", DTYPES)
def test_values_that_the_dtype_holds_stay_bit_for_bit(name: str) -> None:
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    held = patterns.view(DTYPES[name])
    got = rounded(held.float(), "w", Rounding(dtype=name))  # type: ignore[arg-type]
    number = ~held.isnan()
    assert torch.equal(got.view(torch.int16)[number], patterns[number])
    assert got[~number].isnan().all()


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize(
    "value", [0.1, -0.1, 3.14159, -1234.567, 1e-3, -7.7e-6, 3e-8, 2.0**-14 * 1.0001, 6e4]
)
def test_rounding_is_unbiased(name: str, value: float) -> None:
    count = 200_000
    got = of(value, name, count).double()
    low, high = neighbours(value, DTYPES[name])
    exact = float(torch.tensor(value))
    # Of so many draws between two values the mean is within five standard errors.
    share = (exact - low) / (high - low) if high > low else 0.0
    error = 5 * (high - low) * math.sqrt(share * (1 - share) / count) + 1e-12 * abs(exact)
    assert abs(float(got.mean()) - exact) <= error + 2**-22 * (high - low)


def test_a_small_update_arrives_although_nearest_rounding_drops_it() -> None:
    generator = torch.Generator().manual_seed(0)
    start = (0.05 * torch.randn(1_000_000, generator=generator)).bfloat16().float()
    master = start + 1e-6 * torch.randn(1_000_000, generator=generator).sign()
    sent = rounded(master, "w", Rounding(dtype="bfloat16", version=1))
    near = rounded(master, "w", Rounding(dtype="bfloat16", version=1, nearest=True))
    assert measure_update(master, sent, start).kept == pytest.approx(1.0, abs=0.05)
    assert (measure_update(master, near, start).kept or 0.0) < 0.1


def test_overflow_infinity_and_nan_are_distinguished() -> None:
    values = torch.tensor([3.4e38, -3.4e38, math.inf, -math.inf, math.nan, 65519.0, 0.0, -0.0, 1e-45])
    for name, dtype in DTYPES.items():
        got = rounded(values, "w", Rounding(dtype=name))  # type: ignore[arg-type]
        largest = torch.finfo(dtype).max
        assert got[:2].tolist() == [largest, -largest]
        assert got[2:4].tolist() == [math.inf, -math.inf]
        assert got[4].isnan()
        assert got[5:8].isfinite().all()
        assert math.copysign(1, float(got[7])) == -1
        assert float(got[8]) in neighbours(1e-45, dtype)


def test_random_bits_are_splitmix64_of_the_index() -> None:
    """An independent version in plain integers."""

    def expected(key: int, index: int) -> int:
        mask = (1 << 64) - 1
        x = (key + (index + 1) * 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return (x ^ (x >> 31)) >> 48

    for key in (0, 1, stream_key(3, 4, "model.layers.0.mlp.up_proj.weight"), (1 << 64) - 1):
        for first in (0, 5, (1 << 33) + 7):
            got = random_bits(key, first, 37, 16, CPU).tolist()
            assert got == [expected(key, first + n) for n in range(37)]


def test_shards_of_a_tensor_get_the_bits_of_the_whole() -> None:
    tensor = torch.randn(101, 13, generator=torch.Generator().manual_seed(1))
    how = Rounding(dtype="bfloat16", seed=9, version=3)
    whole = rounded(tensor, "layer.weight", how)
    for rows in (1, 7, 50, 101):
        parts = [
            rounded(tensor[low : low + rows], "layer.weight", how, first=low * 13)
            for low in range(0, 101, rows)
        ]
        assert torch.equal(torch.cat(parts), whole)


def test_large_tensors_are_rounded_in_chunks_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    how = Rounding(dtype="bfloat16")
    whole = rounded(tensor, "w", how)
    halves = [rounded(tensor[:300], "w", how), rounded(tensor[300:], "w", how, first=300)]
    assert torch.equal(torch.cat(halves), whole)


def test_seed_version_and_name_each_change_the_bits_and_nothing_else_does() -> None:
    tensor = torch.randn(4096, generator=torch.Generator().manual_seed(3))
    how = Rounding(dtype="bfloat16", seed=1, version=1)
    again = rounded(tensor.clone(), "w", how)
    assert torch.equal(rounded(tensor, "w", how), again)
    others = [
        rounded(tensor, "w", Rounding(dtype="bfloat16", seed=2, version=1)),
        rounded(tensor, "w", Rounding(dtype="bfloat16", seed=1, version=2)),
        rounded(tensor, "v", how),
    ]
    assert all(not torch.equal(again, other) for other in others)


def test_what_has_not_moved_is_rounded_as_a_loader_rounds_the_checkpoint() -> None:
    start = torch.randn(4096, generator=torch.Generator().manual_seed(4))  # not on bfloat16's grid
    master = start.clone()
    master[::2] += 1e-3
    got = rounded(master, "w", Rounding(dtype="bfloat16"), start=start)
    assert torch.equal(got[1::2], start[1::2].bfloat16())
    assert not torch.equal(got[::2], master[::2].bfloat16())


def test_float32_rounds_nothing_and_integers_pass() -> None:
    tensor = torch.randn(8)
    assert torch.equal(rounded(tensor, "w", Rounding(dtype="float32")), tensor)
    counts = torch.arange(4)
    assert rounded(counts, "n", Rounding(dtype="bfloat16")) is counts


def test_sums_of_what_arrived_add_up_over_shards() -> None:
    generator = torch.Generator().manual_seed(5)
    start, step = torch.randn(1000, generator=generator), torch.randn(1000, generator=generator)
    master = start + 0.1 * step
    sent = master.bfloat16()
    whole = measure_update(master, sent, start)
    parts = PublishedUpdate()
    for low in range(0, 1000, 300):
        cut = slice(low, low + 300)
        parts = parts.plus(measure_update(master[cut], sent[cut], start[cut]))
    assert parts.metrics() == pytest.approx(whole.metrics())
    assert "update_kept" not in measure_update(start, start, start).metrics()


def test_a_directory_says_how_it_was_rounded(tmp_path: Path) -> None:
    assert read_rounding(tmp_path) is None
    how = Rounding(dtype="bfloat16", seed=5, version=6)
    write_rounding(tmp_path, how)
    assert read_rounding(tmp_path) == how
    (tmp_path / FILE).write_text("{")
    with pytest.raises(UsageError, match="publish the weights again"):
        read_rounding(tmp_path)
