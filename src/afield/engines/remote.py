"""Base class of engines behind a URL: connect, generate, pause, load weights.

1. Entering the engine reads and measures the server's properties; `info` reads its weight version each time.
2. Weights are loaded while generation is paused, so that no token is sampled from half of them. After a
   failed load the engine refuses calls until a later load succeeds.
3. A server that answers with older weights than before was restarted: the engine refuses calls.
4. `pause` from outside outlasts a load.
"""

from __future__ import annotations

import asyncio
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct, structs

from afield.engines.checks import check_call, check_mode, is_newer
from afield.engines.http import CALLERS_FAULT, EngineHttpClient
from afield.engines.lora import AdapterLease, AdapterLeases, is_adapter
from afield.engines.probe import MODE_PROMPTS, TokenLogprobs, mode_call
from afield.errors import Unavailable, UsageError
from afield.interfaces.engine import Chunk, EngineInfo, GenerateRequest
from afield.interfaces.shared_weights import FILE_TIMEOUT_S, POLL_S, overdue, pending_file
from afield.types import Constraint, FinishReason, VersionSpan
from afield.wire import encode

log = logging.getLogger(__name__)
SURE = 0.1  # nats below 0 that still count as probability 1
# Grammar of one letter after a text of 0 tokens: older xgrammar releases do not support `max_tokens`. It has
# no token ids, see `chat.reply_grammar`.
PROBE = Constraint(
    grammar=encode(
        {
            "type": "structural_tag",
            "format": {
                "type": "sequence",
                "elements": [
                    {"type": "any_text", "excludes": [], "max_tokens": 0},
                    {"type": "const_string", "value": "q"},
                ],
            },
        }
    ).decode()
)
UNKNOWN_VOCABULARY = 1 << 31  # the server refuses ids it does not have
LOOPBACK = {"127.0.0.1", "localhost", "::1"}


