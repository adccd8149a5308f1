"""Messages to token ids and back, for one model at a time. Start at `ChatTokens.load`."""

from afield.chat.parsers.events import Event, ReasoningDelta, TextDelta, ToolArguments, ToolEnd, ToolStart
from afield.chat.parsers.parser import Parser
from afield.chat.profile import Certificate
from afield.chat.template import TemplateRefusal, Tool
from afield.chat.tokenizer import ChatTokens

__all__ = [
    "Certificate",
    "ChatTokens",
    "Event",
    "Parser",
    "ReasoningDelta",
    "TemplateRefusal",
    "TextDelta",
    "Tool",
    "ToolArguments",
    "ToolEnd",
    "ToolStart",
]
