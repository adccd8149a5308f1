"""Tool-call and reasoning formats of model families.

A tool-call format has markers around a section of calls and a reader for one call. Readers never repair: text
that is not exactly the format stays text. To add a format, list it in `FORMATS`; `template_probes` finds the
one that a chat template uses by a round trip, so the order matters only if two formats read the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from afield.chat.parsers.base import CallReader
from afield.chat.parsers.json_calls import HeadedCall, ObjectCall
from afield.chat.parsers.tagged_calls import TaggedCall, Tags
from afield.chat.template import Tool


class ToolFormat(Struct, frozen=True, kw_only=True):
    """Tool-call format: markers of a section of calls, and a reader for one call."""

    name: str
    """Name of the format, as in template profiles."""
    opening: str
    """Literal that begins a section of calls, or a call in formats without sections."""
    reader: Callable[[Sequence[Tool]], CallReader]
    """Factory of a reader for one call."""
    first: str = ""
    """Literal between the opening and the first call; empty for none."""
    next: str | None = None
    """Literal between two calls of a section; None if a section is one call."""
    end: str = ""
    """Literal that ends a section; optional in replies. Empty for none."""
    bare: bool = False
    """Whether a reply that begins with a brace is a call without an opening."""
    literals: tuple[str, ...] = ()
    """Other literals that the reader expects."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Literals that structure a reply; parsed rather than hidden, even if they are special tokens."""
        return tuple({self.opening, self.first, self.next or "", self.end, *self.literals} - {""})


class ReasoningFormat(Struct, frozen=True):
    """Tags around reasoning."""

    name: str
    """Name of the format, as in template profiles."""
    opening: str
    """Literal before the reasoning."""
    closing: str
    """Literal after the reasoning."""


HARMONY = "harmony"
"""Name of the harmony format, which covers reasoning and calls; see `harmony`."""

REASONING: tuple[ReasoningFormat, ...] = (
    ReasoningFormat("think", "<think>", "</think>"),
    ReasoningFormat("THINK", "[THINK]", "[/THINK]"),
    ReasoningFormat("seed", "<seed:think>", "</seed:think>"),
    ReasoningFormat("cohere", "<|START_THINKING|>", "<|END_THINKING|>"),
)


def _tagged(name: str, opening: str, tags: Tags, first: str = "", end: str = "") -> ToolFormat:
    return ToolFormat(
        name=name,
        opening=opening,
        reader=lambda tools: TaggedCall(tags, tools),
        first=first,
        next=first or None,
        end=end,
        literals=tags.literals,
    )


_QWEN_XML = Tags(
    "<function=", ">", "<parameter=", ">", "", "</parameter>", ("</function>", "</tool_call>"), lines=True
)
_GLM = Tags("", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", ("</tool_call>",))
_MINIMAX = Tags("", '">', '<parameter name="', '">', "", "</parameter>", ("</invoke>",))
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>")
_SEP = "<｜tool▁sep｜>"
_KIMI = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")

FORMATS: tuple[ToolFormat, ...] = (
    ToolFormat(
        name="hermes",
        opening="<tool_call>",
        reader=lambda tools: ObjectCall("</tool_call>"),
        literals=("</tool_call>",),
    ),
    _tagged("qwen_xml", "<tool_call>", _QWEN_XML),
    _tagged("glm", "<tool_call>", _GLM),
    _tagged("minimax", "<minimax:tool_call>", _MINIMAX, '<invoke name="', "</minimax:tool_call>"),
    ToolFormat(
        name="llama_json",
        opening="<|python_tag|>",
        reader=lambda tools: ObjectCall(arguments="parameters"),
        next=";",
        bare=True,
    ),
    ToolFormat(
        name="mistral_list",
        opening="[TOOL_CALLS]",
        reader=lambda tools: ObjectCall(),
        first="[",
        next=",",
        end="]",
    ),
    ToolFormat(
        name="mistral_args",
        opening="[TOOL_CALLS]",
        reader=lambda tools: HeadedCall("[ARGS]", id_mark="[CALL_ID]"),
        literals=("[ARGS]", "[CALL_ID]"),
    ),
    ToolFormat(
        name="deepseek_v3",
        opening=_DEEPSEEK[0],
        reader=lambda tools: HeadedCall("\n```json\n", f"```{_DEEPSEEK[3]}", prefix=f"function{_SEP}"),
        first=_DEEPSEEK[1],
        next=_DEEPSEEK[1],
        end=_DEEPSEEK[2],
        literals=(_DEEPSEEK[3], _SEP),
    ),
    ToolFormat(
        name="deepseek_v31",
        opening=_DEEPSEEK[0],
        reader=lambda tools: HeadedCall(_SEP, _DEEPSEEK[3]),
        first=_DEEPSEEK[1],
        next=_DEEPSEEK[1],
        end=_DEEPSEEK[2],
        literals=(_DEEPSEEK[3], _SEP),
    ),
    ToolFormat(
        name="kimi",
        opening="<|tool_calls_section_begin|>",
        reader=lambda tools: HeadedCall(_KIMI[1], _KIMI[2], id_is_name=True),
        first=_KIMI[0],
        next=_KIMI[0],
        end="<|tool_calls_section_end|>",
        literals=_KIMI[1:],
    ),
    # Phi and Granite. Phi closes the list with one more special token, which is hidden.
    ToolFormat(
        name="json_list",
        opening="<|tool_call|>",
        reader=lambda tools: ObjectCall(),
        first="[",
        next=",",
        end="]",
    ),
    ToolFormat(
        name="cohere",
        opening="<|START_ACTION|>",
        reader=lambda tools: ObjectCall(name="tool_name", arguments="parameters", id="tool_call_id"),
        first="[",
        next=",",
        end="]",
    ),
)
