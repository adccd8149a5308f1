"""Training rows of rollouts in veRL 0.9's format, keyed `{uid}_{session}_{index}`.

1. The prompt of a row is everything before the first token that it owns. Each sampled token is owned by one
   row and is context (mask 0) in the others, so that a mean over tokens counts every token once.
2. All rows of a session have its reward; with credit by turns, a turn's reward is on its last token, in the
   row that owns it.
3. A rollout with a task, verifier or infrastructure failure has no rows; neither has a group with fewer
   rewards than its quorum.
4. Ids, masks and log-probabilities are checked against the recorded turns.
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
from afield.batches.rows import Row
from afield.errors import UsageError
from afield.models.vision import FAMILIES, Vision, decode_image
from afield.runs.exclusions import UntrainedReason
from afield.runs.token_account import TokenAccount, count_tokens, metric_name
from afield.types import FailureKind, Group, RolloutResult, Turn

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
VERL_COLUMNS = ("validate", "agent_name", "__rollout_n__", "__do_sample__", "multi_modal_data")
RESERVED = "reward"
"""Name that veRL uses for its own list, next to `reward_extra_info`."""


class CreditAssignment(Struct, frozen=True, kw_only=True):
    """Rewards of an outcome that count, and the token of a row that gets them."""

    weights: Mapping[str, float] = {}
    """Weights of named rewards, whose sum replaces the reward; empty keeps the reward."""
    turns: bool = False
    """Whether per-turn rewards count, at the last token of their turns."""
    discount: float = 1.0
    """Discount of a turn's return for the turn before it in the row."""
    one_sum: bool = False
    """Whether every row adds up to the session's return, for estimators that use only the sum."""


PLAIN = CreditAssignment()


class RolloutRows(Struct, frozen=True, kw_only=True):
    """Rows of a trainable rollout, and its score."""

    number: int
    """Position in its group, veRL's session id."""
    rows: tuple[Row, ...]
    """Rows with rewards on their tokens."""
    score: float
    """Reward of the outcome, or the floor."""
    info: dict[str, float]
    """Agent metrics and rewards, for veRL's `reward_extra_info`."""
    metrics: dict[str, float]
    """Times for veRL's `AgentLoopMetrics`, in seconds."""
    result: RolloutResult
    """Result of the rollout."""
    versions: tuple[int, int] | None = None
    """Oldest and newest policy version from veRL; None if the gateway reports versions."""

    def row_versions(self, row: Row) -> tuple[int, int]:
        return self.versions or row.versions


class GroupRows(Struct, frozen=True, kw_only=True):
    """Rows of a group."""

    sessions: tuple[RolloutRows, ...]
    """Rows of each trainable rollout; empty if the group is dropped."""
    left_out: dict[str, str]
    """Reason by rollout id, for rollouts without rows."""
    dropped: str | None = None
    """Reason why no rollout of the group is trained; None if some are."""


def group_rows(
    finished: Sequence[RolloutResult],
    *,
    quorum: int,
    floor: float = 0.0,
    branches: Literal["all", "main"] = "all",
    image_id: int | None = None,
    credit: CreditAssignment = PLAIN,
) -> GroupRows:
    """Build the rows of a group's rollouts, in the order they were started."""
    sessions: list[RolloutRows] = []
    left_out: dict[str, str] = {}
    for number, result in enumerate(finished):
        rows = rollout_rows(result, number, floor=floor, branches=branches, image_id=image_id, credit=credit)
        if isinstance(rows, RolloutRows):
            sessions.append(rows)
        else:
            left_out[result.rollout.id] = rows
    if len(sessions) >= quorum:
        return GroupRows(sessions=tuple(sessions), left_out=left_out)
    counts = f"{len(sessions)} of {len(finished)} rollouts can be trained, {quorum} are needed"
    first = f"; {next(iter(left_out.values()))}" if left_out else ""
    return GroupRows(sessions=(), left_out=left_out, dropped=counts + first)


def token_account(finished: Sequence[RolloutResult], group: GroupRows) -> TokenAccount:
    """Trained, excluded and untrained tokens of a group; only veRL knows which rows have an advantage."""
    account = count_tokens(finished)
    if group.dropped:
        return account.idle(UntrainedReason.DROPPED_GROUP)
    trained = sum(row.owned for session in group.sessions for row in session.rows)
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
    """Rows of a rollout, or the reason why it has none. `image_id` is the model's image placeholder."""
    unused = _unused(finished, credit)
    finished = _weigh(finished, credit)
    outcome = finished.outcome
    score = outcome.reward_or_floor(floor)
    failure = outcome.failure
    if score is None:
        assert failure is not None
        return f"{failure.kind}/{failure.reason}: {failure.message[:300]}"
    if not finished.trajectories:
        excluded = ", ".join(sorted({e.reason for e in finished.excluded})) or "the model was not called"
        return f"it has a reward, and no token to train ({excluded})"
    if image_id is not None and (turn := _turn_with_placeholder(finished, image_id)):
        return f"turn {turn} sampled the placeholder of images, for which veRL's model would want pixels"
    rows = from_groups([_as_group(finished)], floor=floor, images=True).rows
    if branches == "main":
        rows = (max(rows, key=lambda row: row.owned),)
    rewards = _session_rewards(finished, score, credit)
    return RolloutRows(
        number=number,
        rows=tuple(_with_rewards(row, rewards, alone=len(rows) == 1) for row in rows),
        score=score,
        info=_info(finished, unused),
        metrics=_metrics(finished.turns),
        result=finished,
    )


