"""Chat templates and tokenizers: messages to token ids and back; see `ChatTokenizer.load`."""

from afield.chat.model_files import ModelIdentity, identify
from afield.chat.parsers.base import Event, ReasoningDelta, TextDelta, ToolArguments, ToolEnd, ToolStart
from afield.chat.parsers.reply import ReplyParser
from afield.chat.profile import TemplateProfile
from afield.chat.template import TemplateRefusal, Tool
from afield.chat.tokenizer import ChatTokenizer

__all__ = [
    "ChatTokenizer",
    "Event",
    "ModelIdentity",
    "ReasoningDelta",
    "ReplyParser",
    "TemplateProfile",
    "TemplateRefusal",
    "TextDelta",
    "Tool",
    "ToolArguments",
    "ToolEnd",
    "ToolStart",
    "identify",
]
