"""Way of weights from trainer to engines: shared memory or disk."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from afield.errors import UsageError
from afield.settings.environment import visible_devices
from afield.settings.train import TrainConfig

UNTRIED = "shared GPU memory has not been tried on hardware yet; weight_transfer = memory uses it"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class TransferChoice(NamedTuple):
    """Chosen way of weights to engines."""

    way: Literal["memory", "disk"]
    """Shared memory, or files alone."""
    reason: str = ""
    """Why weights are not shared in memory; empty if they are, or if the settings say so."""

    @property
    def description(self) -> str:
        """Line for the start of a run."""
        if self.way == "memory":
            return "weights go to engines through shared memory; their files are written afterwards"
        return f"weights go to engines through files{f': {self.reason}' if self.reason else ''}"


class Obstacle(NamedTuple):
    """Reason against shared memory."""

    reason: str
    """Setting or machine that prevents it, in words."""
    sure: bool = True
    """False if memory may work, but cannot be known to."""


def weight_transfer(config: TrainConfig) -> TransferChoice:
    """Choose the way of a run's weights; raises UsageError if memory is demanded and impossible."""
    if config.weight_transfer == "disk" or config.freeze_weights:
        return TransferChoice("disk")
    obstacle = _obstacle(config)
    if config.weight_transfer == "memory":
        if obstacle is not None and obstacle.sure:
            raise UsageError(
                f"weight_transfer = memory is impossible: {obstacle.reason};"
                " set weight_transfer = disk or auto"
            )
        return TransferChoice("memory")
    if obstacle is None and visible_gpus() and trainer_gpus(config):
        obstacle = Obstacle(UNTRIED, sure=False)
    return TransferChoice("memory") if obstacle is None else TransferChoice("disk", obstacle.reason)


def is_loopback(url: str) -> bool:
    """Whether an address is of this machine."""
    return urlsplit(url).hostname in LOOPBACK


def visible_gpus() -> int:
    """Number of NVIDIA GPUs that CUDA would show to this process, found without loading torch."""
    present = sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in Path("/dev").glob("nvidia*"))
    visible = visible_devices()
    return present if visible is None else min(len(visible), present)


def engine_devices(config: TrainConfig) -> tuple[int, ...]:
    """GPUs of the engines that a run starts: those that the trainer leaves; empty if it leaves none."""
    gpus, trained = visible_gpus(), trainer_gpus(config)
    if config.engine_devices or not gpus > trained > 0:
        return config.engine_devices
    return tuple(range(trained, gpus))


def trainer_gpus(config: TrainConfig) -> int:
    """Number of GPUs that the trainer takes, if there are any."""
    return 0 if config.freeze_weights or config.learn.device == "cpu" else config.learn.devices


def _obstacle(config: TrainConfig) -> Obstacle | None:
    """First reason against shared memory; None if trainer and engines can share it."""
    if sys.platform != "linux":
        return Obstacle("it needs Linux")
    if config.learn.lora.rank and config.learn.lora.publish == "adapter":
        return Obstacle("learn.lora.publish = adapter publishes small files")
    if config.gateway:
        if not is_loopback(config.gateway):
            return Obstacle(f"the gateway {config.gateway} is on another machine")
        return Obstacle(f"the gateway {config.gateway} was not started by this run", sure=False)
    if config.on != "process":
        return Obstacle(f"on = {config.on} starts engines on other machines")
    kind, _, url = config.engine.partition("=")
    if kind == "vllm":
        return _vllm_obstacle(config, url)
    if kind != "torch":
        return Obstacle(f"engine {kind} loads weights from files")
    return _gpu_obstacle(config)


def _vllm_obstacle(config: TrainConfig, url: str) -> Obstacle | None:
    if not visible_gpus() or not trainer_gpus(config):
        return Obstacle("vLLM shares the memory of GPUs alone, and the trainer has none")
    if config.learn.devices > 1:
        return Obstacle("a trainer on several devices gathers weights in CPU memory, and vLLM reads a GPU's")
    if not url:
        return _gpu_obstacle(config)
    if not is_loopback(url):
        return Obstacle(f"vLLM at {url} is on another machine")
    if config.vllm_shared_weights:
        return None
    return Obstacle(f"vllm_shared_weights does not say that vLLM at {url} shares memory", sure=False)


def _gpu_obstacle(config: TrainConfig) -> Obstacle | None:
    """Reason against sharing GPU memory; None on a CPU, on the same GPU and between peers."""
    if not visible_gpus() or trainer_gpus(config) != 1:
        return None
    own = int(config.learn.device.partition(":")[2] or 0)
    others = [device for device in engine_devices(config) if device != own]
    if others and not _are_peers(own, others):
        return Obstacle(f"the GPUs {others} of the engines cannot read the memory of the trainer's GPU {own}")
    return None


def _are_peers(own: int, others: list[int]) -> bool:
    import torch

    count = torch.cuda.device_count()
    return all(max(n, own) < count and torch.cuda.can_device_access_peer(n, own) for n in others)
