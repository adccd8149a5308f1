"""What veRL gets of rollouts, and how it is configured: the parts that need no veRL."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs

from afield.batches.rewards import turn_returns
from afield.datasets import read_tasks
from afield.errors import UsageError
from afield.integrations.verl import dataset, rows, settings
from afield.integrations.verl.manager import GenerateCall, PromptGroup, StepCounts
from afield.types import Failure, FailureKind, Outcome, Reason, RolloutResult, Split, Task
from support.paths import ROOT
from support.random_groups import Maker, branching

PROMPT = {"uid": "u-1", "global_steps": 7, "raw_prompt": [{"role": "user", "content": "hi"}], "index": 3}


def failed(rollout_id: str, kind: FailureKind, reward: float | None = None) -> RolloutResult:
    broke = Failure(kind, Reason.TIMEOUT, "it broke")
    outcome = Outcome(rollout_id=rollout_id, attempt=1, reward=reward, failure=broke)
    return structs.replace(branching(rollout_id, 1.0), outcome=outcome)


# --- groups --------------------------------------------------------------------------------------


def test_a_prompt_that_asks_for_no_rollout_ends_at_once_whatever_its_uid_is_made_of() -> None:
    generate_call = GenerateCall(step=1, split=Split.TRAIN, version=0, groups=1)
    ended: list[str] = []
    PromptGroup({"uid": 7}, StepCounts(generate_call), []).when_ended(lambda group: ended.append(group.uid))
    assert ended == ["7"]
    judged = rows.group_rows([], quorum=0)
    assert (judged.sessions, judged.dropped) == ((), None)


# --- rows ----------------------------------------------------------------------------------------


@given(st.integers(0, 2**32))
def test_every_token_that_trains_is_in_one_row_with_what_was_sampled(seed: int) -> None:
    for group in Maker(seed, None).groups():
        for one in rows.group_rows(group.finished, quorum=1).sessions:
            owned = sum(t.owned for t in one.result.trajectories)
            assert sum(sum(row.response_mask) for row in one.rows) == owned
            assert sum(row.trajectory.weight for row in one.rows) == pytest.approx(1.0)
            for row, trajectory in zip(one.rows, one.result.trajectories, strict=True):
                assert row.prompt_ids + row.response_ids == trajectory.token_ids
                assert row.response_mask[0] == row.response_mask[-1] == 1
                assert sum(row.response_logprobs) == pytest.approx(sum(trajectory.logprobs))


def test_a_session_that_branched_gives_a_row_for_each_branch_and_one_reward() -> None:
    one = rows.rollout_rows(branching("r", 0.5), 2)
    assert isinstance(one, rows.RolloutRows)
    first, second = rows.queue_entries(PROMPT, one)
    assert [first.key, second.key] == ["u-1_2_0", "u-1_2_1"]
    assert first.fields["prompts"].tolist() == [1, 2, 3]
    assert first.fields["responses"].tolist() == [10, 11, 4, 12]
    assert first.fields["response_mask"].tolist() == first.fields["loss_mask"].tolist() == [1, 1, 0, 1]
    assert second.fields["prompts"].tolist() == [1, 2, 3, 10, 11, 5, 6]
    assert second.fields["responses"].tolist() == [13, 14]
    assert [e.fields["rm_scores"].tolist() for e in (first, second)] == [[0, 0, 0, 0.5], [0, 0.5]]
    assert (first.tag["min_global_steps"], first.tag["max_global_steps"]) == (3, 4)
    assert first.tag | second.tag | {"prompt_len": 3} == first.tag | {
        "prompt_len": 3,
        "response_len": 2,
        "seq_len": 9,
        "max_global_steps": 3,
    }
    assert [e.fields["num_turns"] for e in (first, second)] == [4, 4]
    assert first.fields["input_ids"].tolist() == [1, 2, 3, 10, 11, 4, 12]
    assert first.fields["position_ids"].tolist() == list(range(7))
    assert first.fields["rollout_log_probs"].dtype is torch.float32


def test_branches_main_keeps_only_the_longest_row_of_a_session() -> None:
    one = rows.rollout_rows(branching("r", 0.5), 0, branches="main")
    assert isinstance(one, rows.RolloutRows)
    assert [(row.response_ids, row.trajectory.weight) for row in one.rows] == [((10, 11, 4, 12), 1.0)]


def test_rows_say_what_they_weigh_when_asked() -> None:
    one = rows.rollout_rows(branching("r", 0.5), 0)
    assert isinstance(one, rows.RolloutRows)
    weights = [entry.fields["rollout_is_weights"] for entry in rows.queue_entries(PROMPT, one, weighted=True)]
    assert [weight.tolist() for weight in weights] == [[pytest.approx(0.6)], [pytest.approx(0.4)]]
    assert "rollout_is_weights" not in rows.queue_entries(PROMPT, one)[0].fields


@pytest.mark.parametrize("kind", [k for k in FailureKind if k is not FailureKind.POLICY])
def test_what_broke_by_no_doing_of_the_policy_makes_no_row(kind: FailureKind) -> None:
    judged = rows.group_rows([branching("a", 1.0), failed("b", kind), branching("c", 0.0)], quorum=2)
    assert [one.number for one in judged.sessions] == [0, 2]
    assert judged.left_out == {"b": f"{kind}/timeout: it broke"}
    assert judged.dropped is None


def test_a_policy_failure_trains_with_its_reward_or_the_floor() -> None:
    members = [failed("a", FailureKind.POLICY), failed("b", FailureKind.POLICY, 0.25)]
    judged = rows.group_rows(members, quorum=2, floor=-1.0)
    assert [one.score for one in judged.sessions] == [-1.0, 0.25]
    assert [one.info["policy_failure"] for one in judged.sessions] == [1.0, 1.0]


def test_a_group_with_too_few_rewards_makes_no_row_and_says_why() -> None:
    judged = rows.group_rows([branching("a", 1.0), failed("b", FailureKind.INFRASTRUCTURE)], quorum=2)
    assert judged.sessions == ()
    assert judged.dropped == "1 of 2 rollouts can be trained, 2 are needed; infrastructure/timeout: it broke"


def test_a_row_that_is_not_what_was_sampled_is_refused_by_rollout_and_turn() -> None:
    made = branching("r", 1.0)
    first = structs.replace(made.trajectories[0], token_ids=(1, 2, 3, 10, 11, 4, 99))
    with pytest.raises(UsageError, match=r"rollout r, turn t"):
        rows.rollout_rows(structs.replace(made, trajectories=(first, made.trajectories[1])), 0)


def test_a_reward_without_a_token_is_left_out() -> None:
    empty = structs.replace(branching("a", 1.0), trajectories=(), turns=())
    assert rows.rollout_rows(empty, 0) == "it has a reward, and no token to train (the model was not called)"


def test_names_of_the_agent_reach_veRL_and_none_collides_with_its_own() -> None:
    one = rows.rollout_rows(branching("r", 0.5, rewards={"style": 0.2}, metrics={"reward": 9.0}), 0)
    assert isinstance(one, rows.RolloutRows)
    info = rows.queue_entries(PROMPT, one)[0].fields["extra_fields"]["reward_extra_info"]
    assert info == {
        "style": 0.2,
        "reward_of_agent": 9.0,
        "policy_failure": 0.0,
        "attempts": 1.0,
        "rows": 2.0,
        "sampled_tokens": 5.0,
        "excluded_tokens": 0.0,
    }


# --- credit --------------------------------------------------------------------------------------

TURNS = {"t1": 0.1, "t2": 0.2, "t3": 0.4}


def scores_of(
    credit: rows.CreditAssignment, made: RolloutResult | None = None, **how: Any
) -> list[list[float]]:
    one = rows.rollout_rows(made or branching("r", 1.0, turn_rewards=TURNS), 0, credit=credit, **how)
    assert isinstance(one, rows.RolloutRows)
    return [entry.fields["rm_scores"].tolist() for entry in rows.queue_entries(PROMPT, one)]


def test_each_turns_reward_is_once_on_its_last_token_and_the_sessions_at_the_end_of_every_row() -> None:
    first, second = scores_of(rows.CreditAssignment(turns=True))
    assert first == pytest.approx([0, 0.1, 0, 0.2 + 1.0])
    assert second == pytest.approx([0, 0.4 + 1.0])
    assert scores_of(rows.CreditAssignment()) == [[0, 0, 0, 1.0], [0, 1.0]]
    assert scores_of(rows.CreditAssignment(turns=True), branches="main") == [pytest.approx(first)]


def test_rows_add_up_to_the_whole_session_for_estimators_that_see_only_the_sum() -> None:
    first, second = scores_of(rows.CreditAssignment(turns=True, one_sum=True))
    assert first == pytest.approx([0, 0.1, 0, 1.6])
    assert second == pytest.approx([0, 1.7])
    halved = scores_of(rows.CreditAssignment(turns=True, one_sum=True, discount=0.5))
    assert [sum(row) for row in halved] == pytest.approx([0.1 + 0.5 * (0.2 + 0.5 * 1.4)] * 2)


def test_what_follows_a_token_adds_up_to_the_discounted_return_of_its_turn() -> None:
    first, second = scores_of(rows.CreditAssignment(turns=True, discount=0.5))
    assert [sum(first), sum(first[2:]), sum(second)] == pytest.approx([0.1 + 0.5 * 1.2, 1.2, 1.4])
    unrewarded = scores_of(rows.CreditAssignment(turns=True, discount=0.5), branching("r", 1.0))
    assert [sum(unrewarded[0]), sum(unrewarded[0][2:])] == pytest.approx([0.5, 1.0])


@given(st.integers(0, 2**32), st.floats(0, 1))
@example(204, 1.0)  # no turn has a reward of its own, so the row has one token reward
def test_a_session_in_one_row_has_the_returns_of_the_embedded_trainer(seed: int, discount: float) -> None:
    for group in Maker(seed, True).groups():
        expected = turn_returns([group], outcome="last", discount=discount)
        for one_sum in (False, True):
            credit = rows.CreditAssignment(turns=True, discount=discount, one_sum=one_sum)
            for one in rows.group_rows(group.finished, quorum=1, credit=credit).sessions:
                returns = expected[one.result.rollout.id]
                if len(one.rows) == 1:
                    (row,) = one.rows
                    ends = [turn.end - row.prompt_length - 1 for turn in row.turns]
                    after = [sum(value for at, value in row.token_rewards if at >= end) for end in ends]
                    assert after == pytest.approx(list(returns.values()), abs=1e-6)
                if one_sum:
                    sums = [sum(value for _, value in row.token_rewards) for row in one.rows]
                    assert sums == pytest.approx([next(iter(returns.values()))] * len(sums), abs=1e-6)


def test_named_rewards_are_weighed_and_those_of_turns_with_them() -> None:
    named = {"rewards": {"format": 1.0, "answer": 0.5}, "named_turn_rewards": {"format": {"t1": 2.0}}}
    made = branching("r", 9.0, turn_rewards={"t3": 1.0}, **named)
    weights = {"format": 0.25, "answer": 2.0}
    one = rows.rollout_rows(made, 0, credit=rows.CreditAssignment(weights=weights, turns=True))
    assert isinstance(one, rows.RolloutRows)
    assert one.score == pytest.approx(1.25)
    assert (one.info["format"], one.info["answer"], "unused_turn_rewards" in one.info) == (1.0, 0.5, False)
    first, second = scores_of(rows.CreditAssignment(weights=weights, turns=True), made)
    assert first == pytest.approx([0, 0.5, 0, 1.25])
    assert second == pytest.approx([0, 2.25])
    plain = rows.rollout_rows(made, 0, credit=rows.CreditAssignment(weights=weights))
    assert isinstance(plain, rows.RolloutRows) and plain.info["unused_turn_rewards"] == 2.0
    assert rows.baseline(made, floor=0.0, credit=rows.CreditAssignment(weights=weights)) == pytest.approx(
        1.25
    )
    failure = failed("f", FailureKind.POLICY)
    kept = rows.rollout_rows(
        failure, 0, floor=-1.0, credit=rows.CreditAssignment(weights=weights, turns=True)
    )
    assert isinstance(kept, rows.RolloutRows) and kept.score == -1.0


def test_a_greedy_baseline_stands_for_the_mean_return_of_its_turns() -> None:
    made = branching("r", 1.0, turn_rewards=TURNS)
    credit = rows.CreditAssignment(turns=True)
    assert rows.baseline(made, floor=0.0, credit=credit) == pytest.approx((1.7 + 1.6 + 1.4) / 3)
    assert rows.baseline(failed("f", FailureKind.TASK), floor=0.0, credit=credit) is None


# --- settings ------------------------------------------------------------------------------------


def config(**afield: Any) -> dict[str, Any]:
    val = {"temperature": 0, "top_p": 1.0, "top_k": -1, "n": 2, "do_sample": False}
    rollout = {"name": "afield", "n": 4, "temperature": 0.9, "top_p": 1.0, "top_k": -1, "val_kwargs": val}
    rollout |= {"prompt_length": 100, "response_length": 50, "max_model_len": None}
    return {
        "afield": afield,
        "algorithm": {"adv_estimator": "grpo"},
        "trainer": {
            "project_name": "my project",
            "experiment_name": "a/b",
            "default_local_dir": "out",
            "v1": {"trainer_mode": "sync", "sampler": {"sync_refill_failed_groups": False}},
        },
        "actor_rollout_ref": {
            "model": {"path": "model"},
            "actor": {"loss_agg_mode": "token-mean"},
            "rollout": rollout,
        },
    }


def test_the_command_line_counts_before_the_environment_and_that_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "verl.toml"
    file.write_text('[verl]\nagent = "agent.py:agent"\nworkers = 3\nconcurrency = 5\nfloor = -1.0\n')
    monkeypatch.setenv("AFIELD_VERL_WORKERS", "4")
    monkeypatch.setenv("AFIELD_VERL_CONCURRENCY", "6")
    monkeypatch.setenv("AFIELD_VERL_OPTIONS__LIMITS__MEMORY_MB", "512")
    found = settings.read(config(file=str(file), concurrency=7, runtime=None)).settings
    assert (found.concurrency, found.workers, found.floor, found.runtime) == (7, 4, -1.0, "process")
    assert found.options == {"limits": {"memory_mb": 512}}
    assert found.agent == f"{tmp_path / 'agent.py'}:agent"


def test_what_veRL_has_keys_for_is_read_from_them() -> None:
    found = settings.read(config())
    trainer = found.trainer
    assert (trainer.rollouts, trainer.val_rollouts, found.quorum) == (4, 2, 2)
    assert (trainer.sampling.temperature, trainer.sampling.top_k, trainer.sampling.max_tokens) == (0.9, 0, 50)
    assert trainer.val_sampling.temperature == 0
    assert trainer.budget.context == 150
    assert trainer.name == "my-project-a-b"
    assert trainer.folder == "out/afield"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"agnet": "x"}, "unknown key 'agnet' in afield; did you mean 'agent'?"),
        ({"branches": "both"}, "branches = 'both' must be one of: auto, all, main"),
        ({"concurrency": "many"}, "concurrency = 'many' must be a whole number"),
        ({"quorum": 5}, "afield.quorum=5 is more than the 4 rollouts of a group"),
        ({"attempt_timeout_s": 0}, "attempt_timeout_s = 0 must be positive"),
        ({"gateway": "there"}, "gateway 'there' must be an address"),
        ({"credit": "turn"}, "credit = 'turn' must be one of: outcome, turns"),
        ({"discount": 1.5}, "discount = 1.5 must be from 0 to 1"),
        ({"rewards": {"format": float("nan")}}, "rewards.format = nan must be a finite number"),
    ],
)
def test_wrong_settings_are_named_by_their_key(change: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError) as caught:
        settings.read(config(**change))
    assert told in str(caught.value)


def test_an_estimator_that_compares_rows_needs_a_word_about_branches() -> None:
    whole = config()
    whole["algorithm"]["adv_estimator"] = "rloo"
    with pytest.raises(UsageError, match=r"adv_estimator=rloo veRL compares rows.*branches=main"):
        settings.read(whole)
    assert settings.read(whole | {"afield": {"branches": "main"}}).branches == "main"


def test_veRL_credit_settings_equal_those_of_the_embedded_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFIELD_VERL_REWARDS__FORMAT", "0.2")
    whole = config(credit="turns", discount=0.5)
    found = settings.read(whole).credit
    assert found == rows.CreditAssignment(weights={"format": 0.2}, turns=True, discount=0.5, one_sum=True)
    whole["algorithm"]["adv_estimator"] = "gae"
    assert not settings.read(whole).credit.one_sum


def test_rows_are_weighted_only_where_veRL_counts_rows() -> None:
    whole = config()
    assert not settings.read(whole).weighted
    whole["actor_rollout_ref"]["actor"]["loss_agg_mode"] = "seq-mean-token-mean"
    assert settings.read(whole).weighted


def test_the_page_on_verl_names_only_keys_of_the_block() -> None:
    page = (ROOT / "docs" / "how-to" / "verl.md").read_text()
    table = page.partition("## The `afield` block")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    listed = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert listed and listed <= {*settings.VerlSettings.__struct_fields__, "file"}


# --- data sets -----------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["parquet", "jsonl"])
def test_tasks_come_back_from_a_data_set_as_they_were(
    end: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [{"id": "a", "question": "2+2?", "deep": {"x": [1, None]}}, {"question": "3?", "other": 1.5}]
    source, out = tmp_path / "sums.jsonl", tmp_path / f"train.{end}"
    source.write_text("\n".join(map(json.dumps, given)))
    assert dataset.main([str(source), str(out)]) == 0
    assert capsys.readouterr().out == f"2 rows in {out}\n"
    if end == "parquet":
        from pyarrow import parquet

        found = parquet.read_table(out).to_pylist()
    else:
        found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [dataset.task_of(row) for row in found] == read_tasks(source)
    assert found[0]["prompt"] == [{"role": "user", "content": "2+2?"}]
    assert {row["data_source"] for row in found} == {"sums"}
    assert [row["extra_info"]["index"] for row in found] == [0, 1]


def test_a_row_that_was_made_for_veRL_is_a_task_too() -> None:
    row = {
        "data_source": "gsm8k",
        "raw_prompt": [{"role": "user", "content": "1+1?"}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 4},
        "uid": "u",
        "dummy_tensor": torch.tensor([0]),
        "global_steps": 3,
    }
    task = dataset.task_of(row)
    assert task.id.startswith("gsm8k-")
    assert task.input["prompt"] == row["raw_prompt"]
    assert task.input["reward_model"]["ground_truth"] == "2"
    assert set(task.input) == {"data_source", "prompt", "reward_model", "extra_info"}
    assert dataset.task_of(row | {"uid": "other", "global_steps": 9}) == task


def test_a_data_set_that_cannot_be_written_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "tasks.jsonl"
    source.write_text('{"q": 1}\n')
    assert dataset.main([str(source), str(tmp_path / "out.csv")]) == 2
    assert "must end in .parquet or .jsonl" in capsys.readouterr().err
    assert dataset.main([str(source), str(tmp_path / "o.jsonl"), "--prompt", "text"]) == 2
    assert "task 'line-1' has no 'text'; choose one of its keys for --prompt: q" in capsys.readouterr().err


def test_messages_of_a_task_are_its_prompt() -> None:
    task = Task(
        "t", {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"}]}
    )
    assert dataset.rows([task], source="s")[0]["prompt"] == task.input["prompt"]
