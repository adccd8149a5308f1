"""What an agent sees of its rollout: who it is, and where its model is."""

from __future__ import annotations

from typing import Self

from msgspec import Struct

from afield.types import Sampling
from afield.wire import Invocation


class Context(Struct, frozen=True, kw_only=True):
    """OpenAI clients take `openai_base_url` and `api_key`; Anthropic and Gemini clients take `base_url`.

    `seed` is for what the agent itself draws at random. A rollout that is tried again because something
    around it broke gets the same one, so that long rollouts, which break more often, are not replaced by
    short ones.
    """

    base_url: str
    openai_base_url: str
    api_key: str
    model_id: str
    session_id: str
    rollout_id: str
    attempt: int
    group_id: str
    input_id: str
    exp_id: str
    sampling: Sampling | None = None
    seed: int | None = None

    @classmethod
    def of(cls, invocation: Invocation) -> Self:
        return cls(**{name: getattr(invocation, name) for name in cls.__struct_fields__})

    def __repr__(self) -> str:
        shown = {n: getattr(self, n) for n in self.__struct_fields__ if n != "api_key"}
        return f"Context({', '.join(f'{n}={v!r}' for n, v in shown.items())}, api_key='***')"
