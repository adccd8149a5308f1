"""A loop of one's own: what is sampled is what is trained, and the loop learns."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from msgspec import structs

from afield.batches.rows import Row
from afield.errors import UsageError
from afield.factory.tuner import open_tuner
from afield.trainers.grpo import GRPO
from afield.trainers.tinker import (
    LossInputs,
    Objective,
    SampledReply,
    Sampling,
    Tuner,
    rows_from_groups,
    supervised_row,
)
from afield.trajectories import per_turn
from afield.types import FinishReason, Message, Trajectory
from support.paths import ROOT
from support.tiny_model import build_tiny_model
from support.tokenizers import encode_text
from support.training_groups import finished, forest, group, group_of

PAGE = ROOT / "docs" / "how-to" / "own-loop.md"
SHORT = Sampling(max_tokens=12)
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the value of seven?"}]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("tinker") / "model", hidden=32, max_positions=256)


@pytest.fixture
def tuner(model_path: Path) -> Iterator[Tuner]:
    with open_tuner(model_path, lr=1e-2, device="cpu") as opened:
        yield opened


def apart(tuner: Tuner, replies: list[SampledReply]) -> float:
    """How far the trainer's log-probabilities are from the sampler's, at most."""
    scores = tuner.logprobs([reply.to_row(1.0) for reply in replies])
    pairs = zip(replies, scores, strict=True)
    told = [(r, s) for reply, score in pairs for r, s in zip(flat(reply), score, strict=True)]
    return max(abs(one - other) for one, other in told)


def flat(reply: SampledReply) -> list[float]:
    return [logprob for part in reply.conversation() for logprob in part.logprobs]


def weights(tuner: Tuner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tuner.policy.model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_trainer_gives_what_was_sampled_the_same_log_probabilities(tuner, temperature):
    replies = tuner.sample(ASKED, 6, structs.replace(SHORT, temperature=temperature))
    assert len({reply.token_ids for reply in replies}) > 1
    assert apart(tuner, replies) < 1e-5


def test_after_an_update_what_is_sampled_comes_from_the_new_weights(tuner):
    first = tuner.sample(ASKED, 4, SHORT)
    data = [reply.to_row(1.0 - n) for n, reply in enumerate(first)]
    tuner.forward_backward(data)
    assert tuner.optim_step() > 0
    second = tuner.sample(ASKED, 4, SHORT)
    assert apart(tuner, second) < 1e-5
    assert apart(tuner, first) > 1e-3
    assert {span.low for reply in first for span in reply.versions} == {0}
    assert {span.low for reply in second for span in reply.versions} == {1}
    assert not {reply.id for reply in first} & {reply.id for reply in second}


def test_a_conversation_of_several_replies_is_one_sequence_as_it_was_sampled(tuner):
    first = tuner.sample(ASKED, 1, SHORT)[0]
    second = tuner.sample("and of eight?", 1, SHORT, after=first)[0]
    third = tuner.sample([Message(role="user", content="why?")], 1, SHORT, after=second)[0]
    assert third.prompt_ids[: len(second.ids)] == second.ids
    assert second.prompt_ids[: len(first.ids)] == first.ids
    row = third.to_row([1.0, 0.5, 0.0]).trajectory
    owned = [tuple(row.token_ids[turn.start : turn.end]) for turn in row.turns]
    assert owned == [first.token_ids, second.token_ids, third.token_ids]
    assert apart(tuner, [third]) < 1e-5
    with pytest.raises(UsageError, match="2 advantages for 3 replies"):
        third.to_row([1.0, 0.0])


def test_ids_may_be_given_for_messages_and_after_a_reply(tuner):
    ids = tuner.sampler.tokenizer.render([Message(role="user", content="hello")], [])
    by_ids = tuner.sample(ids, 1, SHORT)[0]
    assert by_ids.prompt_ids == tuple(ids)
    more = tuner.sample([5, 6, 7], 1, SHORT, after=by_ids)[0]
    assert more.prompt_ids == (*by_ids.ids, 5, 6, 7)
    assert apart(tuner, [more]) < 1e-5


def test_conversation_continues_after_a_truncated_reply(tuner):
    cut = next(r for r in tuner.sample(ASKED, 8, Sampling(max_tokens=2)) if r.finish is FinishReason.LENGTH)
    assert len(cut.token_ids) == 2
    assert apart(tuner, tuner.sample("go on", 2, SHORT, after=cut)) < 1e-5


def test_many_prompts_are_answered_at_once_in_their_order(tuner):
    prompts = [f"the value of {word}?" for word in ("one", "two", "three")]
    replies = tuner.sample_all([(prompt, None) for prompt in prompts], SHORT)
    render = tuner.sampler.tokenizer.render
    asked = [tuple(render([Message(role="user", content=prompt)], [])) for prompt in prompts]
    assert [reply.prompt_ids for reply in replies] == asked


def test_gradients_add_up_over_calls_that_make_one_update(tuner, model_path):
    data = [reply.to_row(1.0 - n / 2) for n, reply in enumerate(tuner.sample(ASKED, 4, SHORT))]
    tuner.forward_backward(data)
    whole = [p.grad.clone() for p in tuner.policy.trainable if p.grad is not None]
    tuner.optimizer.zero_grad()
    for part in (data[:1], data[1:]):
        tuner.forward_backward(part, num_rollouts=len(data))
    parts = [p.grad for p in tuner.policy.trainable if p.grad is not None]
    off = math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(whole, parts, strict=True)))
    assert off < 1e-5 * math.sqrt(sum(float(g.square().sum()) for g in whole))


def test_collected_groups_train_as_the_trainer_of_a_run_would(model_path):
    groups = [group_of([1.0, 0.0, 0.5]), split_group()]
    trainer = GRPO(model_path, lr=1e-2, device="cpu")
    trainer.step(groups)
    with open_tuner(model_path, lr=1e-2, device="cpu") as tuner:
        report = tuner.forward_backward(rows_from_groups(groups))
        assert report.metrics["rollouts"] == 5
        tuner.optim_step()
        ours = weights(tuner)
    for name, tensor in trainer.model.state_dict().items():
        assert torch.allclose(ours[name], tensor, atol=1e-6), name


def split_group():
    rows = [per_turn(forest(n, turns=3)).trajectories for n in (5, 6)]
    return group(*(finished(str(n), float(n), part, "split") for n, part in enumerate(rows)), name="split")


@pytest.mark.parametrize("loss", ["ppo", "cispo", "gspo", Objective("ppo", (0.1, 0.1), kl=0.1)])
def test_updates_make_what_earned_more_likelier(model_path, loss):
    with open_tuner(model_path, lr=3e-3, device="cpu", reference=True) as tuner:
        replies = tuner.sample(ASKED, 4, SHORT)
        data = [reply.to_row(1.0 if n == 0 else -0.3) for n, reply in enumerate(replies)]
        before = tuner.logprobs(data)
        for _ in range(3):
            report = tuner.forward_backward(data, loss, proximal=before)
            tuner.optim_step()
        gained = [sum(now) - sum(then) for now, then in zip(tuner.logprobs(data), before, strict=True)]
        assert gained[0] > max(gained[1:])
        assert report.metrics["ratio_max"] > 1


def test_a_loss_may_be_a_function(tuner):
    data = [reply.to_row(1.0) for reply in tuner.sample(ASKED, 2, SHORT)]

    def reinforce(seen: LossInputs) -> torch.Tensor:
        return -seen.advantage * seen.logp

    word = tuner.forward_backward(data, "cross_entropy")
    own = tuner.forward_backward(data, reinforce)
    assert own.loss == pytest.approx(word.loss)
    with pytest.raises(
        UsageError, match=r"a loss function returned \(\) losses for \d+ tokens; return one loss per token"
    ):
        tuner.forward_backward(data, lambda seen: seen.logp.sum())


def test_supervised_rows_train_tokens_that_were_not_sampled(tuner):
    prompt = tuner.sampler.tokenizer.render([Message(role="user", content="the value of seven?")], [])
    answer = [*encode_text(tuner.sampler.tokenizer, "42"), *tuner.sampler.tokenizer.stop_ids[:1]]
    for _ in range(30):
        tuner.forward_backward([supervised_row("lesson", prompt, answer)], "cross_entropy")
        tuner.optim_step()
    greedy = tuner.sample(prompt, 1, Sampling(temperature=0, max_tokens=8))[0]
    assert greedy.text == "42"
    # A greedy reply can be imitated, but not trained with: its distribution cannot be reproduced.
    tuner.forward_backward([greedy.to_row(1.0)], "cross_entropy")
    with pytest.raises(UsageError, match="sampled with temperature 0"):
        tuner.forward_backward([greedy.to_row(1.0)], "ppo")


def test_saved_weights_are_a_model(tuner, tmp_path):
    tuner.forward_backward([tuner.sample(ASKED, 1, SHORT)[0].to_row(1.0)])
    tuner.optim_step()
    tuner.save_weights(tmp_path / "weights")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "weights", dtype="float32")
    assert all(torch.equal(t, tuner.policy.model.state_dict()[n]) for n, t in loaded.state_dict().items())
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "weights").encode("seven")


def test_loop_that_resumes_from_a_saved_state_continues_bit_for_bit(model_path, tmp_path):
    def turn(tuner: Tuner) -> list[SampledReply]:
        replies = tuner.sample(ASKED, 4, SHORT)
        tuner.forward_backward([reply.to_row(n - 1.5) for n, reply in enumerate(replies)])
        tuner.optim_step()
        return replies

    with open_tuner(model_path, lr=1e-2, device="cpu") as unbroken:
        turn(unbroken)
        turn(unbroken)
        unbroken.save_state(tmp_path / "state")
        third = turn(unbroken)
        expected = weights(unbroken)
    with open_tuner(model_path, lr=1e-2, device="cpu") as again:
        again.load_state(tmp_path / "state")
        replies = turn(again)
        assert [reply.token_ids for reply in replies] == [reply.token_ids for reply in third]
        assert same(expected, weights(again))
        with pytest.raises(UsageError, match=r"holds no tuner\.pt"):
            again.load_state(tmp_path)


def test_the_learning_rate_that_counts_is_the_one_given_last(model_path, tmp_path):
    def moved(tuner: Tuner, lr: float | None = None) -> float:
        before = weights(tuner)
        tuner.forward_backward([tuner.sample(ASKED, 1, SHORT)[0].to_row(1.0)])
        tuner.optim_step(lr)
        return max(float((tensor - before[name]).abs().max()) for name, tensor in weights(tuner).items())

    with open_tuner(model_path, lr=1e-2, device="cpu") as first:
        assert moved(first) > 0
        assert moved(first, 0.0) == 0
        assert moved(first) > 0  # what was said of one step is not said of the next
        first.save_state(tmp_path / "state")
    with open_tuner(model_path, lr=0.0, device="cpu") as still:
        still.load_state(tmp_path / "state")
        assert moved(still) == 0
        assert moved(still, 1e-2) > 0


def test_weights_and_states_do_not_overwrite_a_file(tuner, tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_text("a week's work")
    for save in (tuner.save_weights, tuner.save_state):
        with pytest.raises(UsageError, match=r"notes\.txt is a file; name a directory"):
            save(notes)
    assert notes.read_text() == "a week's work"


def test_what_cannot_be_is_refused_before_anything_adds_up(tuner, model_path):
    reply = tuner.sample(ASKED, 1, SHORT)[0]
    datum = reply.to_row(1.0)
    stray = structs.replace(datum.trajectory, token_ids=(*datum.trajectory.token_ids[:-1], 9999))
    refused = {
        r"rollout reply-0, turn reply-0: token id 9999 is outside": [
            structs.replace(datum, trajectory=stray)
        ],
        "rollout reply-0: its sequences weigh 2 together": [datum, datum],
        "there is nothing to learn from": [],
    }
    for told, data in refused.items():
        with pytest.raises(UsageError, match=told):
            tuner.forward_backward(data)
    with pytest.raises(UsageError, match="unknown loss 'dpo'; choose one of: ppo"):
        tuner.forward_backward([datum], "dpo")
    with pytest.raises(UsageError, match="'constant' needs a length"):
        tuner.forward_backward([datum], aggregate="constant")
    with pytest.raises(UsageError, match=r"rollout reply-0: 1 proximal log-probabilities for \d+"):
        tuner.forward_backward([datum], proximal=[[-1.0]])
    with pytest.raises(UsageError, match="there is no gradient; call forward_backward first"):
        tuner.optim_step()
    with pytest.raises(UsageError, match="leaves no room in a context of 256"):
        tuner.sample([1] * 256)


def test_a_sampler_that_is_not_the_trainer_is_refused_where_that_is_wanted(model_path):
    with open_tuner(model_path, lr=1e-2, device="cpu", max_logprob_diff=1e-4) as tuner:
        reply = tuner.sample(ASKED, 1, SHORT)[0]
        tuner.forward_backward([reply.to_row(1.0)])
        row: Trajectory = reply.to_row(1.0).trajectory
        place = row.turns[0].start
        logprobs = (*row.logprobs[:place], row.logprobs[place] - 1, *row.logprobs[place + 1 :])
        off = Row(rollout_id="off", trajectory=structs.replace(row, logprobs=logprobs), advantages=(1.0,))
        with pytest.raises(UsageError, match="rollout off, turn reply-0: sampler and trainer differ by 1 "):
            tuner.forward_backward([off])


def test_closed_tuner_raises_usage_error(model_path):
    with open_tuner(model_path, lr=1e-2, device="cpu") as tuner:
        pass
    tuner.close()
    with pytest.raises(UsageError, match=r"with open_tuner"):
        tuner.sample(ASKED)


def test_the_loop_on_the_page_runs(model_path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = next(
        code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "open_tuner" in code
    )
    named: dict[str, Any] = {}
    exec(compile(shown, "training.md", "exec"), named)
    named["learn"](str(model_path), steps=2)
    assert (tmp_path / "weights" / "config.json").is_file()
