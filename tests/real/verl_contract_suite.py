"""Field by field against stock veRL's own classes: rows, losses, data sets, configuration. No Ray."""

from __future__ import annotations

import inspect
import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from msgspec import structs
from tensordict import TensorDict
from tests.real.verl_rollouts import POLICY, finished, veRL_config
from torch.utils.data import DataLoader
from transformers import AutoTokenizer
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics
from verl.protocol import DataProto
from verl.trainer.main_ppo import TaskRunnerV1
from verl.trainer.ppo.core_algos import agg_loss, compute_remax_outcome_advantage
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.utils import tensordict_utils
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
from verl.utils.import_utils import load_class_from_fqn
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.config import ActorConfig
from verl.workers.utils.losses import ppo_loss

from afield.errors import UsageError
from afield.integrations.verl import agent_loop, dataset, manager, rows, settings
from afield.integrations.verl.manager import Manager

pytestmark = pytest.mark.real
PROMPT = {"uid": "u", "global_steps": 4, "index": 0, "raw_prompt": [{"role": "user", "content": "hi"}]}
STOCK = ("prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores", "num_turns", "metrics")


def session(number: int = 0, reward: float = 0.5, *, branched: bool = True, **how: Any) -> rows.RolloutRows:
    made = rows.rollout_rows(finished(f"r{number}", reward, branched=branched), number, **how)
    assert isinstance(made, rows.RolloutRows)
    return made


# --- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", STOCK)
def test_a_field_is_what_veRL_makes_of_an_agent_loops_output(field: str) -> None:
    made = session()
    for entry, output in zip(rows.queue_entries(PROMPT, made), agent_loop.outputs(made), strict=True):
        ours, stock = entry.fields[field], output.as_dict()[field]
        if isinstance(stock, torch.Tensor):
            assert ours.dtype == stock.dtype
            assert torch.equal(ours, stock)
        else:
            assert ours == stock
            assert type(ours) is type(stock)


@pytest.mark.parametrize("name", ["min_global_steps", "max_global_steps", "reward_extra_info"])
def test_an_extra_field_is_what_veRL_makes_of_it(name: str) -> None:
    made = session()
    for entry, output in zip(rows.queue_entries(PROMPT, made), agent_loop.outputs(made), strict=True):
        assert entry.fields["extra_fields"][name] == output.as_dict()["extra_fields"][name]


def test_metrics_have_veRLs_names() -> None:
    assert set(session().metrics) == set(AgentLoopMetrics.model_fields)


def test_no_field_is_missing_that_veRLs_own_worker_writes() -> None:
    source = inspect.getsource(manager_of_rows())
    written = {"loss_mask", "input_ids", "position_ids", "multi_modal_inputs"}
    assert all(f'field["{name}"]' in source for name in written), "veRL writes other fields now"
    fields = rows.queue_entries(PROMPT, session())[0].fields
    assert written | set(STOCK) | {"extra_fields", "uid", "session_id", "global_steps"} <= set(fields)


@pytest.mark.parametrize(
    "tag",
    [
        "status",
        "prompt_len",
        "response_len",
        "seq_len",
        "global_steps",
        "min_global_steps",
        "max_global_steps",
    ],
)
def test_a_tag_is_one_that_veRLs_own_worker_writes(tag: str) -> None:
    assert f'"{tag}"' in inspect.getsource(manager_of_rows())
    found = rows.queue_entries(PROMPT, session())[0].tag
    assert isinstance(found[tag], str if tag == "status" else int)


def manager_of_rows() -> Any:
    """The method of veRL's that writes rows; its class is a Ray actor's."""
    import verl.trainer.ppo.v1.agent_loop_tq as module

    return module.AgentLoopWorkerTQ.__ray_metadata__.modified_class._agent_loop_postprocess


def test_rows_of_all_sizes_make_a_tensordict() -> None:
    fields = [entry.fields for one in (session(0), session(1)) for entry in rows.queue_entries(PROMPT, one)]
    made = list_of_dict_to_tensordict(fields)
    assert made["responses"].is_nested
    assert made["input_ids"].offsets().diff().tolist() == [7, 9, 7, 9]


# --- what branches weigh -------------------------------------------------------------------------


