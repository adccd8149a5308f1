"""Request validation that every engine applies before it samples."""

from __future__ import annotations

from afield.errors import Conflict
from afield.interfaces.engine import EngineInfo, GenerateRequest, LogprobMode


def check_call(call: GenerateRequest, info: EngineInfo, *, ids: bool = True) -> None:
    """Raise ValueError for a call that the engine cannot serve.

    `ids=False` skips the comparison of token ids with the vocabulary, for servers that check it themselves.
    """
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
    top_logprobs = max(call.top_logprobs, call.prompt_logprobs or 0)
    if top_logprobs > info.max_top_logprobs:
        raise ValueError(
            f"call {call.id!r} asks for {top_logprobs} top_logprobs; this engine reports at most"
            f" {info.max_top_logprobs}"
        )
    if call.prompt_logprobs is not None and not info.prompt_logprobs:
        raise ValueError(
            f"call {call.id!r} asks for prompt_logprobs, which this engine ({info.kind}) does not report;"
            " leave them out"
        )
    if call.constraint is not None and not info.constraints:
        raise ValueError(
            f"call {call.id!r} has a constraint, which this engine ({info.kind}) cannot enforce; leave it"
            " out, or use another engine"
        )
    if call.max_tokens < 1:
        raise ValueError(f"call {call.id!r} has max_tokens {call.max_tokens}; ask for at least 1")


def check_mode(call: GenerateRequest, mode: LogprobMode, url: str, remedy: str) -> None:
    """Raise ValueError when the server would not report log-probabilities of the sampled distribution.

    That depends on the sampling parameters of the call and the server's log-probability `mode`.
    """
    sampling = call.sampling
    if mode == "processed" or sampling.temperature == 0:
        return
    if mode == "tempered" and not sampling.truncated:
        return
    if mode == "raw" and sampling.temperature == 1 and not sampling.truncated:
        return
    parameters = f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, top_k {sampling.top_k}"
    before = "temperature and truncation" if mode == "raw" else "truncation"
    raise ValueError(
        f"call {call.id!r} samples with {parameters}, but {url} reports log-probabilities before"
        f" {before}; {remedy}"
    )


def is_newer(version: int, served: int) -> bool:
    """Whether to load weights of `version`; raises Conflict for weights older than those served."""
    if version < served:
        raise Conflict(f"version {version} is older than version {served}, which is being served")
    return version > served
