"""Finished rollouts to the rows veRL 0.9 trains on: what goes under `{uid}_{session}_{index}`.

A row's prompt is everything before the first token it owns. Each sampled token is owned by one row and is
context (mask 0) in the others, so that a mean over tokens counts a session the same, branched or not. All
rows of a session carry its reward; with credit by turns, what a turn got is on its last token, in the one
row that owns it. A rollout that failed by no doing of the policy makes no row at all, and
neither does a group with fewer rewards than its quorum: nothing is padded, and nothing counts as 0. Ids,
masks and log-probabilities that do not line up are refused, naming rollout and turn.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct, structs

from afield.batches.groups import from_groups
from afield.batches.rewards import turn_returns, turn_rewards, unused_turn_rewards, weigh_rewards
from afield.batches.sample import Sample
from afield.errors import UsageError
from afield.exclusions import UntrainedReason
from afield.token_account import TokenAccount, count_tokens, metric_name
from afield.types import FailureKind, Group, ImageSpan, RolloutResult, Turn
from afield.vision import FAMILIES, Vision, decode_image

if TYPE_CHECKING:
    import torch

log = logging.getLogger("afield.verl")
CONSUMED = ("validate", "agent_name", "__rollout_n__", "__do_sample__", "multi_modal_data")
TAKEN = "reward"  # veRL keeps its own list under this name beside those of `reward_extra_info`


class CreditAssignment(Struct, frozen=True, kw_only=True):
    """What of an outcome counts, and where in a row it is."""

    weights: Mapping[str, float] = {}
    """Weights of named rewards, whose sum takes the place of the reward; empty takes the reward as it is."""
    turns: bool = False
    """Whether rewards of turns count, at the ends of their turns."""
    discount: float = 1.0
    """What a turn's return counts for the turn before it in the row."""
    one_sum: bool = False
    """Whether every row adds up to the whole session's return: for estimators that look at nothing else."""


PLAIN = CreditAssignment()


class Row(Struct, frozen=True, kw_only=True):
    """`logprobs` is 0 where the mask is; `weight` is its share of the session's sampled tokens."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    response_mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    low: int  # policy versions that sampled it
    high: int
    turns: int
    weight: float
    scores: tuple[tuple[int, float], ...]  # rewards, and the places in the response where they are
    images: tuple[ImageSpan, ...] = ()


class RolloutRows(Struct, frozen=True, kw_only=True):
    """A rollout that trains: which of its group it is, its rows, and what it is worth."""

    number: int
    rows: tuple[Row, ...]
    score: float
    info: dict[str, float]
    metrics: dict[str, float]
    finished: RolloutResult


class GroupRows(Struct, frozen=True, kw_only=True):
    """A group as veRL gets it. `dropped` says why nothing of it trains; `left_out` why a rollout does not."""

    sessions: tuple[RolloutRows, ...]
    left_out: dict[str, str]
    dropped: str | None = None


def group_rows(
    finished: Sequence[RolloutResult],
    *,
    quorum: int,
    floor: float = 0.0,
    branches: Literal["all", "main"] = "all",
    image_id: int | None = None,
    credit: CreditAssignment = PLAIN,
) -> GroupRows:
    """Which rollouts of a group train, in the order they were begun."""
    sessions: list[RolloutRows] = []
    left_out: dict[str, str] = {}
    for number, one in enumerate(finished):
        made = rollout_rows(one, number, floor=floor, branches=branches, image_id=image_id, credit=credit)
        if isinstance(made, RolloutRows):
            sessions.append(made)
        else:
            left_out[one.rollout.id] = made
    if len(sessions) >= quorum:
        return GroupRows(sessions=tuple(sessions), left_out=left_out)
    told = f"{len(sessions)} of {len(finished)} rollouts can be trained, {quorum} are needed"
    why = f"; {next(iter(left_out.values()))}" if left_out else ""
    return GroupRows(sessions=(), left_out=left_out, dropped=told + why)


def token_account(finished: Sequence[RolloutResult], judged: GroupRows) -> TokenAccount:
    """What became of a group's sampled tokens; veRL alone knows which of its rows have an advantage."""
    account = count_tokens(finished)
    if judged.dropped:
        return account.idle(UntrainedReason.DROPPED_GROUP)
    trained = sum(sum(row.response_mask) for one in judged.sessions for row in one.rows)
    untrained = Counter(account.untrained)
    untrained[UntrainedReason.OTHER_BRANCH] += account.trained - trained
    return TokenAccount(trained=trained, excluded=account.excluded, untrained=+untrained)


