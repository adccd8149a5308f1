"""The manager beside stock veRL's own parts: TransferQueue, replay buffers, load balancer; a gateway with its
engine, and agents, each in processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import ray
import torch
import transfer_queue
from omegaconf import OmegaConf
from tests.real.verl_rollouts import AGENT, POLICY, veRL_config
from transformers import AutoTokenizer
from verl.experimental.agent_loop.agent_loop import DictConfigWrap
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.utils import tensordict_utils
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.router import get_router_handle

from afield.errors import Unavailable, UsageError
from afield.integrations.verl import agent_loop, clients, dataset
from afield.integrations.verl.agent_loop import AgentLoop
from afield.integrations.verl.gateway_actor import GatewayActor, GatewayOptions, actor_name
from afield.integrations.verl.manager import Manager
from afield.types import Task

pytestmark = pytest.mark.real
STEP = 1
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
WAIT_S = 240.0
FIELDS = ["prompts", "responses", "response_mask", "rm_scores", "rollout_log_probs", "extra_fields", "uid"]


@pytest.fixture(scope="module", autouse=True)
def queue() -> Iterator[None]:
    ray.init("local", num_cpus=32, include_dashboard=False, log_to_driver=False)
    conf = veRL_config("transfer_queue.backend.SimpleStorage.num_data_storage_units=1").transfer_queue
    transfer_queue.init(OmegaConf.create(OmegaConf.to_container(conf, resolve=True)))
    yield
    transfer_queue.close()
    ray.shutdown()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """What a test left in the queue, however it ended, is no other test's."""
    yield
    for partition, entries in (transfer_queue.kv_list() or {}).items():
        if entries:
            transfer_queue.kv_clear(keys=list(entries), partition_id=partition)


