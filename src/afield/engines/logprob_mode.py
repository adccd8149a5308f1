"""Which log-probabilities a server reports: found out by asking, and held against every call.

A trainer needs those of the distribution a token was drawn from. Servers report them before temperature
("raw"), after temperature but before truncation ("tempered"), or as drawn ("processed"). Tokens that are
all but forced, by a low temperature or by top_k 1, tell which: their log-probability must go to 0.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from afield.interfaces.engine import GenerateRequest, LogprobMode
from afield.types import Sampling

PROMPTS = ((1, 2, 3), (3, 1), (5, 6, 7, 8))
TOKENS = 8
COLD = 0.1
SURE = -0.02  # a token the model is this sure of tells nothing
Drawn = list[tuple[int, float]]


def probe_call(prompt: tuple[int, ...], **sampling: float) -> GenerateRequest:
    return GenerateRequest(
        id="probe",
        session_id="probe",
        prompt_ids=prompt,
        sampling=Sampling(**sampling),  # type: ignore[arg-type]
        max_tokens=TOKENS,
        stop_ids=(),
    )


async def measure(draw: Callable[[GenerateRequest], Awaitable[Drawn]]) -> LogprobMode:
    """A model that never hesitates tells nothing, and counts as raw: better a refusal than a wrong number."""
    tempered = truncated = 0
    for prompt in PROMPTS:
        free = await draw(probe_call(prompt, temperature=0.0))
        tempered += _moved(free, await draw(probe_call(prompt, temperature=COLD)))
        truncated += _moved(free, await draw(probe_call(prompt, top_k=1)))
    if tempered <= 0:
        return "raw"
    return "processed" if truncated > 0 else "tempered"


def _moved(free: Drawn, forced: Drawn) -> int:
    """Tokens whose log-probability went towards 0 when they were forced, less those where it stayed."""
    score = 0
    for (token, p), (other, q) in zip(free, forced, strict=False):
        if token != other:
            break
        if p < SURE:
            score += 1 if q > 0.7 * p else -1
    return score


def check_mode(call: GenerateRequest, mode: LogprobMode, where: str, remedy: str) -> None:
    """ValueError for a call whose log-probabilities this server would get wrong."""
    sampling = call.sampling
    if mode == "processed" or sampling.temperature == 0:
        return
    if mode == "tempered" and not sampling.truncated:
        return
    if mode == "raw" and sampling.temperature == 1 and not sampling.truncated:
        return
    drawn = f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, top_k {sampling.top_k}"
    before = "temperature and truncation" if mode == "raw" else "truncation"
    raise ValueError(
        f"call {call.id!r} samples with {drawn}, but the log-probabilities of {where} are those before"
        f" {before}; {remedy}"
    )