def rollout_rows(
    finished: RolloutResult,
    number: int,
    *,
    floor: float = 0.0,
    branches: Literal["all", "main"] = "all",
    image_id: int | None = None,
    credit: CreditAssignment = PLAIN,
) -> RolloutRows | str:
    """A rollout as rows; or why it has none. `image_id` is the model's placeholder for images."""
    unused = _unused(finished, credit)
    finished = _weighed(finished, credit)
    outcome = finished.outcome
    score = outcome.reward_or_floor(floor)
    failure = outcome.failure
    if score is None:
        assert failure is not None
        return f"{failure.kind}/{failure.reason}: {failure.message[:300]}"
    if not finished.trajectories:
        excluded = ", ".join(sorted({e.reason for e in finished.excluded})) or "the model was not called"
        return f"it has a reward, and no token to train ({excluded})"
    if image_id is not None and (stray := _stray(finished, image_id)):
        return f"turn {stray} sampled the placeholder of images, for which veRL's model would want pixels"
    kept = from_groups([_alone(finished)], floor=floor, images=True).samples
    if branches == "main":
        kept = (max(kept, key=lambda sample: sample.owned),)
    parents = {turn.id: turn.parent for turn in finished.turns}
    earned = _earned(finished, score, credit)
    return RolloutRows(
        number=number,
        rows=tuple(
            _row(sample, parents, finished.trajectories[sample.row].images, earned, alone=len(kept) == 1)
            for sample in kept
        ),
        score=score,
        info=_info(finished, unused),
        metrics=_metrics(finished.turns),
        finished=finished,
    )


def _alone(finished: RolloutResult) -> Group:
    rollout = finished.rollout
    return Group(
        id=rollout.group_id, task_id=rollout.task.id, epoch=0, split=rollout.split, finished=(finished,)
    )


# --- what turns earn -----------------------------------------------------------------------------


def _weighed(finished: RolloutResult, credit: CreditAssignment) -> RolloutResult:
    return weigh_rewards([_alone(finished)], credit.weights)[0].finished[0] if credit.weights else finished


def _unused(finished: RolloutResult, credit: CreditAssignment) -> int:
    how = "turns" if credit.turns else "outcome"
    return unused_turn_rewards([_alone(finished)], credit=how, weights=credit.weights)


class _Earned(Struct, frozen=True):
    """Of a session: its reward, those of its trained turns, and what a row has to add up to, if anything."""

    score: float
    turns: Mapping[str, float]
    discount: float
    total: float | None

    def scores(self, sample: Sample) -> tuple[tuple[int, float], ...]:
        """The turns' rewards at their ends, the session's at the end of the row.

        With a discount, what is behind any token adds up to the discounted return of its turn.
        """
        if not self.turns and self.discount == 1.0:
            return ((len(sample.response_ids) - 1, self.score),)
        made: list[tuple[int, float]] = []
        later = 0.0
        for turn in reversed(sample.turns):
            reward = self.turns.get(turn.id, 0.0) + (0.0 if made else self.score)
            made.append((turn.end - 1, reward + (self.discount - 1.0) * later))
            later = reward + self.discount * later
        if self.total is not None:
            end, reward = made[0]
            made[0] = end, reward + self.total - math.fsum(value for _, value in made)
        return tuple(reversed(made))


def _earned(finished: RolloutResult, score: float, credit: CreditAssignment) -> _Earned:
    given = turn_rewards(finished) if credit.turns else {}
    total = None
    if credit.turns and credit.one_sum:
        total = next(iter(_returns(finished, score, credit).values()))
    return _Earned(score, given, credit.discount if credit.turns else 1.0, total)


def _returns(finished: RolloutResult, floor: float, credit: CreditAssignment) -> dict[str, float]:
    made = turn_returns([_alone(finished)], outcome="last", discount=credit.discount, floor=floor)
    return made[finished.rollout.id]


