"""Checks that an engine serves the weights it claims, by log-probabilities.

A few one-token calls are compared with the weight probe of the checkpoint. An engine that answers like
the previous weights, or like neither, raises Unavailable. Without a probe, or if the engine is too busy,
nothing is checked.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from pathlib import Path

from afield.errors import Unavailable
from afield.interfaces.engine import Engine, GenerateRequest
from afield.interfaces.shared_weights import read_shared_weights
from afield.interfaces.weight_probe import SESSION, WeightProbe, read_weight_probe
from afield.types import Sampling

log = logging.getLogger(__name__)
NOISE = 1e-4
"""Log-probability difference that float32 rounding between batch layouts explains."""
CLOSER = 3.0
"""Ratio of the distances to new and old weights above which the old weights are served."""
FAR = 0.3
"""Log-probability difference beyond any rounding error."""
CHECK_TIMEOUT_S = 30.0
"""Timeout of the check, in seconds."""


async def read_probe(path: str) -> WeightProbe | None:
    """Probe of the weights in a directory, also while they are in memory alone; None without one."""
    return await asyncio.to_thread(_read_probe, Path(path)) if path else None


def _read_probe(directory: Path) -> WeightProbe | None:
    shared = read_shared_weights(directory)
    return shared.probe if shared is not None else read_weight_probe(directory)


async def check_weights_match(
    engine: Engine, version: int, new: WeightProbe | None, old: WeightProbe | None
) -> None:
    """Raises Unavailable if the engine does not answer with `version`; `old` is the previous probe."""
    if new is None:
        return
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            logprobs = await asyncio.gather(*(_probe(engine, new.prompt_ids[:n]) for n in new.lengths))
    except TimeoutError:
        log.warning(
            "weights: check timed out, engine is busy version=%d timeout_s=%g", version, CHECK_TIMEOUT_S
        )
        return
    distance = _distance(logprobs, new)
    same_questions = old is not None and (old.prompt_ids, old.lengths) == (new.prompt_ids, new.lengths)
    old_distance = _distance(logprobs, old) if old is not None and same_questions else None
    if old_distance is not None and distance > CLOSER * old_distance + NOISE:
        raise Unavailable(
            f"the engine accepted weights version {version} but still answers with the previous weights"
            f" (its log-probabilities differ by {distance:.2g} from the new weights and by {old_distance:.2g}"
            " from the previous ones); restart it"
        )
    if distance > FAR:
        raise Unavailable(
            f"the engine accepted weights version {version} but does not answer with them (its"
            f" log-probabilities differ by {distance:.2g} from theirs); restart it"
        )


def _distance(logprobs: list[float], probe: WeightProbe) -> float:
    return max(abs(p - q) for p, q in zip(logprobs, probe.logprobs, strict=True))


async def _probe(engine: Engine, prompt_ids: tuple[int, ...]) -> float:
    call = GenerateRequest(
        id=SESSION,
        session_id=SESSION,
        prompt_ids=prompt_ids,
        sampling=Sampling(temperature=0.0),
        max_tokens=1,
        stop_ids=(),
    )
    async with aclosing(engine.generate(call)) as chunks:
        logprobs = [p async for chunk in chunks for p in chunk.logprobs]
    if len(logprobs) != 1:
        raise Unavailable(f"the engine returned {len(logprobs)} log-probabilities for a request of one token")
    return logprobs[0]
