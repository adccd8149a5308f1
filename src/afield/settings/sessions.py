"""Session policies: how the gateway treats what clients send."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from afield.runs.exclusions import AbandonedAnswers, SideCalls
from afield.settings.fields import SettingsGroup, values_of

Thinking = Literal["preserve", "template", "per_turn"]
Escape = Literal["escape", "faithful", "reject"]
Render = Literal["fold", "strict"]
Unsupported = Literal["refuse", "ignore"]
ConstrainedTurns = Literal["train", "exclude", "ignore"]
ClientSampling = Literal["temperature", "top_p", "top_k", "seed"]


class SessionPolicies(SettingsGroup, frozen=True, kw_only=True):
    """How the gateway handles requests and turns of a session.

    POST /sessions, RolloutClient, `afield train` and veRL take the same options.
    """

    title: ClassVar[str] = "Sessions"

    client_sampling: tuple[ClientSampling, ...] = ()
    """Sampling parameters that requests may set for themselves. All others are the run's."""
    thinking: Thinking = "preserve"
    """Reasoning of earlier replies in later prompts: `preserve` keeps it as sampled, `template` leaves it to
    the chat template, `per_turn` does so too and makes each turn a training sequence of its own."""
    escape: Escape = "escape"
    """Text of messages that spells a control token, such as <|im_end|>: `escape` encodes it as plain text,
    `faithful` as the control token, `reject` answers 400."""
    render: Render = "fold"
    """Conversations that the chat template rejects or renders in part: `fold` changes them by fixed rules and
    tags their turns `render:RULE`, `strict` answers 400."""
    side_calls: SideCalls = "exclude"
    """Side calls, which are model calls beside the agent's task, such as naming the session: `exclude` keeps
    declared ones and those of known clients out of the loss, `declared` only declared ones, `train` none."""
    abandoned_answers: AbandonedAnswers = "exclude"
    """Replies that the client discarded, because it sent the same request again and continued from another
    reply: `exclude` keeps them out of the loss, `train` trains them, for agents that sample a request several
    times."""
    unsupported: Unsupported = "refuse"
    """Requests with an unsupported parameter: `refuse` answers 400, `ignore` drops the parameter and tags
    the turn `ignored:NAME`."""
    constrained_turns: ConstrainedTurns = "train"
    """Turns sampled under a constraint, such as structured output or a forced tool call: `train` rescores
    them under the same constraint, `exclude` keeps them out of the loss, `ignore` samples without the
    constraint and tags the turn `ignored:NAME`."""


def policies_of(settings: SessionPolicies) -> dict[str, Any]:
    """The session policies among the fields of a struct, by name."""
    return values_of(settings, SessionPolicies)
