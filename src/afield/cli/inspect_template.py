"""`afield inspect-template`: profile a model's chat template by rendering it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

REMEDY = (
    "the template renders no tools, or tool calls in an unknown format: requests with tools are refused."
    " Use a template with a known format (chat_template.jinja in the model directory), or a model that was"
    " trained to call tools"
)


def add(commands: Any) -> None:
    command = commands.add_parser(
        "inspect-template",
        help="analyse the chat template of a model",
        description="Analyse the chat template of a model, and how the gateway renders and parses with it.",
    )
    command.add_argument(
        "model", type=Path, metavar="MODEL_DIR", help="model directory in Hugging Face format"
    )
    command.add_argument("--tools", action="store_true", help="exit with 1 if tool calls cannot be parsed")
    command.add_argument(
        "--strict",
        action="store_true",
        help="analyse the template without the rules that change conversations which it rejects, as sessions"
        " with render=strict use it",
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from afield import factory

    with factory.needs("gateway"):
        from afield.chat.message_rules import RULES

    factory.download_model(args.model)
    tokens = factory.chat_tokenizer(args.model, rules=not args.strict)
    profile = tokens.profile
    usable = profile.tool_format is not None or not args.tools
    if args.json:
        print(json.dumps({"model": tokens.name, "usable": usable, **msgspec.to_builtins(profile)}))
        return 0 if usable else 1
    for title, text in rows(tokens.name, profile, RULES):
        print(f"{title:18}{text}")
    return 0 if usable else 1


def rows(name: str, profile: Any, by: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Labels and values to print; `by` describes each rule."""
    yield "model", name
    yield "template", profile.template_hash[:16]
    yield "tokenizer", profile.tokenizer_hash[:16]
    yield "end of turn", profile.end_of_turn or "none"
    if profile.end_of_call != profile.end_of_turn:
        yield "end of calls", profile.end_of_call or "none"
    for tier in ("bridge", "append", None):
        patterns = ", ".join(pattern for pattern, by in profile.appends.items() if by == tier)
        if patterns:
            yield (f"appends ({tier})" if tier else "does not append"), patterns
    yield "truncated turns", "appended to" if profile.truncated else "rendered again"
    yield "reasoning", reasoning(profile)
    yield "tools", tools(profile)
    yield (
        "call ids",
        {"free": "not shown", "rendered": "shown", "nine": "shown; nine letters or digits"}[profile.call_ids],
    )
    unsafe = ", ".join(map(repr, profile.unsafe))
    yield "content", f"can spell {unsafe}" if unsafe else "never becomes control tokens"
    yield "date", "printed; frozen at the start" if profile.prints_date else "not printed"
    for rule in profile.rules:
        yield "rule", f"{rule}: {by[rule]}"
    for note in profile.notes:
        yield "note", note
    if not profile.rules:
        yield "rules", "none needed: every conversation is rendered as the template has it"
    if profile.tool_format is None:
        yield "note", REMEDY


def reasoning(profile: Any) -> str:
    if profile.reasoning is None:
        return "none"
    parts = [profile.reasoning, "rendered" if profile.keeps_reasoning else "not rendered"]
    if profile.opens_thinking:
        parts.append("opened by the generation prompt")
    if profile.strips:
        parts.append(f"stripped before {', '.join(profile.strips)}")
    return "; ".join(parts)


def tools(profile: Any) -> str:
    if profile.tool_format is None:
        return "none"
    return f"{profile.tool_format}; {'parallel calls' if profile.parallel_calls else 'one call a turn'}"
