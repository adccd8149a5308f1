"""Session policies: how the gateway treats what clients send."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from afield.exclusions import AbandonedAnswers, SideCalls
from afield.settings.fields import SettingsGroup, values_of

Thinking = Literal["preserve", "template", "per_turn"]
Escape = Literal["escape", "faithful", "reject"]
Render = Literal["fold", "strict"]
Unsupported = Literal["refuse", "ignore"]
ConstrainedTurns = Literal["train", "exclude", "ignore"]
ClientSampling = Literal["temperature", "top_p", "top_k", "seed"]


class SessionPolicies(SettingsGroup, frozen=True, kw_only=True):
    """Treatment of requests and turns, the same in POST /sessions, RolloutClient, `afield train` and veRL."""

    title: ClassVar[str] = "Sessions"

    client_sampling: tuple[ClientSampling, ...] = ()
    """Sampling parameters that requests may set for themselves. All others are the run's."""
    thinking: Thinking = "preserve"
    """Earlier reasoning in later prompts. `preserve` keeps it, `template` leaves it to the chat template,
    `per_turn` keeps it within a turn."""
    escape: Escape = "escape"
    """Control tokens in the text of messages. `escape` encodes them as plain text, `faithful` as control
    tokens, `reject` answers 400."""
    render: Render = "fold"
    """Conversations that the chat template refuses. `fold` changes them by declared rules and tags their
    turns `render:RULE`, `strict` answers 400."""
    side_calls: SideCalls = "exclude"
    """Side calls that are kept out of the loss. `exclude` those declared or with a known fingerprint,
    `declared` those declared, `train` none."""
    abandoned_answers: AbandonedAnswers = "exclude"
    """Answers to a repeated request that nothing continues, beside one that something does. `exclude` keeps
    them out of the loss; `train` is for agents that sample a request several times on purpose."""
    unsupported: Unsupported = "refuse"
    """Requests with an unsupported parameter. `refuse` answers 400; `ignore` drops the
    parameter and tags the turn `ignored:NAME`."""
    constrained_turns: ConstrainedTurns = "train"
    """Turns sampled under a constraint (structured output, forced tool calls). `train` trains them with the
    constrained distribution on both sides, `exclude` keeps them out of the loss, `ignore` samples without
    the constraint and tags the turn `ignored:NAME`."""


def policies_of(settings: SessionPolicies) -> dict[str, Any]:
    """The session policies among the fields of a struct, by name."""
    return values_of(settings, SessionPolicies)