def _with_rewards(row: Row, rewards: _SessionRewards, *, alone: bool) -> Row:
    trajectory = structs.replace(row.trajectory, weight=1.0) if alone else row.trajectory
    return structs.replace(row, trajectory=trajectory, token_rewards=rewards.of_row(row))


def _as_group(finished: RolloutResult) -> Group:
    rollout = finished.rollout
    return Group(
        id=rollout.group_id, task_id=rollout.task.id, epoch=0, split=rollout.split, finished=(finished,)
    )


# --- rewards -------------------------------------------------------------------------------------


def _weigh(finished: RolloutResult, credit: CreditAssignment) -> RolloutResult:
    return weigh_rewards([_as_group(finished)], credit.weights)[0].finished[0] if credit.weights else finished


def _unused(finished: RolloutResult, credit: CreditAssignment) -> int:
    kind = "turns" if credit.turns else "outcome"
    return unused_turn_rewards([_as_group(finished)], credit=kind, weights=credit.weights)


class _SessionRewards(Struct, frozen=True):
    """Rewards of a session, to be placed on the tokens of its rows."""

    score: float
    """Reward of the outcome."""
    turns: Mapping[str, float]
    """Rewards of trained turns, by id."""
    discount: float
    """Discount of later rewards, per turn."""
    total: float | None
    """Sum that the rewards of every row must have; None for any sum."""

    def of_row(self, row: Row) -> tuple[tuple[int, float], ...]:
        """Response position and reward: turn rewards at the ends of turns, the score at the end of the row.

        With a discount, the rewards behind any token add up to the discounted return of its turn.
        """
        if not self.turns and self.discount == 1.0:
            return ((len(row.response_ids) - 1, self.score),)
        rewards: list[tuple[int, float]] = []
        later = 0.0
        for turn in reversed(row.turns):
            reward = self.turns.get(turn.id, 0.0) + (0.0 if rewards else self.score)
            rewards.append((turn.end - row.prompt_length - 1, reward + (self.discount - 1.0) * later))
            later = reward + self.discount * later
        if self.total is not None:
            end, reward = rewards[0]
            rewards[0] = end, reward + self.total - math.fsum(value for _, value in rewards)
        return tuple(reversed(rewards))


def _session_rewards(finished: RolloutResult, score: float, credit: CreditAssignment) -> _SessionRewards:
    turns = turn_rewards(finished) if credit.turns else {}
    total = None
    if credit.turns and credit.one_sum:
        total = next(iter(_returns(finished, score, credit).values()))
    return _SessionRewards(score, turns, credit.discount if credit.turns else 1.0, total)


def _returns(finished: RolloutResult, floor: float, credit: CreditAssignment) -> dict[str, float]:
    returns = turn_returns([_as_group(finished)], outcome="last", discount=credit.discount, floor=floor)
    return returns[finished.rollout.id]


def baseline(finished: RolloutResult, *, floor: float, credit: CreditAssignment) -> float | None:
    """Baseline of a greedy rollout: its reward, or the mean return of its turns."""
    finished = _weigh(finished, credit)
    score = finished.outcome.reward_or_floor(floor)
    if score is None or not credit.turns:
        return score
    returns = _returns(finished, floor, credit)
    return math.fsum(returns.values()) / len(returns) if returns else score


def _turn_with_placeholder(finished: RolloutResult, image_id: int) -> str:
    """Id of a turn that sampled an image placeholder; empty for none."""
    return next((turn.id for turn in finished.turns if image_id in turn.token_ids), "")


@cache
def vision_of(model: str) -> Vision | None:
    """The vision part of a model; None without one, or for an unsupported architecture."""
    try:
        return Vision.load(model)
    except UsageError as error:
        log.warning("%s; rollouts with images are refused", error)
        return None


def _info(finished: RolloutResult, unused: int) -> dict[str, float]:
    """Values that veRL logs and validates in addition to the reward, by the agent's names."""
    outcome = finished.outcome
    failed = outcome.failure is not None and outcome.failure.kind is FailureKind.POLICY
    values = {**outcome.metrics, **outcome.rewards, "policy_failure": float(failed)}
    values["attempts"] = float(finished.attempts)
    values["rows"] = float(len(finished.trajectories))
    tokens = count_tokens([finished])
    values["sampled_tokens"] = float(tokens.sampled)
    values["excluded_tokens"] = float(sum(tokens.excluded.values()))
    values |= {"unused_turn_rewards": float(unused)} if unused else {}
    values |= {f"excluded_tokens.{metric_name(reason)}": float(n) for reason, n in tokens.excluded.items()}
    return {f"{name}_of_agent" if name == RESERVED else name: value for name, value in values.items()}


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
        "num_preempted": -1,  # unknown
    }


