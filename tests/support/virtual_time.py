"""An event loop whose clock is simulated: it jumps to the next timer whenever nothing is left to do.

Hours pass in seconds, and the same program gives the same run. Work in threads (`asyncio.to_thread`) is
started one piece at a time, when everything else of this moment is done; the clock stands still until
it ends, or asks the loop for something. When nothing is ready, no timer is set and no thread works, the
wait would last for ever: that is an error. Sockets are served when they are ready, but the clock does
not wait for them.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextvars import Context
from itertools import count
from queue import Empty, SimpleQueue
from threading import Event, local
from typing import Any, TypeVar

T = TypeVar("T")


class Stuck(RuntimeError):
    """Nothing will ever happen again, and somebody still waits."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` counts simulated seconds from `start`."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._threads = ThreadPoolExecutor(thread_name_prefix="virtual")
        self._queued: deque[Callable[[], bool]] = deque()
        self._working: set[int] = set()  # pieces of work that hold the clock
        self._asking: set[int] = set()  # ... and those that may be waiting for the loop
        self._woken = False  # one was, and goes on now
        self._spending: set[Event] = set()
        self._news: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._piece = local()
        self._pieces = count(1)
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self._now

    def close(self) -> None:
        super().close()
        for over in list(self._spending):  # nobody will wake them any more
            over.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def run_in_executor(
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()
        place, piece = executor or self._threads, next(self._pieces)

        def work() -> None:
            self._piece.number = piece
            done: Future[T] = Future()
            try:
                done.set_result(func(*args))
            except BaseException as error:  # noqa: BLE001  it belongs to whoever awaits the future
                done.set_exception(error)
            self._piece.number = None
            self._news.put(lambda: ended(done))

        def ended(done: Future[T]) -> None:
            self._working.discard(piece)
            self._asking.discard(piece)
            if future.done():
                return
            if error := done.exception():
                future.set_exception(error)
            else:
                future.set_result(done.result())

        def begin() -> bool:
            if future.cancelled():
                return False
            self._working.add(piece)
            place.submit(work)
            return True

        self._queued.append(begin)
        return future

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = super().call_soon_threadsafe(callback, *args, context=context)
        if piece := getattr(self._piece, "number", None):
            self._news.put(lambda: self._asks(piece))
        return handle

    def spend(self, seconds: float) -> None:
        """For work in a thread of this loop: so much simulated time passes before it goes on."""
        piece: int | None = getattr(self._piece, "number", None)
        if piece is None:
            raise RuntimeError("spend is for work in a thread of this loop; elsewhere use asyncio.sleep")
        over = Event()
        self._spending.add(over)

        def wake() -> None:
            self._asking.discard(piece)
            self._working.add(piece)
            self._woken = True
            over.set()

        def sleep() -> None:
            self._asks(piece)
            self.call_later(seconds, wake)

        self._news.put(sleep)
        over.wait()
        self._spending.discard(over)

    def settle(self, ready: bool, timer: bool) -> bool:
        """Let threads work; whether that gave the loop something to do. Waits for them if it must."""
        begun = False
        while self._queued and not begun:
            begun = self._queued.popleft()()
        begun, self._woken = begun or self._woken, False
        wait = begun or (not ready and bool(self._working or (self._asking and not timer)))
        try:
            self._news.get(block=wait)()
        except Empty:
            return False
        return True

    def jump(self, seconds: float | None) -> None:
        if seconds is None:
            waiting = sorted(task.get_name() for task in asyncio.all_tasks(self))
            raise Stuck(
                f"nothing can happen any more at {self._now:g} s: no timer is set and no thread works, but"
                f" {len(waiting)} tasks wait ({', '.join(waiting[:8])}); something was never set or released"
            )
        self._now += seconds

    def _asks(self, piece: int) -> None:
        if piece in self._working:
            self._working.discard(piece)
            self._asking.add(piece)


class _Jumping(selectors.DefaultSelector):
    """Where a loop would wait for time to pass, its clock is moved instead."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = timeout is not None and timeout <= 0
        heard = self._loop.settle(ready, timer=timeout is not None)
        events = super().select(0)
        if not (ready or heard or events):
            self._loop.jump(timeout)
        return events


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in simulated time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
