"""Torch engine in a process of its own.

`TorchEngineProcess` starts `python -m afield.engines.torch.worker FD` and talks to it over a socket pair. The
engine process exits when the socket closes, so it never outlives its owner, even after SIGKILL.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Self

import msgspec
from msgspec import structs

from afield.engines.chunk_queue import ChunkQueue
from afield.engines.torch.messages import (
    START,
    CallMessage,
    CancelMessage,
    ChunkMessage,
    EngineOptions,
    ErrorMessage,
    InfoMessage,
    LoadMessage,
    MessageWriter,
    Reply,
    ReplyMessage,
    Request,
    read_frame,
)
from afield.errors import Unavailable
from afield.interfaces.engine import Chunk, EngineInfo, GenerateRequest
from afield.utils.child_process import wait_or_kill

WORKER = "afield.engines.torch.worker"


class TorchEngineProcess:
    """Embedded engine for a transformers model directory, in a child process; arguments of `TorchEngine`."""

    def __init__(self, model_path: str | Path, **options: Any) -> None:
        self._options = EngineOptions(model_path=str(model_path), **options)
        self._calls: dict[int, ChunkQueue] = {}
        self._replies: dict[int, asyncio.Future[EngineInfo]] = {}
        self._number = START
        self._down = "the engine is not running; enter it with `async with`"
        self._process: asyncio.subprocess.Process | None = None
        self._writer: MessageWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._process is not None and self._process.returncode is None:
            raise RuntimeError(
                "this engine is already running; leave starting it to its gateway or engine pool"
            )
        ours, theirs = socket.socketpair()
        try:
            command = (sys.executable, "-m", WORKER, str(theirs.fileno()))
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=2, pass_fds=(theirs.fileno(),)
            )
        finally:
            theirs.close()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        self._writer, self._down = MessageWriter(writer), ""
        self._reading = asyncio.create_task(self._read(reader))
        try:
            await self._ask(START, self._options)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._writer is None or self._process is None or self._reading is None:
            return
        await self._writer.close()
        await wait_or_kill(self._process)
        await self._reading
        self._writer = self._reading = None

    @property
    def pid(self) -> int | None:
        """Process id; None before the engine was started."""
        return self._process.pid if self._process else None

    async def info(self) -> EngineInfo:
        number = self._next()
        return await self._ask(number, InfoMessage(number))

    async def generate(self, call: GenerateRequest) -> AsyncGenerator[Chunk]:
        number, chunks = self._next(), ChunkQueue()
        self._calls[number] = chunks
        self._send(CallMessage(number, structs.replace(call, base_ids=())))
        ended = False
        try:
            while not ended:
                chunk = await chunks.take()
                ended = chunk.finish is not None
                yield chunk
        finally:
            del self._calls[number]
            if not ended and not self._down:
                self._send(CancelMessage(number))

    async def load(self, version: int, path: str) -> None:
        number = self._next()
        await self._ask(number, LoadMessage(number, version, path))

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _send(self, message: Request) -> None:
        if self._down or self._writer is None:
            raise Unavailable(self._down)
        self._writer.send(message)

    async def _ask(self, number: int, message: Request) -> EngineInfo:
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(message)
            return await reply
        finally:
            del self._replies[number]

    async def _read(self, reader: asyncio.StreamReader) -> None:
        decoder = msgspec.msgpack.Decoder(list[Reply])
        while (frame := await read_frame(reader)) is not None:
            for message in decoder.decode(frame):
                self._receive(message)
        assert self._process is not None
        code = await self._process.wait()
        self._down = f"the engine process ended with {_exit_text(code)}; start the gateway again"
        for chunks in self._calls.values():
            chunks.receive(Unavailable(self._down))
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(Unavailable(self._down))

    def _receive(self, message: Reply) -> None:
        if chunks := self._calls.get(message.number):
            item = message.chunk if isinstance(message, ChunkMessage) else None
            chunks.receive(item or _exception(message))
        elif (reply := self._replies.get(message.number)) and not reply.done():
            if isinstance(message, ReplyMessage):
                reply.set_result(message.info)
            else:
                reply.set_exception(_exception(message))


def _exception(message: Reply) -> Exception:
    assert isinstance(message, ErrorMessage), message
    return message.to_exception()


def _exit_text(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
