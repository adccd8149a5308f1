"""Each configuration composes by the page's command and passes stock veRL's own checks. No Ray."""

from __future__ import annotations

import itertools
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.errors import InstantiationException
from omegaconf import OmegaConf
from tests.real.verl_rollouts import POLICY
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.workers.rollout.replica import get_rollout_replica_class

from afield.engines.vllm.server import VllmInstallation, server_command
from afield.errors import UsageError
from afield.integrations.verl import plugin, settings
from afield.integrations.verl.gateway_actor import GatewayOptions
from afield.integrations.verl.replica import WHERE, Replica
from afield.integrations.verl.vllm_server import server_options
from afield.settings.values import converted
from verl_cpu.launching import page_command

pytestmark = pytest.mark.real
ALL = ("sync", "separate_async", "gpus_1", "gpus_8", "gpus_64")
SIZED = {"gpus_1": 1, "gpus_8": 8, "gpus_64": 64}
NVIDIA = VllmInstallation(version="0.32.0", cpu=False, scale_out=True, importable=True)


def composed(name: str, *overrides: str) -> Any:
    """As `main_ppo` composes it from the page's command; `sync` and `separate_async` have the same keys."""
    words = page_command(name if name in SIZED else "gpus_1")
    place = words[words.index("--config-path") + 1].removeprefix("pkg://")
    given = [word.replace("=MODEL", f"={POLICY}") for word in words if "=" in word]
    with initialize_config_module(place, version_base=None):
        config = compose(name, overrides=[*given, *overrides])
    OmegaConf.resolve(config)
    return config


def check(config: Any) -> Any:
    """What veRL checks before it starts Ray, and when its trainer is made."""
    validate_config(config, need_reference_policy(config), need_critic(config))
    trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config=config)
    trainer._init_resource_pool_mgr()
    return trainer


@pytest.mark.parametrize("name", ALL)
def test_veRL_accepts_a_configuration(name: str) -> None:
    config = composed(name)
    check(config)
    for part in ("actor", "rollout", "model"):
        assert is_dataclass(omega_conf_to_dataclass(config.actor_rollout_ref[part]))
    for part in (config.algorithm, config.actor_rollout_ref.rollout.checkpoint_engine):
        assert is_dataclass(omega_conf_to_dataclass(part))
    run = settings.read(config)
    assert run.trainer.backend == plugin.NAME
    assert run.settings.engine == "vllm"


@pytest.mark.parametrize(
    ("name", "override", "told"),
    [
        (
            "sync",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=null",
            "set at least one of 'actor.ppo_micro_batch_size'",
        ),
        ("gpus_8", "actor_rollout_ref.actor.ppo_mini_batch_size=16", "must equal parameter_sync_step"),
        ("gpus_64", "actor_rollout_ref.model.use_remove_padding=false", "use_remove_padding"),
    ],
)
def test_veRL_refuses_a_configuration_without_a_key_that_it_needs(
    name: str, override: str, told: str
) -> None:
    with pytest.raises((AssertionError, ValueError, InstantiationException), match=told):
        check(composed(name, override))


@pytest.mark.parametrize("name", SIZED)
def test_a_configuration_uses_all_of_its_gpus(name: str) -> None:
    config = composed(name)
    rollout = config.actor_rollout_ref.rollout
    trains = sum(map(sum, check(config).resource_pool_manager.resource_pool_spec.values()))
    samples = rollout.nnodes * rollout.n_gpus_per_node if config.trainer.v1.trainer_mode != "sync" else 0
    assert trains + samples == SIZED[name]
    sampled_on = samples or trains
    assert sampled_on % rollout.tensor_model_parallel_size == 0
    assert rollout.n_gpus_per_node % rollout.tensor_model_parallel_size == 0, "a server is on one machine"


@pytest.mark.parametrize("name", SIZED)
def test_the_longest_row_fits_a_micro_batch(name: str) -> None:
    actor = composed(name).actor_rollout_ref.actor
    run = settings.read(composed(name))
    assert actor.use_dynamic_bsz
    longest = run.trainer.budget.context
    assert longest and actor.ppo_max_token_len_per_gpu * actor.ulysses_sequence_parallel_size >= longest


@pytest.mark.parametrize("name", SIZED)
def test_a_server_has_veRLs_rollout_settings(name: str) -> None:
    config = composed(name)
    assert get_rollout_replica_class("afield") is Replica
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    options = converted(dict(rollout.engine_kwargs["afield"]), GatewayOptions, WHERE)
    assert options.starts_vllm
    made = [server_options(rollout, options, "MODEL", rank) for rank in (0, 1)]
    command = server_command(made[0], NVIDIA, 8000)
    flags = dict(itertools.pairwise(command))
    assert flags["--dtype"] == "bfloat16"
    assert flags["--tensor-parallel-size"] == str(rollout.tensor_model_parallel_size)
    assert flags["--gpu-memory-utilization"] == f"{rollout.gpu_memory_utilization:g}"
    assert flags["--max-model-len"] == str(settings.read(config).trainer.budget.context)
    seeds = [one.args[one.args.index("--seed") + 1] for one in made]
    assert seeds[0] != seeds[1], "servers with one seed sample the same"


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size=2"),
        ({"data_parallel_size": 2}, "data_parallel_size=2"),
    ],
)
def test_a_server_over_other_dimensions_is_refused(keys: dict[str, int], told: str) -> None:
    rollout = SimpleNamespace(**{"data_parallel_size": 1, "pipeline_model_parallel_size": 1, **keys})
    with pytest.raises(UsageError, match=told):
        server_options(rollout, GatewayOptions(), "MODEL", 0)


def test_started_servers_are_not_mixed_with_others() -> None:
    with pytest.raises(UsageError, match="cannot be mixed"):
        _ = GatewayOptions(engine=["vllm", "vllm=http://127.0.0.1:8000"]).starts_vllm