def num_turns(result: RolloutResult, row: Row) -> int:
    """Number of turns as veRL counts them: requests as well as replies."""
    parents = {turn.id: turn.parent for turn in result.turns}
    calls, parent = 1, parents.get(row.turns[-1].id)
    while parent is not None:
        calls, parent = calls + 1, parents.get(parent)
    return 2 * calls


# --- TransferQueue entries -------------------------------------------------------------------------


class QueueEntry(Struct, frozen=True):
    """A value of veRL's TransferQueue and its key."""

    key: str
    """Key, `{uid}_{session}_{index}`."""
    fields: dict[str, Any]
    """Columns of the row."""
    tag: dict[str, Any]
    """Tag of the key, which veRL reads without the columns."""


def queue_entries(
    prompt: Mapping[str, Any], session: RolloutRows, *, weighted: bool = False, vision: Vision | None = None
) -> list[QueueEntry]:
    """Entries of a rollout's rows. `prompt` is the row of veRL's batch, whose columns are copied.

    Rows with images need `vision`; all rows of a model with M-RoPE have its positions. `weighted` gives each
    row its share of the session as `rollout_is_weights`, by which veRL multiplies the policy loss.
    """
    import torch

    return [
        QueueEntry(
            f"{prompt['uid']}_{session.number}_{index}",
            _fields(prompt, session, row, torch)
            | _weight(row, torch, weighted)
            | pixels(session, row, vision),
            _tag(prompt, session, row),
        )
        for index, row in enumerate(session.rows)
    ]


def _fields(prompt: Mapping[str, Any], session: RolloutRows, row: Row, torch: Any) -> dict[str, Any]:
    prompts = torch.tensor(row.prompt_ids, dtype=torch.int64)
    responses = torch.tensor(row.response_ids, dtype=torch.int64)
    mask = torch.tensor(row.response_mask, dtype=torch.int64)
    scores = torch.zeros(len(row.response_ids), dtype=torch.float32)
    for position, reward in row.token_rewards:
        scores[position] = reward
    columns = {name: value for name, value in prompt.items() if name not in VERL_COLUMNS}
    return columns | {
        "session_id": session.number,
        "prompts": prompts,
        "responses": responses,
        "response_mask": mask,
        "loss_mask": mask.clone(),
        "rollout_log_probs": torch.tensor(row.response_logprobs, dtype=torch.float32),
        "rm_scores": scores,
        "input_ids": torch.cat([prompts, responses]),
        "position_ids": torch.arange(len(prompts) + len(responses), dtype=torch.int64),
        "multi_modal_inputs": {},
        "num_turns": num_turns(session.result, row),
        "metrics": dict(session.metrics),
        "extra_fields": _extra(session, row),
    }


def pixels(session: RolloutRows, row: Row, vision: Vision | None) -> dict[str, Any]:
    """Inputs of a vision-language model in addition to ids: `multi_modal_inputs` of its processor, and
    positions in text, time, height and width."""
    import torch

    rollout_id = session.result.rollout.id
    if vision is None:
        if row.images:
            raise UsageError(
                f"rollout {rollout_id} has images, but the model in actor_rollout_ref.model.path is not of a"
                f" supported vision family ({', '.join(FAMILIES)}); train the model that sampled them"
            )
        return {}
    ids, spans = row.token_ids, row.trajectory.images
    try:
        pictures = [vision.pixels(image) for image in row.images]
        vision.check(ids, spans, pictures)
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
        positions = torch.from_numpy(vision.positions(len(ids), spans, [one.grid for one in pictures]))
        fields["position_ids"] = torch.cat([torch.arange(len(ids))[None], positions])
    return fields


def decoded_images(row: Row) -> list[Any]:
    """The decoded images of a row, for veRL's workers to process."""
    try:
        return [decode_image(image) for image in row.images]
    except ValueError as error:
        raise UsageError(f"rollout {row.rollout_id}: an image cannot be decoded: {error}") from error


def _extra(session: RolloutRows, row: Row) -> dict[str, Any]:
    low, high = session.row_versions(row)
    return {
        "min_global_steps": low,
        "max_global_steps": high,
        "reward_extra_info": dict(session.info),
        "afield_rollout": session.result.rollout.id,
        "afield_weight": row.trajectory.weight,
    }


def _weight(row: Row, torch: Any, weighted: bool) -> dict[str, torch.Tensor]:
    return (
        {"rollout_is_weights": torch.tensor([row.trajectory.weight], dtype=torch.float32)} if weighted else {}
    )


def _tag(prompt: Mapping[str, Any], session: RolloutRows, row: Row) -> dict[str, Any]:
    before, after = row.prompt_length, len(row.response_ids)
    low, high = session.row_versions(row)
    return {
        "status": "success",
        "prompt_len": before,
        "response_len": after,
        "seq_len": before + after,
        "global_steps": int(prompt["global_steps"]),
        "min_global_steps": low,
        "max_global_steps": high,
    }
