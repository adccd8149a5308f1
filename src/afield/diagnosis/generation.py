"""Generation: requests, tool calls, prompts, and turns left untrained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from afield.diagnosis.evidence import (
    INFRASTRUCTURE_CODES,
    Finding,
    RolloutFacts,
    RunEvidence,
    count,
    examples,
    listed,
    most_common,
    share,
    total_of,
)
from afield.runs.exclusions import REASONS
from afield.runs.turn_facts import MALFORMED, tool_names
from afield.types import Reason

CONTEXT = "context_length_exceeded"
BUDGET = "budget_exhausted"
MIN_OFFERED = 16
"""Rollouts with tools that must call none before that is a finding."""
MAX_CALLING = 0.02
"""Largest share of these rollouts that call one."""
UNENFORCED = ("ignored:", "unenforced:")
"""Prefixes of tags for wishes of a request that the gateway did not enforce."""


def context_overflow(run: RunEvidence) -> Finding | None:
    over = [r for r in run.rollouts if CONTEXT in r.refused or r.failure_reason == Reason.CONTEXT]
    if not run.exceeds(len(over), len(run.rollouts), 0.05):
        return None
    limit = run.settings.get("max_context")
    return Finding(
        problem="conversations grow beyond the context, so that calls are refused",
        evidence=(
            share(len(over), len(run.rollouts), "rollouts"),
            most_common(r.refusal or r.failure_message for r in over),
            *([f"max_context is {limit}"] if limit else []),
        ),
        remedy="raise max_context if the engine takes more, or let the agent shorten tool results and old"
        " messages",
        rollouts=examples(over),
        commands=("afield show {run} --sort refused",),
    )


def refused_calls(run: RunEvidence) -> Finding | None:
    expected = {CONTEXT, BUDGET, *INFRASTRUCTURE_CODES}
    refused = [rollout for rollout in run.rollouts if rollout.refused.keys() - expected]
    if not run.exceeds(len(refused), len(run.rollouts), 0.05):
        return None
    return Finding(
        problem="the gateway refuses model calls of the agent",
        evidence=(
            share(len(refused), len(run.rollouts), "rollouts"),
            f"refused calls by class: {listed(total_of(refused, 'refused'))}",
            most_common(rollout.refusal for rollout in refused),
        ),
        remedy="change the request as the message says; unsupported = 'ignore' drops parameters that are"
        " not supported",
        rollouts=examples(refused),
        commands=("afield show {run} --sort refused",),
    )


def empty_tool_schema(run: RunEvidence) -> Finding | None:
    affected = [rollout for rollout in run.rollouts if rollout.fact("untyped_calls")]
    calls = count(affected, lambda rollout: rollout.fact("untyped_calls"))
    total = count(run.rollouts, lambda rollout: rollout.tool_calls)
    if not run.exceeds(calls, max(calls, total), 0.02):
        return None
    names = sorted(set(tool_names(total_of(affected, "tags"))))
    return Finding(
        problem=f"the schema of tool {', '.join(names[:4])} arrived without parameters, and the model has to"
        " guess its arguments",
        evidence=(share(calls, total, "tool calls pass arguments to such a tool"),),
        remedy="define the tool's parameters as a JSON schema with properties; if the agent's code has them,"
        " its framework sends them under a name that the API does not have",
        rollouts=examples(affected),
    )


def malformed_tool_calls(run: RunEvidence) -> Finding | None:
    affected = [rollout for rollout in run.early() if _malformed(rollout)]
    wrong = count(affected, _malformed)
    tried = count(run.early(), lambda r: r.tool_calls + r.tags.get(MALFORMED, 0))
    if not run.exceeds(wrong, max(wrong, tried), 0.1):
        return None
    unparsed = count(affected, lambda rollout: rollout.tags.get(MALFORMED, 0))
    return Finding(
        problem="the model writes tool calls that cannot be read",
        evidence=(
            share(wrong, tried, "tool calls"),
            f"{unparsed} turns with a call that stays text, {wrong - unparsed} calls whose arguments are no"
            " JSON object",
        ),
        remedy="raise max_tokens if calls are cut off; else compare the model's format with `afield"
        " inspect-template MODEL`, or train the format first",
        rollouts=examples(affected),
    )


def _malformed(rollout: RolloutFacts) -> int:
    return rollout.tags.get(MALFORMED, 0) + rollout.fact("bad_arguments")


def no_tool_calls(run: RunEvidence) -> Finding | None:
    offered = [rollout for rollout in run.early() if rollout.fact("tool_turns")]
    without_calls = [r for r in offered if not r.tool_calls and not r.tags.get(MALFORMED)]
    calling = len(offered) - len(without_calls)
    enough = len(offered) >= MIN_OFFERED and calling <= MAX_CALLING * len(offered)
    if not (without_calls if run.single else enough):
        return None
    return Finding(
        problem="the agent offers tools, and the model calls none",
        evidence=(share(calling, len(offered), "rollouts with tools have a tool call"),),
        remedy="look at the prompt with `afield show`, and whether the chat template shows the tools with"
        " `afield inspect-template MODEL`; then say in the system prompt when to call them",
        rollouts=examples(without_calls),
    )


def lost_tool_results(run: RunEvidence) -> Finding | None:
    if run.settings.get("abandoned_answers") == "train":
        return None  # the agent samples requests several times on purpose
    affected = [rollout for rollout in run.rollouts if rollout.fact("lost_results")]
    lost = count(affected, lambda rollout: rollout.fact("lost_results"))
    total = count(run.rollouts, lambda rollout: rollout.fact("continued_calls"))
    if not run.exceeds(lost, max(lost, total), 0.2):
        return None
    return Finding(
        problem="results of tool calls never reach the model: no later prompt has them",
        evidence=(share(lost, total, "tool calls of turns that were followed by another"),),
        remedy="append a message of role tool with the call's tool_call_id after the reply, then call again",
        rollouts=examples(affected),
    )


def unstable_template(run: RunEvidence) -> Finding | None:
    affected = [rollout for rollout in run.rollouts if rollout.fact("unstable_turns")]
    unstable = count(affected, lambda rollout: rollout.fact("unstable_turns"))
    total = count(run.rollouts, lambda rollout: rollout.fact("continuations"))
    if not run.exceeds(unstable, max(unstable, total), 0.1):
        return None
    return Finding(
        problem="the chat template is not prefix-stable: it renders earlier turns otherwise once a"
        " conversation goes on, so that each turn is a training row of its own",
        evidence=(share(unstable, total, "turns that continue a conversation"),),
        remedy="run `afield inspect-template MODEL` for the part that changes, and correct it in"
        " chat_template.jinja; thinking = 'preserve' keeps earlier reasoning",
        rollouts=examples(affected),
    )


def edited_replies(run: RunEvidence) -> Finding | None:
    affected = [rollout for rollout in run.rollouts if rollout.fact("edited_turns")]
    edited = count(affected, lambda rollout: rollout.fact("edited_turns"))
    total = count(run.with_turns(), lambda rollout: rollout.turns - 1)
    if not run.exceeds(edited, max(edited, total), 0.1):
        return None
    return Finding(
        problem="the agent sends back other replies than the model sampled, so that later turns answer text"
        " that is not trained",
        evidence=(share(edited, total, "turns after the first"),),
        remedy="append the reply's message to the conversation unchanged, with its tool calls",
        rollouts=examples(affected),
    )


def unenforced_constraints(run: RunEvidence) -> Finding | None:
    affected = [r for r in run.with_turns() if any(tag.startswith(UNENFORCED) for tag in r.tags)]
    if not run.exceeds(len(affected), len(run.with_turns()), 0.05):
        return None
    tags = {t: n for t, n in total_of(affected, "tags").items() if t.startswith(UNENFORCED)}
    return Finding(
        problem="requests ask for constraints that were not enforced on the replies",
        evidence=(
            share(len(affected), len(run.with_turns()), "rollouts"),
            f"turns by tag: {listed(tags)}",
        ),
        remedy="set constrained_turns = 'train' and unsupported = 'refuse', with an engine that enforces"
        " grammars; or leave the parameter out of the request",
        rollouts=examples(affected),
    )


def truncated_replies(run: RunEvidence) -> Finding | None:
    sampled = [rollout for rollout in run.early() if rollout.turns]
    cut = [r for r in sampled if r.fact("cut_turns") and not r.fact("cut_end")]
    ends = [r for r in sampled if r.fact("cut_end")]
    best = max((r.reward for r in run.rollouts if r.reward is not None), default=0.0)
    truncated = cut + [r for r in ends if r.reward is None or r.reward < best or best <= 0]
    if len(truncated) < len(ends) / 2 or not run.exceeds(len(truncated), len(sampled), 0.2):
        return None
    limit = run.settings.get("max_tokens") or run.info.sampling.get("max_tokens")
    return Finding(
        problem="replies are cut off before the model ends them",
        evidence=(
            share(len(truncated), len(sampled), "rollouts"),
            f"{len(ends)} of them end with a reply that was cut off",
            *([f"max_tokens is {limit}"] if limit else []),
        ),
        remedy="raise max_tokens, or the max_tokens that the agent's requests ask for",
        rollouts=examples(truncated),
        commands=("afield show {run} --sort tokens",),
    )


def main_path_excluded(run: RunEvidence) -> Finding | None:
    affected = [rollout for rollout in run.rollouts if rollout.fact("main_excluded")]
    left_out = count(affected, lambda rollout: rollout.fact("main_excluded"))
    total = count(run.rollouts, lambda rollout: rollout.fact("main_turns"))
    if not run.exceeds(left_out, max(left_out, total), 0.05):
        return None
    reasons: Counter[str] = total_of(affected, "excluded")
    main = reasons.most_common(1)[0][0] if reasons else ""
    return Finding(
        problem="turns of the main conversation are sampled and excluded from training",
        evidence=(
            share(left_out, total, "turns of the longest conversations"),
            f"excluded tokens by reason: {listed(reasons)}",
        ),
        remedy=REASONS[main].remedy if main in REASONS else "read why in `afield show RUN ROLLOUT`",
        rollouts=examples(affected),
        pages=("#/r/{run}/excluded",),
    )


def identical_samples(run: RunEvidence) -> Finding | None:
    if not run.trains:
        return None
    groups = [[r for r in group if r.sampled_tokens] for group in run.grouped(run.early())]
    groups = [group for group in groups if len(group) >= 3]
    alike = [group for group in groups if len({r.fact("replies") for r in group}) == 1]
    if not run.exceeds(len(alike), len(groups), 0.5) or _solved(run.rollouts):
        return None
    temperature = run.settings.get("temperature") or run.info.sampling.get("temperature")
    requested = {t: n for t, n in total_of(run.rollouts, "tags").items() if "temperature" in t}
    return Finding(
        problem="rollouts of a group sample the same tokens, so that there is nothing to compare",
        evidence=(
            share(len(alike), len(groups), "groups"),
            *([f"temperature is {temperature:g}"] if temperature is not None else []),
            *([f"turns by tag: {listed(requested)}"] if requested else []),
        ),
        remedy="set temperature = 1.0, and leave temperature and seed out of client_sampling",
        rollouts=examples([rollout for group in alike for rollout in group]),
        pages=(f"#/r/{{run}}/g/{alike[-1][0].group_id}",) if alike else (),
    )


def _solved(rollouts: Sequence[RolloutFacts]) -> bool:
    """Whether nearly all rewards are the best one, so that there is nothing left to learn."""
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    best = max(rewards, default=0.0)
    return best > min(rewards, default=0.0) and sum(r == best for r in rewards) > 0.9 * len(rewards)
