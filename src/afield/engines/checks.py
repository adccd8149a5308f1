"""What every engine here refuses, in the same words."""

from __future__ import annotations

from afield.errors import Conflict
from afield.interfaces.engine import EngineInfo, GenerateRequest


def check_call(call: GenerateRequest, info: EngineInfo, *, ids: bool = True) -> None:
    """Raise ValueError for a call that can never be answered. A server looks at the `ids` itself."""
    if not call.prompt_ids:
        raise ValueError(f"call {call.id!r} has an empty prompt; it needs at least one id")
    if len(call.prompt_ids) >= info.max_context:
        raise ValueError(
            f"call {call.id!r} has a prompt of {len(call.prompt_ids)} ids; the context of"
            f" {info.max_context} leaves room for {info.max_context - 1}"
        )
    for token in (min(call.prompt_ids), max(call.prompt_ids)) if ids else ():
        if not 0 <= token < info.vocab_size:
            raise ValueError(f"call {call.id!r} has the id {token}; the vocabulary has {info.vocab_size}")
    if max(call.top_logprobs, call.prompt_logprobs or 0) > info.max_top_logprobs:
        asked, most = max(call.top_logprobs, call.prompt_logprobs or 0), info.max_top_logprobs
        raise ValueError(f"call {call.id!r} asks for the {asked} likeliest tokens; this engine tells {most}")
    if call.prompt_logprobs is not None and not info.prompt_logprobs:
        raise ValueError(
            f"call {call.id!r} asks for log-probabilities of its prompt, which this engine does not tell"
        )
    if call.constraint is not None and not info.constraints:
        raise ValueError(f"call {call.id!r} has a constraint, which this engine ({info.kind}) cannot enforce")
    if call.max_tokens < 1:
        raise ValueError(f"call {call.id!r} asks for {call.max_tokens} tokens; ask for at least 1")


def is_newer(version: int, served: int) -> bool:
    """Whether these weights have to be loaded: not when they are served already, never when older."""
    if version < served:
        raise Conflict(f"version {version} is older than version {served}, which is being served")
    return version > served
