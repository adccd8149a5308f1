"""Float32 forward passes of models with 16-bit weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Convert each layer's weights to float32 only while it computes, to save a second copy of the model."""
    with ExitStack() as hooks:
        for module in model.modules():
            own = {n: p for n, p in _own(module).items() if p is not None and _is_narrow(p)}
            if own:
                hooks.callback(module.register_forward_pre_hook(partial(_widen, own)).remove)
                hooks.callback(module.register_forward_hook(partial(_narrow, own), always_call=True).remove)
        yield


def _widen(own: dict[str, nn.Parameter], module: nn.Module, inputs: Any) -> None:
    wide: dict[str, Any] = {name: parameter.float() for name, parameter in own.items()}
    _own(module).update(wide)


def _narrow(own: dict[str, nn.Parameter], module: nn.Module, inputs: Any, output: Any) -> None:
    _own(module).update(own)


def _is_narrow(parameter: nn.Parameter) -> bool:
    return parameter.is_floating_point() and parameter.dtype != torch.float32


def _own(module: nn.Module) -> dict[str, Any]:
    """Parameters of the module itself, without submodules, as `getattr` looks them up."""
    return module._parameters  # pyright: ignore[reportPrivateUsage]
