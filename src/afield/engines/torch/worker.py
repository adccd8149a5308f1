"""Engine process: serves a torch engine on a socket."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys

import msgspec
from msgspec import structs

from afield.engines.chunk_queue import Item
from afield.engines.torch.decoder import DecodeCall
from afield.engines.torch.engine import ChunkSink, TorchEngine
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
    ReplyMessage,
    Request,
    read_frame,
)
from afield.errors import AfieldError

FAILURES = (ValueError, AfieldError, MemoryError)


class CallOutlet(ChunkSink):
    """Sends the chunks of one call."""

    def __init__(self, number: int, worker: TorchEngineWorker) -> None:
        super().__init__(worker.engine.outbox)
        self._number, self._worker = number, worker

    def receive(self, item: Item) -> None:
        failed = isinstance(item, Exception)
        message = ErrorMessage.of(self._number, item) if failed else ChunkMessage(self._number, item)
        self._worker.messages.send(message)
        if failed or item.finish is not None:
            self._worker.running.pop(self._number, None)


class TorchEngineWorker:
    """Answers the requests of one connection."""

    def __init__(self, engine: TorchEngine, messages: MessageWriter) -> None:
        self.engine, self.messages = engine, messages
        self.running: dict[int, DecodeCall | None] = {}  # None until the call is submitted
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(self, request: Request) -> None:
        if isinstance(request, CancelMessage):
            if call := self.running.pop(request.number, None):
                self.engine.drop(call)
            return
        if isinstance(request, CallMessage):
            self.running[request.number] = None
        task = asyncio.create_task(self._answer(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, request: Request) -> None:
        number = START if isinstance(request, EngineOptions) else request.number
        try:
            if isinstance(request, CallMessage):
                await self._submit(request)
                return
            if isinstance(request, LoadMessage):
                await self.engine.load(request.version, request.path)
            self.messages.send(ReplyMessage(number, await self.engine.info()))
        except FAILURES as error:
            self.running.pop(number, None)
            self.messages.send(ErrorMessage.of(number, error))

    async def _submit(self, request: CallMessage) -> None:
        call = await self.engine.submit(request.call, CallOutlet(request.number, self))
        if request.number in self.running:
            self.running[request.number] = call
        else:  # cancelled meanwhile
            self.engine.drop(call)


async def serve(connection: socket.socket) -> None:
    """Serve an engine on a socket until it closes."""
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    messages = MessageWriter(writer)
    first = await read_frame(reader)
    if first is None:
        return
    (options,) = msgspec.msgpack.decode(first, type=list[EngineOptions])
    engine = TorchEngine(**structs.asdict(options))
    # Read while the model loads as well: a gateway that ends meanwhile must not leave it on the device.
    reading = asyncio.create_task(read_frame(reader))
    starting = asyncio.create_task(engine.__aenter__())
    await asyncio.wait((reading, starting), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        return
    try:
        await starting
    except FAILURES as error:
        messages.send(ErrorMessage.of(START, error))
        await messages.close()
        return
    worker = TorchEngineWorker(engine, messages)
    worker.handle(InfoMessage(START))
    decoder = msgspec.msgpack.Decoder(list[Request])
    frame = await reading
    while frame is not None:
        for request in decoder.decode(frame):
            worker.handle(request)
        frame = await read_frame(reader)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        asyncio.run(serve(connection))
    sys.stderr.flush()
    os._exit(0)  # the model thread may be in a long step; nothing is left to save


if __name__ == "__main__":
    main()
