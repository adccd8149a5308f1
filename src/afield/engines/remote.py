"""What engines behind a URL have in common: entering, refusing, pausing, and swapping weights.

A server is asked what it is on entering, and its version every time `info` is. Weights are swapped while
it stands still, so that no token is sampled by half of them; if that fails it serves nothing until a
later load has succeeded, nor does one that answers with older weights than it had, because it was started
again. A pause asked for from outside outlives a load.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from msgspec import structs

from afield.engines.checks import check_call, is_newer
from afield.engines.http import Http
from afield.engines.logprob_mode import PROMPTS, Drawn, check_mode, probe_call
from afield.engines.lora import Lease, Leases, is_adapter
from afield.engines.spans import Pieces
from afield.errors import Unavailable, UsageError
from afield.interfaces.engine import Chunk, EngineInfo, GenerateRequest
from afield.types import Constraint, FinishReason
from afield.wire import encode

log = logging.getLogger("afield.engines")
SURE = 0.1
# One letter, after a text of no tokens: older releases of xgrammar do not know such a bound. Tokens are not
# named by their ids, see `tokens.reply_grammar`.
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
    remedy = ""  # what gives processed log-probabilities

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
        """`version` is what weights that were never named count as; `idle_s` bounds silence within a
        stream, `answer_s` the wait for an answer in one piece."""
        self._http = Http(url, api_key=api_key, idle_s=idle_s, held=lambda: self._held or self._swapping)
        self.url = self._http.url
        self._initial, self._version = version, version
        self._vocab_size, self._answer_s = vocab_size or UNKNOWN_VOCABULARY, answer_s
        self._held = self._swapping = False
        self._spoiled: str | None = None
        self._lost: int | None = None  # the version it has to have again
        self._ends = 0  # how often all calls were ended to load weights
        self._loading = asyncio.Lock()
        self._leases = Leases()
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
                # Whoever comes after us would wait for ever.
                with suppress(Unavailable):
                    await self._thaw()
                self._held = False
        finally:
            await self._http.__aexit__(*exc)

    async def info(self) -> EngineInfo:
        """Asks the server, so that one that is gone is Unavailable."""
        known = self._entered()
        await self._refresh()
        if self._lost is not None and self._version >= self._lost:
            self._lost = None
        return structs.replace(known, version=self._version)

    async def generate(self, call: GenerateRequest) -> AsyncGenerator[Chunk]:
        """On a server with adapters a call keeps its own, until that is called back.

        One that the server ended because weights were loaded goes on with those.
        """
        sampled = Pieces()
        while True:
            ends = self._ends
            with self._leases.held() as lease:
                rest = _rest(call, sampled.begin())
                if rest.prompt_logprobs is not None:  # servers tell these with whole answers only
                    rest = structs.replace(rest, stream=False)
                pieces = self._streamed(rest, lease) if rest.stream else self._whole(rest, lease)
                async with aclosing(pieces):
                    async for chunk in pieces:
                        ours = ends != self._ends or (lease is not None and lease.called_back)
                        # A server cannot begin in the middle of a grammar.
                        ours = ours and call.constraint is None
                        goes_on = chunk.finish is FinishReason.ABORTED and ours
                        shown = sampled.add(chunk, goes_on)
                        if shown.token_ids or not goes_on:
                            yield shown
                        if goes_on:
                            break
                    else:
                        return

    async def load(self, version: int, path: str) -> None:
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
            # A path that is wrong may end the server, so it is looked at first where that is possible.
            near = urlsplit(self.url).hostname in LOOPBACK
            if near and not (Path(path) / "config.json").is_file():
                raise UsageError(
                    f"version {version}: {path!r} is not a model directory (it has no config.json)"
                    " and no adapter (no adapter_config.json)"
                )
            await self._check_weights(version, path)
            self._swapping = True
            try:
                # Within: a server may have heard of the pause although its answer was lost.
                await self._freeze()
                await self._swap_or_spoil(version, path)
            finally:
                self._swapping = False
                if not self._held:
                    await self._thaw()

    async def pause(self) -> None:
        """Freeze the calls in flight, and those that come, until `resume`."""
        self._entered()
        self._check_manageable("be paused")
        await self._freeze()
        self._held = True

    async def resume(self) -> None:
        self._entered()
        await self._thaw()
        self._held = False

    # --- what a server has to fill in -------------------------------------------------------------

    @abstractmethod
    async def _learn(self) -> EngineInfo: ...

    @abstractmethod
    async def _refresh(self) -> None:
        """Set `_version` to what the server says it has."""

    def _check_manageable(self, what: str) -> None:  # noqa: B027 (most servers are)
        """UsageError with the remedy when the server cannot do this."""

    @abstractmethod
    async def _freeze(self) -> None: ...

    @abstractmethod
    async def _thaw(self) -> None: ...

    @abstractmethod
    async def _swap(self, version: int, path: str) -> None: ...

    async def _make_room(self) -> None:  # noqa: B027 (not every server has adapters)
        """Another process may have put the newest adapter there, beside those our own calls use."""

    async def _check_weights(self, version: int, path: str) -> None:  # noqa: B027 (most servers take any)
        """UsageError for weights that this server would load wrongly."""

    async def _adopt(self, version: int, path: str) -> None:
        """Serve an adapter to the calls that begin from now on; a refusal is a UsageError."""
        raise UsageError(f"{self.url} takes no adapters; publish whole weights as version {version}")

    @abstractmethod
    async def _name(self, version: int) -> None:
        """Say which version the weights are that somebody else has put there."""

    @abstractmethod
    def _whole(self, call: GenerateRequest, lease: Lease | None = None) -> AsyncGenerator[Chunk]: ...

    @abstractmethod
    def _streamed(self, call: GenerateRequest, lease: Lease | None = None) -> AsyncGenerator[Chunk]: ...

    # --- shared -----------------------------------------------------------------------------------

    def _entered(self) -> EngineInfo:
        if self._known is None:
            raise Unavailable(f"the engine at {self.url} is not connected; enter it with `async with`")
        return self._known

    def _limit(self, call: GenerateRequest) -> int:
        """How many tokens to ask for; or why not."""
        info = self._entered()
        if self._spoiled:
            raise Unavailable(self._spoiled)
        if self._lost is not None:
            raise Unavailable(
                f"{self.url} lost version {self._lost}: it was started again with older weights"
            )
        check_call(call, info, ids=False)
        check_mode(call, info.logprobs, self.url, self.remedy)
        if call.images and not info.images:
            raise ValueError(f"call {call.id!r} has images, which {self.url} does not take")
        return min(call.max_tokens, info.max_context - len(call.prompt_ids))

    async def _holds(self) -> bool:
        """Whether the server holds replies to constraints as `afield.masks` does, and tells log-probabilities
        of what is left: tried out with a letter that is one and the same token after any prompt."""
        drawn: Drawn = []
        try:
            for prompt in PROMPTS:
                call = structs.replace(probe_call(prompt), max_tokens=1, constraint=PROBE)
                drawn += await self._draw(call)
        except (ValueError, Unavailable) as error:
            log.info("%s enforces no constraints: %s", self.url, error)
            return False
        return len({token for token, _ in drawn}) == 1 and all(p > -SURE for _, p in drawn)

    async def _draw(self, call: GenerateRequest) -> Drawn:
        drawn = [chunk async for chunk in self._whole(call)]
        return [pair for chunk in drawn for pair in zip(chunk.token_ids, chunk.logprobs, strict=True)]

    def _expanded(self, call: GenerateRequest, told: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """The prompt as the server says it took it, where that is another one."""
        if told is None or told == call.prompt_ids:
            return None
        if not call.images:
            raise Unavailable(f"{self.url} changed the prompt of call {call.id!r}; ids must be taken as sent")
        return told

    async def _swap_or_spoil(self, version: int, path: str) -> None:
        try:
            await self._swap(version, path)
            await self._expect(version)
        except BaseException as error:
            self._spoiled = f"{self.url} failed to load version {version} and may hold parts of it: {error}"
            raise
        self._spoiled = self._lost = None

    def _check_kept(self, told: int, before: int) -> None:
        """An answer is of version `told`, from a server that had `before` when the call began.

        What it tells beside adapters is the version of the weights below them.
        """
        if told < before and self._leases.newest is None:
            self._lost = max(before, self._lost or 0)

    async def _expect(self, version: int) -> None:
        """The server must say itself that it has the version: an order may have gone to another one."""
        await self._refresh()
        if self._version != version:
            raise Unavailable(f"{self.url} was given version {version} but says that it has {self._version}")

    async def _order(self, path: str, body: Any = None) -> bytes:
        """Something the server is told to do; whatever goes wrong is its fault."""
        try:
            return await self._http.ask("POST", path, body, idle_s=self._answer_s)
        except ValueError as error:
            raise Unavailable(str(error)) from error


def _rest(call: GenerateRequest, sampled: list[int]) -> GenerateRequest:
    """What is left to ask for."""
    if not sampled:
        return call
    return structs.replace(
        call,
        prompt_ids=(*call.prompt_ids, *sampled),
        max_tokens=call.max_tokens - len(sampled),
        prompt_logprobs=None,
    )