def padded(made: list[rows.RolloutRows], weighted: bool) -> tuple[dict[str, torch.Tensor], list[str]]:
    entries = [entry for one in made for entry in rows.queue_entries(PROMPT, one, weighted=weighted)]
    names = ["response_mask", "rm_scores", "rollout_log_probs"] + ["rollout_is_weights"] * weighted
    longest = max(len(entry.fields["responses"]) for entry in entries)

    def pad(value: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(value, (0, longest - len(value))) if len(value) > 1 else value

    stacked = {
        name: torch.stack([pad(entry.fields[name]) for entry in entries])
        for name in names
        if name != "rollout_is_weights"
    }
    if weighted:
        stacked["rollout_is_weights"] = torch.stack([e.fields["rollout_is_weights"] for e in entries])
    return stacked, [entry.key for entry in entries]


def test_all_rows_of_a_session_get_the_advantage_of_its_reward_once() -> None:
    made = [session(0, 1.0), session(1, 0.0, branched=False), session(2, 0.5)]
    batch, keys = padded(made, weighted=False)
    data = DataProto(batch=TensorDict(batch, batch_size=len(keys)))
    data.batch["token_level_rewards"] = data.batch["rm_scores"]
    data.non_tensor_batch["uid"] = np.array(["u"] * len(keys), dtype=object)
    found = compute_advantage_for_multi_trajectories(data, keys, "grpo").batch["advantages"]
    scores = torch.tensor([1.0, 0.0, 0.5])
    first, second, third = ((scores - scores.mean()) / (scores.std() + 1e-6)).tolist()
    each = [found[i][batch["response_mask"][i] == 1].unique().item() for i in range(len(keys))]
    assert keys == ["u_0_0", "u_0_1", "u_1_0", "u_2_0", "u_2_1"]
    assert each == pytest.approx([first, first, second, third, third], abs=1e-6)


@pytest.mark.parametrize("mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_a_session_weighs_the_same_whether_its_tokens_are_in_one_row_or_in_two(mode: str) -> None:
    """Against the same tokens put into one row, with veRL's own means and its own constants."""
    weighted = mode == "seq-mean-token-mean"
    batch, _ = padded([session(0), session(1, branched=False)], weighted)
    mask = batch["response_mask"]
    losses = torch.arange(1.0, mask.numel() + 1).view_as(mask)
    if weighted:
        split = agg_loss(losses * batch["rollout_is_weights"], mask, mode, global_batch_size=2)
    else:
        split = agg_loss(losses, mask, mode, batch_num_tokens=int(mask.sum()), global_batch_size=2)
    whole = torch.zeros(2, mask.shape[1] * 2)
    whole_mask = torch.zeros_like(whole)
    whole[0], whole_mask[0] = torch.cat([losses[0], losses[1]]), torch.cat([mask[0], mask[1]])
    whole[1, : mask.shape[1]], whole_mask[1, : mask.shape[1]] = losses[2], mask[2]
    one = agg_loss(whole, whole_mask, mode, batch_num_tokens=int(mask.sum()), global_batch_size=2)
    assert split.item() == pytest.approx(one.item(), rel=1e-6)


def test_veRLs_loss_takes_the_weights_of_rows() -> None:
    """Through `ppo_loss` itself, from nested rows, as its workers call it."""
    made = [session(0), session(1, branched=False)]

    def loss(weights: torch.Tensor | None) -> float:
        entries = [entry for one in made for entry in rows.queue_entries(PROMPT, one)]
        nested = list_of_dict_to_tensordict([entry.fields for entry in entries])
        names = ("prompts", "responses", "response_mask", "loss_mask", "input_ids", "position_ids")
        data = nested.select(*names, "rollout_log_probs")
        data["old_log_probs"] = data.pop("rollout_log_probs")
        advantages = [entry.fields["response_mask"] * float(i + 1) for i, entry in enumerate(entries)]
        data["advantages"] = torch.nested.as_nested_tensor(advantages, layout=torch.jagged)
        if weights is not None:
            data["rollout_is_weights"] = weights
        tensordict_utils.assign_non_tensor(
            data, dp_size=1, batch_num_tokens=8, global_batch_size=2, max_response_len=4
        )
        logp = [
            torch.cat([torch.zeros(len(e.fields["prompts"])), e.fields["rollout_log_probs"]]) for e in entries
        ]
        shifted = [torch.roll(one, -1) for one in logp]
        output = {"log_probs": torch.nested.as_nested_tensor(shifted, layout=torch.jagged)}
        config = ActorConfig(
            strategy="fsdp",
            rollout_n=2,
            ppo_mini_batch_size=1,
            ppo_micro_batch_size_per_gpu=1,
            loss_agg_mode="seq-mean-token-mean",
            optim=None,
        )
        return ppo_loss(config, output, data)[0].item()

    weights = [
        e.fields["rollout_is_weights"] for one in made for e in rows.queue_entries(PROMPT, one, weighted=True)
    ]
    # Rows have advantages 1, 2 and 3; a ratio of 1 makes a row's loss minus its advantage.
    assert loss(None) == pytest.approx(-(1 + 2 + 3) / 2)
    assert loss(weights) == pytest.approx(-(0.6 * 1 + 0.4 * 2 + 3) / 2)


# --- credit by turns -----------------------------------------------------------------------------

TURNS = {"t1": 0.1, "t2": 0.2, "t3": 0.4}


def credited(
    number: int, reward: float, estimator: str, *, discount: float = 1.0, branched: bool = True
) -> rows.RolloutRows:
    overrides = (
        f"algorithm.adv_estimator={estimator}",
        "+afield.credit=turns",
        f"+afield.discount={discount}",
    )
    credit = settings.read(veRL_config("+afield.agent=a.py:a", *overrides)).credit
    made = finished(f"r{number}", reward, branched=branched)
    turns = TURNS if branched else {name: TURNS[name] for name in ("t1", "t2")}
    made = structs.replace(made, outcome=structs.replace(made.outcome, turn_rewards=turns))
    one = rows.rollout_rows(made, number, credit=credit)
    assert isinstance(one, rows.RolloutRows)
    return one


def estimated(made: list[rows.RolloutRows], estimator: str) -> tuple[TensorDict, list[str]]:
    """As veRL's trainer makes advantages of `rm_scores`, with its own configuration."""
    batch, keys = padded(made, weighted=False)
    algorithm = veRL_config(f"algorithm.adv_estimator={estimator}", "algorithm.lam=1.0").algorithm
    data = DataProto(batch=TensorDict(batch, batch_size=len(keys)))
    data.batch["token_level_rewards"] = data.batch["token_level_scores"] = data.batch["rm_scores"]
    data.batch["values"] = torch.zeros_like(data.batch["rm_scores"])
    data.non_tensor_batch["uid"] = np.array(["u"] * len(keys), dtype=object)
    how = {"gamma": algorithm.gamma, "lam": algorithm.lam, "config": algorithm}
    return compute_advantage_for_multi_trajectories(data, keys, estimator, **how).batch, keys


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus"])
@pytest.mark.parametrize("discount", [1.0, 0.5])
def test_a_turn_earns_what_came_at_its_end_or_later(estimator: str, discount: float) -> None:
    made = [credited(0, 1.0, estimator, discount=discount), credited(1, 0.0, estimator, discount=discount)]
    found, keys = estimated(made, estimator)
    assert keys == ["u_0_0", "u_0_1", "u_1_0", "u_1_1"]
    # t1 and t2 are in the first row of a session, t3 in the second; tokens of tools are skipped over.
    for row, reward in ((0, 1.0), (2, 0.0)):
        last = 0.2 + reward
        assert found["returns"][row][[0, 1, 3]].tolist() == pytest.approx(
            [0.1 + discount * last] * 2 + [last]
        )
        assert found["returns"][row + 1][:2].tolist() == pytest.approx([0.4 + reward] * 2)
    mask = found["response_mask"].bool()
    order = found["advantages"][mask].argsort(stable=True), found["returns"][mask].argsort(stable=True)
    assert torch.equal(*order)


def test_grpo_of_verl_compares_the_reward_sums_of_whole_sessions() -> None:
    made = [credited(0, 1.0, "grpo"), credited(1, 0.0, "grpo", branched=False), credited(2, 0.5, "grpo")]
    found, keys = estimated(made, "grpo")
    totals = torch.tensor([1.7, 0.3, 1.2])
    assert found["rm_scores"].sum(-1).tolist() == pytest.approx([1.7, 1.7, 0.3, 1.2, 1.2])
    first, second, third = ((totals - totals.mean()) / (totals.std() + 1e-6)).tolist()
    each = [found["advantages"][i][found["response_mask"][i] == 1].unique() for i in range(len(keys))]
    assert [one.item() for one in each] == pytest.approx([first, first, second, third, third], abs=1e-5)


def test_remax_takes_a_turns_return_minus_the_greedy_sessions() -> None:
    batch, _ = padded([credited(0, 1.0, "remax")], weighted=False)
    advantages, _ = compute_remax_outcome_advantage(
        token_level_rewards=batch["rm_scores"],
        reward_baselines=torch.tensor([1.0, 1.0]),
        response_mask=batch["response_mask"],
    )
    assert advantages[0][[0, 1, 3]].tolist() == pytest.approx([0.3, 0.3, 0.2])
    assert advantages[1][:2].tolist() == pytest.approx([0.4, 0.4])


def test_veRLs_agent_loop_refuses_credit_by_turns() -> None:
    made = veRL_config("+afield.agent=a.py:a", "+afield.credit=turns", "+afield.rewards.format=0.5")
    with pytest.raises(UsageError, match="takes one reward per row"):
        agent_loop._SharedClient().get(made, None)


# --- doors ---------------------------------------------------------------------------------------


def test_veRL_finds_the_manager_by_its_name() -> None:
    assert load_class_from_fqn("afield.integrations.verl.Manager", "AgentLoopManager") is Manager


def test_the_manager_is_called_as_veRL_calls_its_own() -> None:
    source = inspect.getsource(TaskRunnerV1.__ray_metadata__.modified_class.init_agent_loop_manager)
    parameters = inspect.signature(Manager.create).parameters
    assert all(f"{name}=" in source for name in parameters), "veRL passes other arguments now"
    ours = inspect.signature(Manager.generate_sequences).parameters
    assert list(ours) == list(inspect.signature(AgentLoopManagerTQ.generate_sequences).parameters)


def test_the_loop_is_one_of_veRLs() -> None:
    assert issubclass(agent_loop.AgentLoop, AgentLoopBase)
    assert list(inspect.signature(agent_loop.AgentLoop.run).parameters)[1] == "sampling_params"


def test_what_is_written_on_command_lines_is_understood_by_Hydra() -> None:
    root = Path(__file__).parent.parent.parent
    text = "".join((root / page).read_text() for page in ("docs/how-to/verl.md", "examples/verl/README.md"))
    lines = re.findall(r"`([^`\n]*run\.sh [^`\n]+)`", text) + re.findall(r"^\$ (\S*run\.sh .+)$", text, re.M)
    words = [word for line in lines for word in shlex.split(line)]
    overrides = [word for word in words if re.match(r"\+*[a-z_]+\.[a-z_.]+=", word)]
    assert len(overrides) >= 2
    told = {made.key_or_group: made.value() for made in OverridesParser.create().parse_overrides(overrides)}
    assert told["afield.engine"] == "vllm=http://127.0.0.1:8000"


def test_veRLs_own_configuration_is_understood() -> None:
    given = settings.read(
        veRL_config(
            "+afield.agent=agent.py:agent",
            "+afield.options.limits.memory_mb=512",
            "actor_rollout_ref.rollout.name=vllm",
            "actor_rollout_ref.rollout.n=8",
            "actor_rollout_ref.rollout.val_kwargs.n=3",
            "actor_rollout_ref.rollout.temperature=0.8",
            "data.max_prompt_length=100",
            "data.max_response_length=40",
        )
    )
    assert given.settings.agent == f"{Path.cwd() / 'agent.py'}:agent"
    assert given.settings.options == {"limits": {"memory_mb": 512}}
    assert (given.trainer.rollouts, given.trainer.val_rollouts) == (8, 3)
    assert (given.trainer.sampling.temperature, given.trainer.sampling.top_k) == (0.8, 0)
    assert given.trainer.val_sampling.temperature == 0
    assert (given.trainer.sampling.max_tokens, given.trainer.budget.context) == (40, 140)
    assert (given.trainer.mode, given.trainer.refills, given.trainer.loss_agg_mode) == (
        "sync",
        False,
        "token-mean",
    )


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("+afield.agnt=x", "did you mean 'agent'?"),
        ("algorithm.adv_estimator=rloo", "afield.branches=main"),
        ("actor_rollout_ref.rollout.calculate_log_probs=False", "calculate_log_probs=True"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_before_anything_starts(override: str, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        Manager.create(config=veRL_config(override, "actor_rollout_ref.rollout.n=4"))
    assert told in str(caught.value)


def test_a_teacher_or_a_reward_model_of_veRLs_is_refused() -> None:
    with pytest.raises(UsageError, match="switch distillation off"):
        Manager.create(config=veRL_config(), teacher_client={}, reward_loop_worker_handles=[])
    with pytest.raises(UsageError, match=r"reward.reward_model.enable=False"):
        Manager.create(config=veRL_config(), reward_loop_worker_handles=None)


# --- data sets -----------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["parquet", "jsonl"])
def test_veRLs_data_set_hands_tasks_out_as_they_were(end: str, tmp_path: Path) -> None:
    given = [{"id": "a", "question": "2?", "deep": {"x": [1, None]}}, {"id": "b", "question": "3?", "y": 1.5}]
    source, out = tmp_path / "sums.jsonl", tmp_path / f"train.{end}"
    source.write_text("\n".join(map(json.dumps, given)))
    assert dataset.main([str(source), str(out)]) == 0
    config = veRL_config(f"+data.cache_dir={tmp_path}", "data.filter_overlong_prompts=True").data
    config.filter_overlong_prompts_workers = 1
    made = RLHFDataset([str(out)], AutoTokenizer.from_pretrained(POLICY), config)
    batch = next(iter(DataLoader(made, batch_size=2, collate_fn=collate_fn)))
    batch["uid"] = np.array(["u0", "u1"], dtype=object)
    asked = tensordict_utils.get_tensordict(batch)
    tensordict_utils.assign_non_tensor_data(asked, "global_steps", 5)
    prompts = [manager._row(asked, i) for i in range(2)]
    assert [dataset.task_of(prompt).input for prompt in prompts] == given
    assert [prompt["uid"] for prompt in prompts] == ["u0", "u1"]
    assert {prompt["global_steps"] for prompt in prompts} == {5}
