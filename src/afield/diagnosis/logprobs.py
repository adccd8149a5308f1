"""Log-probabilities: agreement of sampler and trainer, staleness, entropy."""

from __future__ import annotations

from statistics import mean, median
from typing import Any

from afield.diagnosis.evidence import Finding, RunEvidence, share

MAX_TIMES_CONTROL = 4.0
"""Times the expected difference of sampler and trainer above which both disagree."""
MAX_DIFF = 0.05
"""Mean difference above which both disagree, for trainers without a control."""
MIN_UPDATE_KEPT = 0.9
"""Share of an update that published weights keep at least."""
MIN_EFFECTIVE = 0.5
"""Effective share of tokens under importance weights below which data is too stale."""
MAX_STALE_DIFF = 0.15
"""Mean difference of log-probabilities since sampling above which data is too stale."""
DIVERGED = 3.0
"""Entropy in units of its first value above which a policy may have diverged."""
COLLAPSED = 0.1
"""Entropy as a share of its first value below which a policy is collapsed."""
WINDOW = 3
"""Steps whose mean is compared."""
TIER = "sampler_trainer_logprob_diff_mean."


def sampler_trainer_mismatch(run: RunEvidence) -> Finding | None:
    compared = [line for line in run.steps if "logprob_diff" in (line.get("trainer") or {})]
    apart = [line for line in compared if _worst(line)[1] > _allowed(line)]
    if not apart or len(apart) < len(compared) / 2:
        return None
    last = apart[-1]
    trainer, allowed = last["trainer"], _allowed(last)
    tiers = {name.removeprefix(TIER): value for name, value in trainer.items() if name.startswith(TIER)}
    wrong = [tier for tier, value in tiers.items() if value > allowed and not last.get("staleness")]
    only = "" if not wrong or len(wrong) == len(tiers) else f" in prompts of tier {', '.join(wrong)}"
    remedy = (
        "set engine_dtype = 'float32', and read logs/gateway.log for whether the engine serves this run's"
        " weights; learn.max_logprob_diff refuses such steps"
    )
    if only:
        remedy = (
            "check the engine's prefix cache (vLLM: start it without prefix caching) and, with `afield"
            " inspect-template MODEL`, how the template renders later turns; learn.max_logprob_diff refuses"
            " such steps"
        )
    return Finding(
        problem=f"sampler and trainer disagree about the log-probabilities of the same tokens{only}",
        evidence=(
            f"{len(apart)} of {len(compared)} steps; step {last['step']}: mean difference"
            f" {trainer['logprob_diff']:.3g}, allowed {allowed:.3g}",
            "mean difference by tier: " + ", ".join(f"{tier} {value:.3g}" for tier, value in tiers.items()),
        ),
        remedy=remedy,
        files=("metrics.jsonl",),
    )


def _allowed(line: dict[str, Any]) -> float:
    control = line["trainer"].get("logprob_diff_control")
    return MAX_DIFF if control is None else MAX_TIMES_CONTROL * control


def _worst(line: dict[str, Any]) -> tuple[str, float]:
    """Tier with the largest difference; all tiers in one if some tokens are stale, which differ anyway."""
    trainer = line["trainer"]
    diff_by_tier = {"all": trainer["logprob_diff"]}
    if not line.get("staleness"):
        diff_by_tier |= {n.removeprefix(TIER): v for n, v in trainer.items() if n.startswith(TIER)}
    return max(diff_by_tier.items(), key=lambda item: item[1])


def lost_update(run: RunEvidence) -> Finding | None:
    kept = run.trainer_metrics("update_kept")
    lost = [value for value in kept if value < MIN_UPDATE_KEPT]
    if not lost or len(lost) < max(2, len(kept) / 2):
        return None
    dtype, rounding = run.settings.get("engine_dtype"), (run.settings.get("learn") or {}).get("rounding")
    return Finding(
        problem="published weights lose the update: rounding to the engine's dtype undoes most of it",
        evidence=(
            f"{len(lost)} of {len(kept)} steps keep less than {MIN_UPDATE_KEPT:.0%}; median"
            f" {median(kept):.0%}",
            f"engine_dtype = {dtype}, learn.rounding = {rounding}",
        ),
        remedy="set learn.rounding = 'stochastic', or engine_dtype = 'float32'",
        files=("metrics.jsonl",),
    )


