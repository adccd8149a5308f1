"""Front process: passes connections to the gateway process of their session.

1. Accepts a connection, peeks at its first request and finds the session id.
2. Passes the open socket to that session's process; request bytes do not pass through the front.
3. Starts the gateway processes, and restarts one that dies.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from afield.errors import Unavailable, UsageError
from afield.gateway.shards import route
from afield.utils.gateway_process import GatewayProcess

log = logging.getLogger(__name__)
HEAD = 32 * 1024
"""Maximum of bytes that are peeked for the head of a request."""
FIRST_REQUEST_TIMEOUT_S = 30.0
"""Timeout for the head of a connection's first request, in seconds."""
START_S = 180.0
"""Time for a process to start, in seconds."""
ACCEPT_AGAIN_S = 0.1
"""Pause after a failed accept, in seconds."""
PEEK_AGAIN_S = 0.25
"""Pause between peeks without new bytes, in seconds."""
AGAIN_S = 5.0
"""Pause before a failed process is started again, in seconds."""
TERM_S = 15.0
"""Time from SIGTERM to SIGKILL, in seconds."""


class Process:
    """A gateway process and the socket through which it receives connections."""

    def __init__(
        self,
        command: Sequence[str],
        index: int,
        environment: Mapping[str, str],
        *,
        settings: Callable[[int, int], bytes],
        start_timeout_s: float = START_S,
    ) -> None:
        """`settings` makes its input from its index and the descriptor of its link."""
        self.process = GatewayProcess(command, environment, None, start_timeout_s=start_timeout_s)
        self.link: socket.socket | None = None
        self._index = index
        self._settings = settings
        self._handing_over = asyncio.Lock()
        self._writable = asyncio.Event()

    async def start(self) -> dict[str, str]:
        """Starts the process and returns what it prints when it is ready."""
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.link.setblocking(False)
        with theirs:
            link = theirs.fileno()
            await self.process.start(self._settings(self._index, link), (link,))
        try:
            return await self.process.ready()
        except (Unavailable, UsageError) as error:
            await self.stop()
            raise Unavailable(f"gateway process {self._index}: {error}") from error

    async def hand_over(self, connection: socket.socket) -> None:
        """Passes a connection to the process, waiting while its socket is full. Raises OSError if it is gone.

        An event loop has one callback per descriptor, so one caller at a time waits on the link.
        """
        async with self._handing_over:
            while True:
                link = self.link
                assert link is not None
                try:
                    socket.send_fds(link, [b"c"], [connection.fileno()])
                    return
                except BlockingIOError:
                    await self._wait_for_space(link)

    async def _wait_for_space(self, link: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._writable.clear()
        loop.add_writer(link, self._writable.set)
        try:
            await self._writable.wait()
        finally:
            if link.fileno() >= 0:  # otherwise `close_link` has removed it
                loop.remove_writer(link)

    def close_link(self) -> None:
        """Closes the link of a dead process and wakes callers that wait for space."""
        if self.link is not None and self.link.fileno() >= 0:
            asyncio.get_running_loop().remove_writer(self.link)
            self.link.close()
        self._writable.set()

    async def stop(self) -> None:
        await self.process.stop(TERM_S)
        self.close_link()


class Front:
    """Accepts connections for several gateway processes."""

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        environment: Mapping[str, str],
        *,
        settings: Callable[[int, int], bytes],
        start_timeout_s: float = START_S,
        per_address: int = sys.maxsize,
    ) -> None:
        """`settings` makes each process's input. `per_address` limits connections without a whole head."""
        self._processes = [
            Process(command, index, environment, settings=settings, start_timeout_s=start_timeout_s)
            for index in range(count)
        ]
        self._looking: set[asyncio.Task[None]] = set()
        self._headless: Counter[str] = Counter()
        self._per_address = per_address

    async def serve(self, listener: socket.socket, ready: Callable[[dict[str, str]], None]) -> None:
        """Serves until cancelled."""
        listener.setblocking(False)
        try:
            # One after the other: the first one creates the store.
            started = [await process.start() for process in self._processes]
            ready(started[0])
            async with asyncio.TaskGroup() as tasks:
                for process in self._processes:
                    tasks.create_task(self._keep(process))
                tasks.create_task(self._accept(listener))
        finally:
            for task in self._looking:
                task.cancel()
            await asyncio.gather(*(process.stop() for process in self._processes))

    async def _keep(self, process: Process) -> None:
        while True:
            code = await process.process.wait()
            log.error("front: gateway process ended, restarting code=%s", code)
            process.close_link()
            with suppress(Unavailable):
                await process.start()
                continue
            await asyncio.sleep(AGAIN_S)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, peer = await loop.sock_accept(listener)
            except OSError as error:  # for example no descriptor left: connections wait in the backlog
                log.error("front: accept failed error=%s", error)
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            address = str(peer[0]) if peer else ""
            if self._headless[address] >= self._per_address:
                connection.close()
                continue
            self._headless[address] += 1
            task = asyncio.create_task(self._look(connection, address))
            self._looking.add(task)
            task.add_done_callback(self._looking.discard)

    async def _look(self, connection: socket.socket, address: str) -> None:
        with connection:
            connection.setblocking(False)
            try:
                async with asyncio.timeout(FIRST_REQUEST_TIMEOUT_S):
                    head = await _peek(connection)
            except TimeoutError:
                return
            finally:
                self._headless[address] -= 1
                if not self._headless[address]:
                    del self._headless[address]
            if head:
                try:
                    async with asyncio.timeout(FIRST_REQUEST_TIMEOUT_S):
                        await self._processes[route(head, len(self._processes))].hand_over(connection)
                except (OSError, ValueError) as error:  # the process is restarting; the client will retry
                    log.error("front: connection dropped error=%s", error)


async def _peek(connection: socket.socket) -> bytes:
    """Returns the head of the first request without consuming it; empty if the client is gone."""
    loop = asyncio.get_running_loop()
    seen = 0
    while True:
        readable = asyncio.Event()
        loop.add_reader(connection, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(connection)
        try:
            head = connection.recv(HEAD, socket.MSG_PEEK)
        except BlockingIOError:
            continue
        except OSError:
            return b""
        if not head or b"\r\n\r\n" in head or len(head) >= HEAD:
            if seen:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            return head
        if len(head) == seen:  # the client has closed its side, or the kernel is short of memory
            await asyncio.sleep(PEEK_AGAIN_S)
        seen = len(head)
        # A peek does not consume: half a head would keep the descriptor readable.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, seen + 1)


async def receive_connections(link: int, take: Callable[[socket.socket], None]) -> None:
    """Receives connections in a gateway process until the front is gone."""
    loop = asyncio.get_running_loop()
    with socket.socket(fileno=link) as passing:
        passing.setblocking(False)
        while True:
            readable = asyncio.Event()
            loop.add_reader(passing, readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(passing)
            try:
                message, descriptors, _, _ = socket.recv_fds(passing, 64, 64)
            except BlockingIOError:
                continue
            for descriptor in descriptors:
                take(socket.socket(fileno=descriptor))
            if not message:
                return