class RemoteEngine(ABC):
    """Engine behind a URL; subclasses implement the server's endpoints."""

    remedy = ""
    """How to make the server report processed log-probabilities."""

    def __init__(
        self,
        url: str,
        *,
        version: int = 0,
        vocab_size: int | None = None,
        api_key: str | None = None,
        idle_s: float = 120.0,
        answer_s: float = 900.0,
    ) -> None:
        """Create an engine; `async with` connects it.

        Args:
            url: base URL of the server.
            version: version of weights that the server does not label.
            vocab_size: vocabulary size for checking token ids; None leaves the check to the server.
            api_key: bearer token; None sends none.
            idle_s: seconds between two reads of a stream before the call fails.
            answer_s: seconds to wait for a response without streaming.
        """
        self._http = EngineHttpClient(
            url, api_key=api_key, idle_s=idle_s, held=lambda: self._held or self._swapping
        )
        self.url = self._http.url
        self._initial, self._version = version, version
        self._vocab_size, self._answer_s = vocab_size or UNKNOWN_VOCABULARY, answer_s
        self._held = self._swapping = False
        self._spoiled: str | None = None
        self._lost: int | None = None  # version that a restarted server has lost
        self._ends = 0  # number of weight loads that aborted all calls
        self._loading = asyncio.Lock()
        self._leases = AdapterLeases()
        self._known: EngineInfo | None = None

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        try:
            self._known = await self._learn()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._known = None
        try:
            if self._held:
                # Otherwise the next client waits forever.
                with suppress(Unavailable):
                    await self._thaw()
                self._held = False
        finally:
            await self._http.__aexit__(*exc)

    async def info(self) -> EngineInfo:
        """Properties of the server with its current weight version; raises Unavailable if it is down."""
        facts = self._entered()
        await self._refresh()
        if self._lost is not None and self._version >= self._lost:
            self._lost = None
        return structs.replace(facts, version=self._version)

    async def generate(self, call: GenerateRequest) -> AsyncGenerator[Chunk]:
        """Sample a reply. A call keeps its LoRA adapter until its lease is revoked.

        A call that the server aborted to load weights continues with the new ones.
        """
        sampled = CallProgress()
        while True:
            ends = self._ends
            with self._leases.held() as lease:
                remaining = _rest(call, sampled.begin())
                if remaining.prompt_logprobs is not None:  # servers report these with whole replies only
                    remaining = structs.replace(remaining, stream=False)
                pieces = (
                    self._streamed(remaining, lease) if remaining.stream else self._whole(remaining, lease)
                )
                async with aclosing(pieces):
                    async for chunk in pieces:
                        interrupted = ends != self._ends or (lease is not None and lease.revoked)
                        # A server cannot continue in the middle of a grammar.
                        resumes = (
                            interrupted and call.constraint is None and chunk.finish is FinishReason.ABORTED
                        )
                        chunk = sampled.add(chunk, resumes)
                        if chunk.token_ids or not resumes:
                            yield chunk
                        if resumes:
                            break
                    else:
                        return

    async def load(self, version: int, path: str) -> None:
        """Load full weights or an adapter from `path`; an empty path labels weights that are loaded already.

        Full weights are loaded while generation is paused.
        """
        self._entered()
        async with self._loading:
            await self._refresh()
            if not is_newer(version, self._version) and not self._spoiled:
                await self._make_room()
                return
            self._check_manageable(f"load version {version}")
            if not path:
                await self._name(version)
                await self._expect(version)
                return
            if is_adapter(path):
                await self._adopt(version, path)
                await self._expect(version)
                return
            # A wrong path may crash the server, so a local path is checked first.
            near = urlsplit(self.url).hostname in LOOPBACK
            if near and not (Path(path) / "config.json").is_file():
                raise UsageError(
                    f"version {version}: {path!r} is not a model directory (it has no config.json)"
                    " and no adapter (no adapter_config.json)"
                )
            await self._check_weights(version, path)
            await self._wait_for_weights(Path(path))
            self._swapping = True
            try:
                # Inside `try`, because the server may pause although its response is lost.
                await self._freeze()
                await self._swap_or_spoil(version, path)
            finally:
                self._swapping = False
                if not self._held:
                    await self._thaw()

    async def pause(self) -> None:
        """Stop sampling of running and new calls until `resume`; no call ends."""
        self._entered()
        self._check_manageable("be paused")
        await self._freeze()
        self._held = True

    async def resume(self) -> None:
        """Continue the calls that `pause` stopped."""
        self._entered()
        await self._thaw()
        self._held = False

    # --- implemented per server -------------------------------------------------------------------

    @abstractmethod
    async def _learn(self) -> EngineInfo:
        """Read and measure the properties of the server."""
        ...

    @abstractmethod
    async def _refresh(self) -> None:
        """Set `_version` to the version that the server reports."""

    def _check_manageable(self, what: str) -> None:  # noqa: B027 (most servers are)
        """Raise UsageError, with the remedy, when the server cannot do `what`."""

    @abstractmethod
    async def _freeze(self) -> None:
        """Pause generation on the server."""
        ...

    @abstractmethod
    async def _thaw(self) -> None:
        """Resume generation on the server."""
        ...

    @abstractmethod
    async def _swap(self, version: int, path: str) -> None:
        """Replace the weights while generation is paused."""
        ...

    async def _make_room(self) -> None:  # noqa: B027 (not every server has adapters)
        """Free adapter slots: another process may have loaded a newer adapter than the calls here use."""

    async def _check_weights(self, version: int, path: str) -> None:  # noqa: B027 (most servers take any)
        """Raise UsageError for weights that this server would load wrongly."""

    async def _wait_for_weights(self, directory: Path) -> None:
        """Wait until the server can load the weights; they may be in their trainer's memory before."""
        limit = asyncio.timeout(FILE_TIMEOUT_S)
        shared = None
        try:
            async with limit:
                while (shared := await asyncio.to_thread(pending_file, directory)) is not None:
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            if shared is None or not limit.expired():
                raise
            raise overdue(directory, shared, FILE_TIMEOUT_S) from error

    async def _adopt(self, version: int, path: str) -> None:
        """Serve an adapter to new calls; raises UsageError when the server refuses it."""
        raise UsageError(f"{self.url} takes no adapters; publish whole weights as version {version}")

    @abstractmethod
    async def _name(self, version: int) -> None:
        """Label the weights that another process has loaded."""

    @abstractmethod
    def _whole(self, call: GenerateRequest, lease: AdapterLease | None = None) -> AsyncGenerator[Chunk]:
        """Chunks of a call without streaming."""
        ...

    @abstractmethod
    def _streamed(self, call: GenerateRequest, lease: AdapterLease | None = None) -> AsyncGenerator[Chunk]:
        """Chunks of a streamed call."""
        ...

    # --- shared -----------------------------------------------------------------------------------

    def _entered(self) -> EngineInfo:
        if self._known is None:
            raise Unavailable(f"the engine at {self.url} is not connected; enter it with `async with`")
        return self._known

    def _limit(self, call: GenerateRequest) -> int:
        """Maximum number of tokens to request; raises for a call that cannot be served."""
        info = self._entered()
        if self._spoiled:
            raise Unavailable(self._spoiled)
        if self._lost is not None:
            raise Unavailable(
                f"{self.url} lost version {self._lost}: it was restarted with older weights; load it again"
            )
        check_call(call, info, ids=False)
        check_mode(call, info.logprobs, self.url, self.remedy)
        if call.images and not info.images:
            raise ValueError(f"call {call.id!r} has images, which {self.url} does not take")
        return min(call.max_tokens, info.max_context - len(call.prompt_ids))

    async def _holds(self) -> bool:
        """Measure whether the server enforces constraints and reports log-probabilities under their masks.

        A grammar of one letter must give one token with probability 1, as `afield.models.masks` does.
        """
        drawn: TokenLogprobs = []
        try:
            for prompt in MODE_PROMPTS:
                call = structs.replace(mode_call(prompt), max_tokens=1, constraint=PROBE)
                drawn += await self._draw(call)
        except (ValueError, Unavailable) as error:
            log.info("%s enforces no constraints: %s", self.url, error)
            return False
        return len({token for token, _ in drawn}) == 1 and all(p > -SURE for _, p in drawn)

    async def _draw(self, call: GenerateRequest) -> TokenLogprobs:
        drawn = [chunk async for chunk in self._whole(call)]
        return [pair for chunk in drawn for pair in zip(chunk.token_ids, chunk.logprobs, strict=True)]

    def _expanded(self, call: GenerateRequest, prompt_ids: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """Prompt as the server reports it, if images expanded it; None if it is unchanged."""
        if prompt_ids is None or prompt_ids == call.prompt_ids:
            return None
        if not call.images:
            raise Unavailable(
                f"{self.url} changed the prompt token ids of call {call.id!r};"
                " the engine must use ids as it receives them"
            )
        return prompt_ids

    async def _swap_or_spoil(self, version: int, path: str) -> None:
        try:
            await self._swap(version, path)
            await self._expect(version)
        except BaseException as error:
            self._spoiled = f"{self.url} failed to load version {version} and may hold parts of it: {error}"
            raise
        self._spoiled = self._lost = None

    def _check_kept(self, version: int, before: int) -> None:
        """Detect a server restart: the reply's `version` is older than that `before` the call.

        Skipped while an adapter is served, because the reported version is then that of the base weights.
        """
        if version < before and self._leases.newest is None:
            self._lost = max(before, self._lost or 0)

    async def _expect(self, version: int) -> None:
        """Raise Unavailable unless the server reports the version.

        A load balancer may have routed the command to another server.
        """
        await self._refresh()
        if self._version != version:
            raise Unavailable(f"{self.url} was sent version {version} but reports {self._version}")

    async def _order(self, path: str, body: Any = None) -> bytes:
        """POST an admin command; every failure raises Unavailable."""
        try:
            return await self._http.ask("POST", path, body, idle_s=self._answer_s)
        except ValueError as error:
            raise Unavailable(str(error)) from error


def _rest(call: GenerateRequest, sampled: list[int]) -> GenerateRequest:
    """Continuation of a call: sampled tokens become part of the prompt."""
    if not sampled:
        return call
    return structs.replace(
        call,
        prompt_ids=(*call.prompt_ids, *sampled),
        max_tokens=call.max_tokens - len(sampled),
        prompt_logprobs=None,
    )


# --- server responses: versions, errors, gauges -----------------------------------------------------


class ModelCard(Struct):
    """Entry of `/v1/models`: a model or a LoRA adapter."""

    id: str
    """Model name for requests."""
    max_model_len: int | None = None
    """Context length in tokens; None for SGLang and for adapters."""
    parent: str | None = None
    """Base model of an adapter (vLLM); None for a model."""


class ModelList(Struct):
    """Body of `/v1/models`."""

    data: list[ModelCard]
    """Served models and adapters."""


MODELS = msgspec.json.Decoder(ModelList)


class LabelSpan(Struct):
    """Range of sampled tokens with one weight label."""

    version: str
    """Weight label of the server; see `as_version`."""
    start: int
    """Index of the first token."""
    end: int
    """Index after the last token."""


class StreamError(Struct):
    """Error event of a stream."""

    message: str = ""
    """Error message of the server."""
    code: int | None = None
    """HTTP status that a response without streaming would have; None if the server sends none."""

    def as_error(self, url: str) -> Exception:
        """ValueError if the caller is at fault, else Unavailable."""
        if self.code in CALLERS_FAULT:
            return ValueError(f"{url} refuses the call: {self.message}")
        return Unavailable(f"{url} failed in the middle of a reply: {self.message}")


def exact_spans(spans: list[LabelSpan], length: int, initial: int, url: str) -> tuple[VersionSpan, ...]:
    """Convert a server's spans; raises Unavailable unless they cover all `length` tokens."""
    named = (
        (span.start, span.end, as_version(span.version, initial)) for span in spans if span.end > span.start
    )
    exact = tuple(VersionSpan(start, end, version, version) for start, end, version in named)
    ends = [0, *(span.end for span in exact)]
    if [span.start for span in exact] != ends[:-1] or ends[-1] != length:
        raise Unavailable(f"{url} reports version spans {spans} that do not cover its {length} tokens")
    return exact


class CallProgress:
    """Tokens and versions of a call that takes several requests, counted from its first token."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._spans: list[VersionSpan] = []
        self._base = 0

    def begin(self) -> list[int]:
        """Start the next request; returns the tokens sampled so far."""
        self._base = len(self._ids)
        return self._ids

    def add(self, chunk: Chunk, resumes: bool) -> Chunk:
        """Convert a chunk of one request to a chunk of the call; `resumes` if another request follows."""
        start = len(self._ids)
        self._ids += chunk.token_ids
        if chunk.token_ids:
            self._spans.append(VersionSpan(start, len(self._ids), chunk.low, chunk.high))
        if chunk.versions is not None:
            moved = [
                VersionSpan(s.start + self._base, s.end + self._base, s.low, s.high) for s in chunk.versions
            ]
            self._spans = [span for span in self._spans if span.end <= self._base] + moved
        if not (resumes or self._base):
            return chunk
        return structs.replace(
            chunk,
            finish=None if resumes else chunk.finish,
            prompt_ids=None if self._base else chunk.prompt_ids,
            versions=None if resumes or chunk.versions is None else tuple(self._spans),
        )


def as_version(label: str, initial: int) -> int:
    """Version of a weight label; `initial` for a label that is not a number ("default")."""
    return int(label) if label.isdecimal() else initial


def gauge(text: bytes, name: str) -> int | None:
    """Sum of a Prometheus gauge over all labels; None if the server does not report it."""
    values = re.findall(
        rb"^" + re.escape(name.encode()) + rb"(?:\{[^\n]*\})? ([0-9.eE+-]+)$", text, re.MULTILINE
    )
    return round(sum(map(float, values))) if values else None
