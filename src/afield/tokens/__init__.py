"""Messages to token ids and back, for one model at a time. Start at `ChatTokens.load`."""

from afield.tokens.certify import Certificate
from afield.tokens.chat import ChatTokens
from afield.tokens.events import Event, ReasoningDelta, TextDelta, ToolArguments, ToolEnd, ToolStart
from afield.tokens.parser import Parser
from afield.tokens.template import TemplateRefusal, Tool

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