def baseline(finished: RolloutResult, *, floor: float, credit: CreditAssignment) -> float | None:
    """What a greedy rollout is worth to compare with: its reward, or the mean return of its turns."""
    finished = _weighed(finished, credit)
    score = finished.outcome.reward_or_floor(floor)
    if score is None or not credit.turns:
        return score
    returns = _returns(finished, floor, credit)
    return math.fsum(returns.values()) / len(returns) if returns else score


def _row(
    sample: Sample,
    parents: Mapping[str, str | None],
    images: tuple[ImageSpan, ...],
    earned: _Earned,
    *,
    alone: bool,
) -> Row:
    calls, above = 1, parents.get(sample.turns[-1].id)
    while above is not None:
        calls, above = calls + 1, parents.get(above)
    return Row(
        prompt_ids=sample.prompt_ids,
        response_ids=sample.response_ids,
        response_mask=sample.response_mask,
        logprobs=sample.logprobs,
        low=min(span.low for span in sample.versions),
        high=max(span.high for span in sample.versions),
        turns=2 * calls,  # veRL counts what was asked as well as what was answered
        weight=1.0 if alone else sample.weight,
        images=images,
        scores=earned.scores(sample),
    )


def _stray(finished: RolloutResult, image_id: int) -> str:
    """A turn with a placeholder that stands for no image."""
    return next((turn.id for turn in finished.turns if image_id in turn.token_ids), "")


@cache
def vision_of(model: str) -> Vision | None:
    """The vision part of a model; None for one without, or of a kind that is not supported."""
    try:
        return Vision.load(model)
    except UsageError as error:
        log.warning("%s; rollouts with images are refused", error)
        return None


def _info(finished: RolloutResult, unused: int) -> dict[str, float]:
    """What veRL shows and validates beside the reward, by the agent's own names."""
    outcome = finished.outcome
    failed = outcome.failure is not None and outcome.failure.kind is FailureKind.POLICY
    given = {**outcome.metrics, **outcome.rewards, "policy_failure": float(failed)}
    given["attempts"] = float(finished.attempts)
    given["rows"] = float(len(finished.trajectories))
    tokens = count_tokens([finished])
    given["sampled_tokens"] = float(tokens.sampled)
    given["excluded_tokens"] = float(sum(tokens.excluded.values()))
    given |= {"unused_turn_rewards": float(unused)} if unused else {}
    given |= {f"excluded_tokens.{metric_name(reason)}": float(n) for reason, n in tokens.excluded.items()}
    return {f"{name}_of_agent" if name == TAKEN else name: value for name, value in given.items()}


def _metrics(turns: Sequence[Turn]) -> dict[str, float]:
    """Seconds under the names of veRL's `AgentLoopMetrics`: in model calls, and between them."""
    spans = sorted((turn.started, turn.ended) for turn in turns if turn.ended is not None)
    calling, between, end = 0.0, 0.0, None
    for started, ended in spans:
        if end is not None:
            between += max(0.0, started - end)
        calling += max(0.0, ended - (started if end is None else max(started, end)))
        end = ended if end is None else max(end, ended)
    return {
        "generate_sequences": calling,
        "tool_calls": between,
        "compute_score": 0.0,
        "num_preempted": -1,  # not known
    }


def with_versions(made: RolloutRows, low: int, high: int) -> RolloutRows:
    """With versions that somebody else knows, where the gateway cannot."""
    return structs.replace(made, rows=tuple(structs.replace(row, low=low, high=high) for row in made.rows))


# --- as veRL stores them -------------------------------------------------------------------------


class QueueEntry(Struct, frozen=True):
    """What is put under one key."""

    key: str
    fields: dict[str, Any]
    tag: dict[str, Any]


def queue_entries(
    prompt: Mapping[str, Any], made: RolloutRows, *, weighted: bool = False, vision: Vision | None = None
) -> list[QueueEntry]:
    """`prompt` is the row of veRL's batch, whose columns travel along. Rows with images need `vision`; all
    rows of a model with M-RoPE have its positions.

    `weighted` gives each row its share of the session as `rollout_is_weights`, one number for all of its
    tokens: what veRL multiplies the policy's loss with.
    """
    import torch

    return [
        QueueEntry(
            f"{prompt['uid']}_{made.number}_{index}",
            _fields(prompt, made, row, torch) | _weight(row, torch, weighted) | pixels(made, row, vision),
            _tag(prompt, row),
        )
        for index, row in enumerate(made.rows)
    ]


