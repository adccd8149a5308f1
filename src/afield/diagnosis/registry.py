"""Registry of diagnosis classes, and `diagnose`, which ranks their findings.

Adding a class is one function in the module of its stage and one line of `CLASSES`.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct, structs

from afield.diagnosis import advantage, generation, infrastructure, logprobs, reward
from afield.diagnosis.evidence import Finding, RunEvidence, Stage

Check = Callable[[RunEvidence], Finding | None]


class DiagnosisClass(Struct, frozen=True):
    """A kind of problem that `afield why` finds."""

    check: Check
    """Function that finds it; its name is that of the class."""
    stage: Stage
    """Stage of the run that is broken."""
    single: bool = True
    """Whether one rollout alone can show it."""

    @property
    def name(self) -> str:
        return self.check.__name__


CLASSES: tuple[DiagnosisClass, ...] = (
    DiagnosisClass(infrastructure.nothing_collected, "infrastructure", single=False),
    DiagnosisClass(infrastructure.unreachable_gateway, "infrastructure"),
    DiagnosisClass(infrastructure.infrastructure_failures, "infrastructure"),
    DiagnosisClass(infrastructure.infrastructure_zeros, "infrastructure"),
    DiagnosisClass(infrastructure.agent_errors, "infrastructure"),
    DiagnosisClass(infrastructure.slow_tool, "infrastructure"),
    DiagnosisClass(infrastructure.timeouts, "infrastructure"),
    DiagnosisClass(infrastructure.idle_engine, "infrastructure", single=False),
    DiagnosisClass(generation.context_overflow, "generation"),
    DiagnosisClass(generation.refused_calls, "generation"),
    DiagnosisClass(generation.unstable_template, "generation"),
    DiagnosisClass(generation.empty_tool_schema, "generation"),
    DiagnosisClass(generation.malformed_tool_calls, "generation"),
    DiagnosisClass(generation.no_tool_calls, "generation"),
    DiagnosisClass(generation.lost_tool_results, "generation"),
    DiagnosisClass(generation.edited_replies, "generation"),
    DiagnosisClass(generation.unenforced_constraints, "generation"),
    DiagnosisClass(generation.truncated_replies, "generation"),
    DiagnosisClass(generation.main_path_excluded, "generation"),
    DiagnosisClass(generation.identical_samples, "generation"),
    DiagnosisClass(logprobs.sampler_trainer_mismatch, "logprobs", single=False),
    DiagnosisClass(logprobs.lost_update, "logprobs", single=False),
    DiagnosisClass(logprobs.stale_data, "logprobs"),
    DiagnosisClass(logprobs.entropy_collapse, "logprobs", single=False),
    DiagnosisClass(logprobs.diverged_policy, "logprobs", single=False),
    DiagnosisClass(advantage.all_equal_rewards, "advantage"),
    DiagnosisClass(reward.verifier_failures, "reward"),
    DiagnosisClass(reward.constant_reward, "reward", single=False),
    DiagnosisClass(reward.truncation_as_success, "reward"),
    DiagnosisClass(reward.reward_follows_length, "reward", single=False),
)
"""All classes in the order of their rank: by stage, then causes before their effects."""


def applicable(run: RunEvidence) -> list[DiagnosisClass]:
    """Classes that are checked for this run or rollout."""
    return [one for one in CLASSES if one.single or not run.single]


def diagnose(run: RunEvidence) -> list[Finding]:
    """Findings of a run or rollout, the most fundamental first."""
    results = [(one, one.check(run)) for one in applicable(run)]
    return [
        structs.replace(finding, name=one.name, stage=one.stage)
        for one, finding in results
        if finding is not None
    ]
