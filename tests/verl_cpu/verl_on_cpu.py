"""Lets stock veRL 0.9.1 train on a machine without GPUs. Test code, and no part of afield.

Loaded by `VERL_USE_EXTERNAL_MODULES=verl_on_cpu,...` with `VERL_PLATFORM=cpu`. It replaces exactly this:
1. the platform (CUDA): torch's CPU, with memory and profiling calls that answer zero or nothing;
2. NCCL: gloo, also where veRL builds "cpu:gloo,cpu:gloo", which torch refuses as one device named twice.
Everything else (trainer, FSDP2, Ray, TransferQueue, losses, metrics) is veRL's own.
"""

from __future__ import annotations

import os
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import verl.utils.distributed as distributed
from verl.plugin.platform import PlatformBase, PlatformRegistry

NOTHING = ("empty_cache", "ipc_collect", "reset_peak_memory_stats")
ZERO = ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved")
SAME: dict[str, Any] = {
    **dict.fromkeys(NOTHING, lambda *_, **__: None),
    **dict.fromkeys(ZERO, lambda *_, **__: 0),
    "get_device_name": lambda *_, **__: "CPU",
    "mem_get_info": lambda *_, **__: (0, 0),
    "get_rng_state": torch.get_rng_state,
    "set_rng_state": torch.set_rng_state,
    "manual_seed": torch.manual_seed,
    "manual_seed_all": torch.manual_seed,
}


class CpuModule(types.ModuleType):
    """`torch.cpu`, and what `torch.cuda` has beside it."""

    def __getattr__(self, name: str) -> Any:
        return SAME[name] if name in SAME else getattr(torch.cpu, name)


CPU = CpuModule("torch_cpu_as_device")


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    device_name = property(lambda self: "cpu")
    vendor_name = property(lambda self: "generic")
    device_module = property(lambda self: CPU)

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return os.environ.get("VERL_PLATFORM") == "cpu"

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "VERL_CPU_VISIBLE"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"  # Ray is told of some that are not there

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def over_gloo(timeout_second: int | None = None, backend: str | None = None) -> None:
    original(timeout_second, backend or "gloo")


original = distributed.initialize_global_process_group_ray
distributed.initialize_global_process_group_ray = over_gloo


torch.set_num_threads(1)