def _fields(prompt: Mapping[str, Any], made: RolloutRows, row: Row, torch: Any) -> dict[str, Any]:
    prompts = torch.tensor(row.prompt_ids, dtype=torch.int64)
    responses = torch.tensor(row.response_ids, dtype=torch.int64)
    mask = torch.tensor(row.response_mask, dtype=torch.int64)
    scores = torch.zeros(len(row.response_ids), dtype=torch.float32)
    for at, score in row.scores:
        scores[at] = score
    columns = {name: value for name, value in prompt.items() if name not in CONSUMED}
    return columns | {
        "session_id": made.number,
        "prompts": prompts,
        "responses": responses,
        "response_mask": mask,
        "loss_mask": mask.clone(),
        "rollout_log_probs": torch.tensor(row.logprobs, dtype=torch.float32),
        "rm_scores": scores,
        "input_ids": torch.cat([prompts, responses]),
        "position_ids": torch.arange(len(prompts) + len(responses), dtype=torch.int64),
        "multi_modal_inputs": {},
        "num_turns": row.turns,
        "metrics": dict(made.metrics),
        "extra_fields": _extra(made, row),
    }


def pixels(made: RolloutRows, row: Row, vision: Vision | None) -> dict[str, Any]:
    """What veRL's agent loop gives a vision-language model beside the ids: `multi_modal_inputs` of its
    processor, and positions in text, time, height and width."""
    import torch

    rollout_id = made.finished.rollout.id
    if vision is None:
        if row.images:
            raise UsageError(
                f"rollout {rollout_id} has images, and actor_rollout_ref.model.path has no vision part that"
                f" is supported ({', '.join(FAMILIES)}); train the model that saw them"
            )
        return {}
    kept = {image.digest: image for image in made.finished.images}
    ids = row.prompt_ids + row.response_ids
    try:
        pictures = [vision.pixels(kept[span.digest]) for span in row.images]
        vision.check(ids, row.images, pictures)
    except KeyError as error:
        raise UsageError(f"rollout {rollout_id}: its image {error} was not kept with it") from error
    except ValueError as error:
        raise UsageError(f"rollout {rollout_id}: {error}") from error
    fields: dict[str, Any] = {}
    if pictures:
        names = pictures[0].inputs
        inputs = {n: torch.cat([torch.from_numpy(one.inputs[n]) for one in pictures]) for n in names}
        if (grid := inputs.get("image_grid_thw")) is not None:
            inputs["images_seqlens"] = torch.repeat_interleave(grid[:, 1] * grid[:, 2], grid[:, 0])
        fields["multi_modal_inputs"] = inputs
    if vision.mrope:
        seen = torch.from_numpy(vision.positions(len(ids), row.images, [one.grid for one in pictures]))
        fields["position_ids"] = torch.cat([torch.arange(len(ids))[None], seen])
    return fields


def images_of(made: RolloutRows, row: Row) -> list[Any]:
    """The pictures of a row, decoded: veRL's own workers run their processor over them."""
    kept = {image.digest: image for image in made.finished.images}
    try:
        return [decode_image(kept[span.digest]) for span in row.images]
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"rollout {made.finished.rollout.id}: an image of it is not at hand: {error}"
        ) from error


def _extra(made: RolloutRows, row: Row) -> dict[str, Any]:
    return {
        "min_global_steps": row.low,
        "max_global_steps": row.high,
        "reward_extra_info": dict(made.info),
        "afield_rollout": made.finished.rollout.id,
        "afield_weight": row.weight,
    }


def _weight(row: Row, torch: Any, weighted: bool) -> dict[str, torch.Tensor]:
    return {"rollout_is_weights": torch.tensor([row.weight], dtype=torch.float32)} if weighted else {}


def _tag(prompt: Mapping[str, Any], row: Row) -> dict[str, Any]:
    before, after = len(row.prompt_ids), len(row.response_ids)
    return {
        "status": "success",
        "prompt_len": before,
        "response_len": after,
        "seq_len": before + after,
        "global_steps": int(prompt["global_steps"]),
        "min_global_steps": row.low,
        "max_global_steps": row.high,
    }
