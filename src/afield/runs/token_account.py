"""Token account: sampled tokens by trained, excluded and untrained, with reasons.

Sampled tokens are trained, or excluded turn by turn (`exclusions.REASONS`), or belong to rollouts that train
nothing (`exclusions.UntrainedReason`). Step lines, summaries, metrics of veRL and TRL, and client results all
use this account.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Self

from msgspec import Struct, field, structs

from afield.runs.exclusions import REASONS, UntrainedReason
from afield.types import FailureKind, RolloutResult

LIMIT = 0.05
"""Share of excluded tokens above which a run logs a warning."""
_FAILED = {
    FailureKind.TASK: UntrainedReason.TASK_FAILURE,
    FailureKind.VERIFIER: UntrainedReason.VERIFIER_FAILURE,
    FailureKind.INFRASTRUCTURE: UntrainedReason.INFRASTRUCTURE_FAILURE,
}


class TokenAccount(Struct, frozen=True, kw_only=True):
    """Sampled tokens of some rollouts, each counted once."""

    trained: int = 0
    """Tokens in the loss."""
    excluded: Mapping[str, int] = field(default_factory=dict)
    """Tokens of excluded turns, by reason."""
    untrained: Mapping[str, int] = field(default_factory=dict)
    """Tokens of rollouts that contribute no gradient, by reason; excluded tokens are not counted again."""

    def __add__(self, other: Self) -> TokenAccount:
        return TokenAccount(
            trained=self.trained + other.trained,
            excluded=Counter(self.excluded) + Counter(other.excluded),
            untrained=Counter(self.untrained) + Counter(other.untrained),
        )

    @property
    def sampled(self) -> int:
        return self.trained + sum(self.excluded.values()) + sum(self.untrained.values())

    @property
    def trained_share(self) -> float:
        """Share of sampled tokens that are trained; 1 if none were sampled."""
        return self.trained / self.sampled if self.sampled else 1.0

    @property
    def excluded_share(self) -> float:
        """Share of sampled tokens that are excluded; 0 if none were sampled."""
        return sum(self.excluded.values()) / self.sampled if self.sampled else 0.0

    def idle(self, reason: UntrainedReason) -> TokenAccount:
        """Return this account with all trained tokens moved to `untrained` under `reason`."""
        untrained = Counter(self.untrained) + Counter({str(reason): self.trained})
        return TokenAccount(excluded=self.excluded, untrained=untrained)

    def rewarded(self, tokens: int) -> TokenAccount:
        """Return this account with `tokens` moved from those whose reward is pending to `trained`."""
        untrained = Counter(self.untrained)
        untrained.subtract({str(UntrainedReason.REWARD_PENDING): tokens})
        return structs.replace(self, trained=self.trained + tokens, untrained=+untrained)

    def metrics(self) -> dict[str, float]:
        """Metrics by name: shares, and token counts by reason."""
        return {
            "delivered_share": self.trained_share,
            "excluded_share": self.excluded_share,
            **{
                f"excluded_tokens.{metric_name(reason)}": float(n) for reason, n in self.excluded.items() if n
            },
            **{
                f"untrained_tokens.{metric_name(reason)}": float(n)
                for reason, n in self.untrained.items()
                if n
            },
        }

    def warning(self, limit: float = LIMIT) -> str | None:
        """Return a warning with reasons and remedies if more than `limit` of the tokens are excluded."""
        if self.excluded_share <= limit:
            return None
        remedies = dict.fromkeys(REASONS[r].remedy for r in largest(self.excluded) if r in REASONS)
        return (
            f"{self.excluded_share:.1%} of the sampled tokens are excluded from training"
            f" ({listed(self.excluded)}), more than {limit:.0%}; {'; '.join(remedies)}"
        )


class ExclusionWatch:
    """Token account of a run, with one warning per new exclusion reason."""

    def __init__(self, account: TokenAccount | None = None) -> None:
        self.account = account or TokenAccount()
        self._reasons: set[str] = set()

    def add(self, account: TokenAccount) -> str | None:
        """Add tokens; returns a warning if a new reason appears and too many tokens are excluded."""
        self.account += account
        reasons = set(self.account.excluded)
        if reasons <= self._reasons or (warning := self.account.warning()) is None:
            return None
        self._reasons = reasons
        return warning


def count_tokens(finished: Iterable[RolloutResult]) -> TokenAccount:
    """Count the tokens of rollouts before training: tokens of rollouts with a reward count as trained."""
    trained = 0
    excluded: Counter[str] = Counter()
    untrained: Counter[str] = Counter()
    for result in finished:
        for exclusion in result.excluded:
            excluded[exclusion.reason] += exclusion.tokens
        owned = sum(row.owned for row in result.trajectories)
        if reason := failure_reason(result):
            untrained[reason] += owned
        else:
            trained += owned
    return TokenAccount(trained=trained, excluded=+excluded, untrained=+untrained)


def failure_reason(finished: RolloutResult) -> UntrainedReason | None:
    """Return why a rollout has no reward; None if it has one. A policy failure has the floor reward."""
    if finished.outcome.reward_pending:
        return UntrainedReason.REWARD_PENDING
    failure = finished.outcome.failure
    if finished.outcome.reward_or_floor(0.0) is not None or failure is None:
        return None
    return _FAILED[failure.kind]


def largest(tokens: Mapping[str, int]) -> list[str]:
    """Reasons by number of tokens, largest first."""
    return sorted((reason for reason, n in tokens.items() if n), key=lambda reason: (-tokens[reason], reason))


def listed(tokens: Mapping[str, int]) -> str:
    """Format token counts for a message: `side:opencode/title 320, aborted 12`."""
    return ", ".join(f"{reason} {tokens[reason]}" for reason in largest(tokens))


def metric_name(text: str) -> str:
    """Convert text to a part of a metric name."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_") or "unknown"
