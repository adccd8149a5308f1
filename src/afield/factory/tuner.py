"""Opens a `Tuner`, the tinker-style training loop, with the embedded engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from afield.trainers.tinker import Tuner


def open_tuner(
    model_path: str | Path,
    *,
    lr: float,
    slots: int = 0,
    seed: int = 0,
    engine_dtype: str = "auto",
    **settings: Any,
) -> Tuner:
    """A started `Tuner` with the embedded engine and `slots` concurrent calls (0 chooses); `settings` are the
    Tuner's.

    Engine and trainer agree to 1e-4 where `engine_dtype` is float32, the default on a CPU.
    """
    from afield.engines.torch.engine import TorchEngine
    from afield.trainers.tinker import Tuner

    dtype = None if engine_dtype == "auto" else engine_dtype
    torch_engine = TorchEngine(model_path, max_slots=slots or None, seed=seed, dtype=dtype)
    return Tuner(model_path, engine=torch_engine, lr=lr, seed=seed, **settings).start()