@contextmanager
def gateway_at(store: Path) -> Iterator[tuple[dict[str, str], subprocess.Popen[bytes]]]:
    words = ["gateway", "--model", str(POLICY), "--port", "0", "--json", "--exit-with-parent"]
    with subprocess.Popen(
        [sys.executable, "-m", "afield", *words, "--store", str(store)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline()), process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with gateway_at(tmp_path_factory.mktemp("gateway")) as (told, _):
        yield told


@pytest.fixture(scope="module")
def config(gateway: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AFIELD_ADMIN_KEY", gateway["admin_key"])
        patch.setenv("AFIELD_VERL_RETRIES_TASK", "0")
        made = veRL_config(
            f"+afield.gateway={gateway['url']}",
            f"+afield.agent={AGENT}",
            f"+afield.folder={tmp_path_factory.mktemp('run')}",
            "actor_rollout_ref.rollout.n=3",
            "actor_rollout_ref.rollout.val_kwargs.n=2",
            "data.max_prompt_length=400",
            "data.max_response_length=12",
        )
        OmegaConf.set_struct(made, False)  # so that tests may add keys
        yield made


@pytest.fixture(scope="module")
def manager(config: Any) -> Iterator[Manager]:
    made = Manager.create(config=config, llm_client=None, teacher_client=None, reward_loop_worker_handles=[])
    yield made
    made.close()


def asked(tasks: list[dict[str, Any]], split: str = "train", text: str = "", step: int = STEP) -> Any:
    """A batch as veRL's trainer makes it of its data set, and told to TransferQueue as it does."""
    given = dataset.rows([Task(f"task-{n}", task) for n, task in enumerate(tasks)], source="tests")
    if text:
        given[0]["extra_info"]["task"] = text
    columns = {name: np.array([row[name] for row in given], dtype=object) for name in given[0]}
    columns["raw_prompt"] = np.fromiter((row["prompt"] for row in given), dtype=object, count=len(given))
    columns["index"] = np.arange(len(given)).astype(object)
    columns["uid"] = np.array([str(uuid4()) for _ in given], dtype=object)
    del columns["prompt"]
    batch = tensordict_utils.get_tensordict(columns | {"dummy_tensor": torch.zeros(len(given), 1)})
    tensordict_utils.assign_non_tensor_data(batch, "global_steps", step)
    if split == "val":
        tensordict_utils.assign_non_tensor_data(batch, "validate", True)
    tags = [{"is_prompt": True, "status": "pending", "global_steps": step} for _ in given]
    transfer_queue.kv_batch_put(keys=list(batch["uid"]), partition_id=split, tags=tags)
    return batch


def buffer(kind: type[ReplayBuffer], refill: Any = None, **how: Any) -> ReplayBuffer:
    return kind(
        trainer_mode="sync" if kind is ReplayBuffer else "separate_async",
        trainer_config=OmegaConf.create({}),
        max_off_policy_threshold=None,
        max_off_policy_strategy="drop",
        sampler_kwargs=OmegaConf.create({}),
        poll_interval=0.2,
        refill_fn=refill,
        **how,
    )


def told_of(batch: Any, split: str = "train") -> dict[str, str]:
    """The status of each of its groups."""
    tags = transfer_queue.kv_list(split)[split]
    return {uid: tags[uid]["status"] for uid in batch["uid"]}


def ended(batch: Any, split: str = "train") -> dict[str, str]:
    """The status of each of its groups, once all have one that veRL takes for an end."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        found = told_of(batch, split)
        if not {"pending", "running"} & set(found.values()):
            return found
        time.sleep(0.2)
    raise TimeoutError(f"groups did not end: {found}")


def test_groups_reach_veRLs_sampler_with_the_rows_of_those_that_can_be_trained(manager: Manager) -> None:
    question = {"question": "How much is the red mug?"}
    does = [{"branches": 2}, {"does": "break one"}, {"does": "break"}, {"does": "give up"}]
    batch = asked([question | one for one in does])
    manager.generate_sequences(batch)
    assert {"pending", "running"} & set(told_of(batch).values()), "it does not wait for them"
    branched, one_broke, broke, gave_up = batch["uid"]
    assert ended(batch) == {
        branched: "finished",
        one_broke: "finished",
        broke: "failure",
        gave_up: "finished",
    }

    sampled, _ = buffer(ReplayBuffer).sample(STEP, "train", 4)
    keys = sorted(sampled.keys)
    assert [key for key in keys if key.startswith(branched)] == [
        f"{branched}_{session}_{row}" for session in range(3) for row in range(2)
    ]
    assert [key for key in keys if key.startswith(one_broke)] == [f"{one_broke}_1_0", f"{one_broke}_2_0"]
    assert not [key for key in keys if key.startswith(broke)]
    assert len([key for key in keys if key.startswith(gave_up)]) == 3
    assert all(tag["min_global_steps"] == tag["max_global_steps"] == 0 for tag in sampled.tags)

    padded = upsample_batch_to_divisible_size(sampled, 12, eos_token_id=0)
    assert len(padded) == 12
    data = transfer_queue.kv_batch_get(keys=padded.keys, partition_id="train", select_fields=FIELDS)
    told = dict(zip(padded.keys, data["extra_fields"], strict=True))
    assert told[f"{gave_up}_0_0"]["reward_extra_info"]["policy_failure"] == 1.0
    scores = dict(zip(padded.keys, [row.sum().item() for row in data["rm_scores"]], strict=True))
    assert scores[f"{branched}_0_0"] == scores[f"{branched}_0_1"]
    assert {scores[f"{gave_up}_{k}_0"] for k in range(3)} == {0.0}
    transfer_queue.kv_clear(keys=padded.keys, partition_id="train")


def test_validation_has_its_own_partition_number_and_sampling(manager: Manager) -> None:
    batch = asked([{"question": "How many teal lamps are left?"}], "val")
    manager.generate_sequences(batch)
    (uid,) = batch["uid"]
    assert ended(batch, "val") == {uid: "finished"}
    sampled, _ = buffer(ReplayBuffer).sample(STEP, "val", 1)
    assert sorted(sampled.keys) == [f"{uid}_0_0", f"{uid}_1_0"]
    data = transfer_queue.kv_batch_get(keys=sampled.keys, partition_id="val", select_fields=["responses"])
    first, second = (row.tolist() for row in data["responses"])
    assert first == second, "veRL validates greedily unless told otherwise"
    transfer_queue.kv_clear(keys=sampled.keys, partition_id="val")


def test_the_asynchronous_sampler_replaces_a_group_that_cannot_be_trained(manager: Manager) -> None:
    first = asked([{"question": "?", "does": "break"}])
    manager.generate_sequences(first)
    more: list[Any] = []

    def refill(number: int) -> None:
        more.append(asked([{"question": "How much is the red mug?"}] * number))
        manager.generate_sequences(more[-1])

    sampled, metrics = buffer(ReplayBufferAsync, refill).sample(STEP, "train", 1)
    assert {key.split("_")[0] for key in sampled.keys} == set(more[0]["uid"])
    assert metrics["training/rollout_failure/evicted_samples"] == 1
    transfer_queue.kv_clear(keys=sampled.keys, partition_id="train")


def test_a_prompt_may_ask_for_another_number_of_rollouts(manager: Manager) -> None:
    batch = asked([{"question": "How much is the red mug?"}])
    tensordict_utils.assign_non_tensor_data(batch, "__rollout_n__", 1)
    manager.generate_sequences(batch)
    (uid,) = batch["uid"]
    assert ended(batch) == {uid: "finished"}
    sampled, _ = buffer(ReplayBuffer).sample(STEP, "train", 1)
    assert sampled.keys == [f"{uid}_0_0"]
    transfer_queue.kv_clear(keys=sampled.keys, partition_id="train")


def test_remax_compares_a_group_with_its_greedy_rollout(config: Any, tmp_path: Path) -> None:
    config = OmegaConf.merge(
        config, {"algorithm": {"adv_estimator": "remax"}, "afield": {"folder": str(tmp_path)}}
    )
    made = Manager.create(config=config, llm_client=None, teacher_client=None, reward_loop_worker_handles=[])
    try:
        batch = asked(
            [{"question": "How much is the red mug?"}, {"question": "?", "does": "break when greedy"}]
        )
        made.generate_sequences(batch)
        good, bad = batch["uid"]
        assert ended(batch) == {good: "finished", bad: "failure"}
        sampled, _ = buffer(ReplayBuffer).sample(STEP, "train", 2)  # of one alone it may take the failed one
        assert sorted(sampled.keys) == [f"{good}_{n}_0" for n in range(3)]
        fields = ["rm_scores", "response_mask", "uid"]
        data = transfer_queue.kv_batch_get(keys=sampled.keys, partition_id="train", select_fields=fields)
        padded = data.to_padded_tensor()
        uids = np.array(padded.pop("uid").tolist(), dtype=object)
        advantages, _ = core_algos.get_adv_estimator_fn("remax")(
            token_level_rewards=padded["rm_scores"], response_mask=padded["response_mask"], index=uids
        )
        (greedy,) = made._baselines.of([good])
        scores = padded["rm_scores"].sum(-1)
        mask = padded["response_mask"]
        assert torch.allclose(advantages * mask, (scores - greedy)[:, None] * mask)
        with pytest.raises(UsageError, match="has no greedy baseline"):
            made._baselines.of([bad])
        transfer_queue.kv_clear(keys=sampled.keys, partition_id="train")
    finally:
        made.close()


def test_rewards_of_turns_and_weights_of_named_ones_reach_veRL_by_token(config: Any, tmp_path: Path) -> None:
    wanted = {"folder": str(tmp_path), "credit": "turns", "rewards": {"answer": 1.0, "style": 0.25}}
    own = OmegaConf.merge(config, {"algorithm": {"adv_estimator": "gae"}, "afield": wanted})
    made = Manager.create(config=own, reward_loop_worker_handles=[])
    try:
        question = {"question": "How much is the red mug?"}
        batch = asked([question | {"does": "reward turns"}, question | {"does": "forget a reward"}])
        made.generate_sequences(batch)
        good, bad = batch["uid"]
        assert ended(batch) == {good: "finished", bad: "failure"}
        sampled, _ = buffer(ReplayBuffer).sample(STEP, "train", 2)  # of one alone it may take the failed one
        assert sorted(sampled.keys) == [f"{good}_{n}_0" for n in range(3)]
        fields = ["rm_scores", "response_mask"]
        data = transfer_queue.kv_batch_get(keys=sampled.keys, partition_id="train", select_fields=fields)
        for scores, mask in zip(data["rm_scores"], data["response_mask"], strict=True):
            ends = [n for n, owned in enumerate(mask.tolist()) if owned and not mask[n + 1 : n + 2].any()]
            assert [(n, scores[n].item()) for n in scores.nonzero()[:, 0].tolist()] == [
                (ends[0], 0.25),
                (ends[1], 0.5 + 2.0),
            ]
        transfer_queue.kv_clear(keys=sampled.keys, partition_id="train")
    finally:
        made.close()


def test_what_breaks_collecting_ends_training_with_the_reason(config: Any, tmp_path: Path) -> None:
    own = OmegaConf.merge(config, {"afield": {"folder": str(tmp_path)}})
    made = Manager.create(config=own, reward_loop_worker_handles=[])
    try:
        batch = asked([{"question": "?"}], text='{"_rollout": 1}')
        made.generate_sequences(batch)
        with pytest.raises(ValueError, match=r"Unknown status: afield has stopped collecting: .*_rollout"):
            buffer(ReplayBuffer).sample(STEP, "train", 1)
        with pytest.raises(UsageError, match="_rollout"):
            made.generate_sequences(batch)
    finally:
        made.close()


def test_a_gateway_that_is_gone_ends_training(config: Any, tmp_path: Path) -> None:
    with gateway_at(tmp_path / "store") as (told, process), pytest.MonkeyPatch.context() as patch:
        patch.setenv("AFIELD_ADMIN_KEY", told["admin_key"])
        own = {"gateway": told["url"], "folder": str(tmp_path), "unavailable_timeout_s": 1.0}
        made = Manager.create(config=OmegaConf.merge(config, {"afield": own}), reward_loop_worker_handles=[])
        process.kill()
        process.wait()
        batch = asked([{"question": "?"}])
        made.generate_sequences(batch)
        with pytest.raises(ValueError, match=r"stopped collecting: .*did not answer"):
            buffer(ReplayBuffer).sample(STEP, "train", 1)
        with pytest.raises(Unavailable):
            made.close()


def test_the_end_of_a_jobs_gateway_is_noticed_at_once_and_reported(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = GatewayOptions(folder=str(tmp_path / "gateway"))
    keeper = GatewayActor.options(name=actor_name(), max_concurrency=64).remote(options, str(POLICY))
    patient = {
        "gateway": "",
        "folder": str(tmp_path),
        "unavailable_timeout_s": 600.0,
        "teardown_timeout_s": 2.0,
    }
    own = OmegaConf.merge(config, {"afield": patient, "actor_rollout_ref": {"rollout": {"name": "afield"}}})
    made = Manager.create(config=own, reward_loop_worker_handles=[])
    monkeypatch.setattr(agent_loop, "SHARED", agent_loop._SharedClient())
    given = agent_loop.SHARED.get(own, None)
    kill_all(str(tmp_path / "gateway" / "store-"))
    batch = asked([{"question": "?"}])
    began = time.monotonic()
    with pytest.raises((ValueError, Unavailable), match=r"the gateway at .* has ended with status -9"):
        made.generate_sequences(batch)
        buffer(ReplayBuffer).sample(STEP, "train", 1)
    with pytest.raises(Unavailable, match="has ended with status -9"):
        made.generate_sequences(batch)
    with pytest.raises(Unavailable, match="has ended with status -9"):
        asyncio.run(one_loop(own).run(SAMPLING, **a_prompt(0)))
    assert time.monotonic() - began < WAIT_S
    made.close()
    given[1].close()
    ray.kill(keeper)


def kill_all(path: str) -> None:
    """Kill the processes that have a file open whose path starts with `path`."""
    pids = [
        int(process.name)
        for process in Path("/proc").iterdir()
        if process.name.isdigit() and any(file.startswith(path) for file in open_files(process))
    ]
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def open_files(process: Path) -> list[str]:
    try:
        return [str(link.readlink()) for link in (process / "fd").iterdir()]
    except OSError:
        return []


def test_rollouts_without_end_are_not_waited_for_for_ever(config: Any, tmp_path: Path) -> None:
    own = OmegaConf.merge(config, {"afield": {"folder": str(tmp_path), "fruitless": 1}})
    made = Manager.create(config=own, reward_loop_worker_handles=[])
    try:
        batch = asked([{"question": "?", "does": "break"}, {"question": "!", "does": "break"}])
        made.generate_sequences(batch)
        with pytest.raises(ValueError, match=r"1 groups in a row could not be trained; .*cannot be done"):
            buffer(ReplayBuffer).sample(STEP, "train", 2)
    finally:
        made.close()


def one_loop(config: Any) -> AgentLoop:
    return AgentLoop(
        trainer_config=DictConfigWrap(config),
        server_manager=None,
        tokenizer=AutoTokenizer.from_pretrained(POLICY),
        processor=None,
        dataset_cls=RLHFDataset,
        data_config=DictConfigWrap(config.data),
    )


def a_prompt(session: int, does: str = "") -> dict[str, Any]:
    task = Task("t", {"question": "How much is the red mug?", "branches": 2, "does": does})
    row = dataset.rows([task], source="tests")[0]
    return {**row, "uid": "u-9", "session_id": session, "global_steps": STEP}


def test_an_agent_loop_of_veRLs_gives_outputs_through_one_client_of_the_process(config: Any) -> None:
    async def both() -> list[Any]:
        return [
            await one_loop(config).run(SAMPLING, **a_prompt(n, does)) for n, does in enumerate(("", "break"))
        ]

    done, broke = asyncio.run(both())
    assert [(output.num_turns, output.reward_score) for output in done] == [(4, done[0].reward_score)] * 2
    assert broke == []
    assert agent_loop.SHARED.opened is not None
    agent_loop.SHARED.opened[1].close()


def test_the_addresses_of_veRLs_own_rollout_servers_come_from_its_load_balancer(config: Any) -> None:
    balancer = get_router_handle({"10.0.0.2:8000": "b", "10.0.0.1:8000": "a"})
    client = LLMServerClient(config, balancer)
    assert clients.addresses(client) == ["10.0.0.1:8000", "10.0.0.2:8000"]


def test_agents_are_served_by_veRLs_own_rollout_servers_and_rows_have_its_versions(
    config: Any, tmp_path: Path
) -> None:
    server = [sys.executable, str(Path(__file__).parent / "verl_vllm_server.py"), str(POLICY)]
    with subprocess.Popen(server, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        address = process.stdout.readline().strip().removeprefix("http://")
        own = {
            "afield": {"folder": str(tmp_path), "gateway": ""},
            "actor_rollout_ref": {"rollout": {"name": "vllm"}},
        }
        client = LLMServerClient(config, get_router_handle({address: "handle"}))
        made = Manager.create(
            config=OmegaConf.merge(config, own), llm_client=client, reward_loop_worker_handles=[]
        )
        batch = asked([{"question": "How much is the red mug?"}], step=3)
        made.generate_sequences(batch)
        assert set(ended(batch).values()) == {"finished"}
        sampled, _ = buffer(ReplayBuffer).sample(3, "train", 1)
        assert len(sampled.keys) == 3
        assert {(tag["min_global_steps"], tag["max_global_steps"]) for tag in sampled.tags} == {(2, 2)}
        transfer_queue.kv_clear(keys=sampled.keys, partition_id="train")
        made.close()
        process.stdin.close()


@pytest.mark.parametrize("mode", ["colocate_async", "separate_async"])
def test_modes_that_put_veRLs_own_servers_to_sleep_are_refused(config: Any, mode: str) -> None:
    client = LLMServerClient(config, get_router_handle({"10.0.0.1:8000": "a"}))
    rollout = {"afield": {"gateway": ""}, "actor_rollout_ref": {"rollout": {"name": "vllm"}}}
    own = OmegaConf.merge(config, rollout, {"trainer": {"v1": {"trainer_mode": mode}}})
    with pytest.raises(UsageError, match=f"in mode {mode} veRL puts vllm to sleep"):
        Manager.create(config=own, llm_client=client, reward_loop_worker_handles=[])
