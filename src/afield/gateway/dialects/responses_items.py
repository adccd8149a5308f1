"""OpenAI Responses: messages of a conversation as the items a client would have sent.

What was sampled has the ids it was handed out with; what a client sent has ids that name no turn.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from typing import Any

from afield.gateway.dialects.responses_stream import Items
from afield.gateway.dialects.summaries import summary_of
from afield.gateway.turn_ids import seal_summary
from afield.interfaces import Image
from afield.types import Message, Turn

Json = dict[str, Any]


def image_url(image: Image) -> str | None:
    if image.data is None:
        return image.url
    return f"data:{image.media_type};base64,{base64.b64encode(image.data).decode()}"


class InputItems:
    """`items` makes those of a turn, `image` the URL of one by its digest."""

    def __init__(self, items: Callable[[Turn], Items], image: Callable[[str], str | None]) -> None:
        self._items = items
        self._image = image
        self._custom: set[str] = set()  # calls of custom tools, whose results are of another kind
        self._sent = 0

    def of(self, path: Iterable[Turn], instructions: str | None) -> list[Json]:
        """Everything the last turn of a path was asked with."""
        turns = list(path)
        made: list[Json] = []
        for turn in turns:
            sampled = turn is not turns[-1]
            messages = turn.messages[:-1]
            if turn is turns[0] and instructions and messages[:1] and messages[0].role == "system":
                messages = messages[1:]
            for message in messages:
                made += self.message(message, turn)
            if sampled:
                made += self._reply(turn.messages[-1], self._items(turn))
        return made

    def message(self, message: Message, turn: Turn) -> list[Json]:
        """A message that a client sent."""
        if (summary := summary_of(message)) is not None:
            sealed = seal_summary(turn.id, summary)
            return [{"type": "compaction", "id": self._id("cmp", turn), "encrypted_content": sealed}]
        if message.role == "assistant":
            return self._echoed(message, turn)
        if message.role == "tool":
            kind = "custom_tool_call" if message.tool_call_id in self._custom else "function_call"
            output = message.content if not message.images else self._content(message)
            item = {"type": f"{kind}_output", "id": self._id("fco", turn), "call_id": message.tool_call_id}
            return [item | {"output": output, "status": "completed"}]
        item = {"type": "message", "id": self._id("msg", turn), "role": message.role}
        return [item | {"content": self._content(message), "status": "completed"}]

    def _id(self, kind: str, turn: Turn) -> str:
        self._sent += 1
        return f"{kind}_in_{turn.id}_{self._sent}"

    def _content(self, message: Message) -> list[Json]:
        parts: list[Json] = []
        at = 0
        for image in message.images:
            parts += [{"type": "input_text", "text": message.content[at : image.at]}] if image.at > at else []
            at = image.at
            url = self._image(image.digest)
            parts.append({"type": "input_image", "image_url": url, "detail": "auto", "file_id": None})
        rest = message.content[at:]
        return [*parts, {"type": "input_text", "text": rest}] if rest or not parts else parts

    def _echoed(self, message: Message, turn: Turn) -> list[Json]:
        """An assistant's message that nobody sampled here."""
        items = self._reply(message, self._items(turn))
        for item in items:
            item["id"] = self._id(item["id"].partition("_")[0], turn)
            item.pop("encrypted_content", None)
        return items

    def _reply(self, reply: Message, items: Items) -> list[Json]:
        made = items.of_reply(reply, "completed")
        self._custom |= {item["call_id"] for item in made if item["type"] == "custom_tool_call"}
        return made
