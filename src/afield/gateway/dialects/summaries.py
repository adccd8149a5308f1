"""Summaries that take the place of a conversation: what is asked for them, and how they come back.

A compacted conversation is continued with its user messages and one more, which holds the summary.
"""

from __future__ import annotations

from afield.types import Message

COMPACTION = "compaction"  # tag of a turn that sampled a summary
ASK = (
    "The conversation gets too long and is about to be replaced by a summary of it. Write that summary now,"
    " for whoever goes on with the work and sees nothing else of what happened but the messages of the user:"
    " what was asked for, what was done and found out (names, paths, values and results as they are), what"
    " was decided, and what is left to do. Write the summary only."
)
HEAD = "Summary of the conversation so far, which it replaces:\n\n"


def summary_message(text: str) -> Message:
    return Message(role="user", content=HEAD + text)


def summary_of(message: Message) -> str | None:
    """The summary that a message holds, if it is one."""
    is_summary = message.role == "user" and message.content.startswith(HEAD)
    return message.content[len(HEAD) :] if is_summary else None
