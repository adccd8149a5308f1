"""Opens a `Tuner`, the tinker-style training loop, with the embedded engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from afield.factory.engines import engine

if TYPE_CHECKING:
    from afield.trainers.tinker import Tuner


def open_tuner(
    model_path: str | Path,
    *,
    lr: float,
    slots: int = 64,
    seed: int = 0,
    engine_dtype: str = "auto",
    **settings: Any,
) -> Tuner:
    """A started `Tuner` with the embedded engine and `slots` concurrent calls; `settings` are the Tuner's.

    Engine and trainer agree to 1e-4 where `engine_dtype` is float32, the default on a CPU.
    """
    from afield.trainers.tinker import Tuner

    torch_engine = engine("torch", Path(model_path), slots=slots, seed=seed, record=None, dtype=engine_dtype)
    return Tuner(model_path, engine=torch_engine, lr=lr, seed=seed, **settings).start()