def stale_data(run: RunEvidence) -> Finding | None:
    dropped = run.run.index.fetch("SELECT group_id, reason FROM dropped WHERE reason LIKE '%versions ago%'")
    ((groups,),) = run.run.index.fetch("SELECT count(DISTINCT group_id) FROM rollouts WHERE split='train'")
    if run.rollout is not None:
        dropped = [row for row in dropped if row[0] == run.rollout.group_id]
    stale = [line for line in run.steps if line.get("staleness")]
    weak = [line for line in stale if _is_off_policy(line)]
    many = bool(dropped) and run.exceeds(len(dropped), groups, 0.1)
    if not many and len(weak) < max(2, len(run.steps) / 4):
        return None
    versions = max((line["staleness_mean"] for line in stale), default=0.0)
    names = ("mode", "max_staleness", "on_stale")
    return Finding(
        problem="rollouts are too old when they are trained: the policy has changed since they were sampled",
        evidence=(
            share(len(dropped), groups, "groups were dropped as stale"),
            f"{len(weak)} of {len(run.steps)} steps: log-probabilities changed by more than"
            f" {MAX_STALE_DIFF:g} in the mean since sampling, or importance weights leave less than"
            f" {MIN_EFFECTIVE:.0%} of the tokens; mean staleness up to {versions:.1f} versions",
            ", ".join(f"{name} = {run.settings[name]}" for name in names if run.settings.get(name)),
        ),
        remedy="lower max_staleness or use mode = 'one-step-off'; make the slowest rollouts faster"
        " (straggler_s, extra), and lower lr if the policy moves far in a step",
        rollouts=(),
        files=("metrics.jsonl",),
        pages=("#/r/{run}/timeline",),
    )


def _is_off_policy(line: dict[str, Any]) -> bool:
    trainer = line.get("trainer") or {}
    effective = trainer.get("importance_effective_share", 1.0)
    changed = trainer.get("sampler_trainer_logprob_diff_mean", 0.0) - trainer.get("logprob_diff", 0.0)
    return effective < MIN_EFFECTIVE or changed > MAX_STALE_DIFF


def entropy_collapse(run: RunEvidence) -> Finding | None:
    lines = [line for line in run.steps if "entropy" in (line.get("trainer") or {})]
    if len(lines) < 2 * WINDOW:
        return None
    first = median(line["trainer"]["entropy"] for line in lines[:WINDOW])
    last = median(line["trainer"]["entropy"] for line in lines[-WINDOW:])
    first = max(first, lines[0]["trainer"]["entropy"])
    rewards = [line["reward"] for line in lines if line.get("reward") is not None]
    if not rewards or last > COLLAPSED * first:
        return None
    before, reached, best = mean(rewards[:WINDOW]), mean(rewards[-WINDOW:]), max(rewards)
    run_rewards = [rollout.reward for rollout in run.rollouts if rollout.reward is not None]
    margin = 0.1 * (max(run_rewards, default=0.0) - min(run_rewards, default=0.0))
    if reached > before + margin and reached > best - 2 * margin:
        return None  # certain, because it has learned the task
    return Finding(
        problem="the policy's entropy has collapsed: it samples the same replies whatever the reward",
        evidence=(
            f"entropy {first:.3g} at the start, {last:.3g} in the last {WINDOW} steps",
            f"mean reward {rewards[0]:.3g} at the start, {best:.3g} at best, {reached:.3g} in the last"
            f" {WINDOW} steps",
            *([f"lr = {run.settings['lr']:g}"] if run.settings.get("lr") else []),
        ),
        remedy="lower lr, and start again from a checkpoint before the collapse; kl or learn.entropy keep a"
        " policy from collapsing",
        files=("metrics.jsonl",),
        pages=("#/r/{run}",),
    )


def diverged_policy(run: RunEvidence) -> Finding | None:
    lines = [line for line in run.steps if "entropy" in (line.get("trainer") or {})]
    rewards = [line["reward"] for line in lines if line.get("reward") is not None]
    if len(lines) < 2 * WINDOW or len(rewards) < 2 * WINDOW:
        return None
    first, last = (
        lines[0]["trainer"]["entropy"],
        median(line["trainer"]["entropy"] for line in lines[-WINDOW:]),
    )
    best, reached = max(rewards), mean(rewards[-WINDOW:])
    lowest = min((rollout.reward for rollout in run.rollouts if rollout.reward is not None), default=0.0)
    if last < DIVERGED * first or reached - lowest > 0.5 * (best - lowest):
        return None
    return Finding(
        problem="training destroys the policy: its replies become random and its reward falls",
        evidence=(
            f"entropy {first:.3g} in the first step, {last:.3g} in the last {WINDOW}",
            f"mean reward {best:.3g} at best, {reached:.3g} in the last {WINDOW} steps",
            *([f"lr = {run.settings['lr']:g}"] if run.settings.get("lr") else []),
        ),
        remedy="lower lr or grad_clip, and start again from a checkpoint before the fall; kl keeps a policy"
        " near its start",
        files=("metrics.jsonl",),
        pages=("#/r/{run}",),
    )
