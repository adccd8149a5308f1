"""Event loop in a thread, for callers of other threads."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Self, TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)


class LoopThread:
    """Runs `main`, or the coroutines of callers until `stop`, in a thread. All methods are thread-safe.

    At its end it cancels what still runs, as `asyncio.run` does. A task that raises SystemExit does not end
    it. The thread is a daemon: a program that does not stop it can exit.
    """

    def __init__(self, name: str, main: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        self._name = name
        self._stopping = asyncio.Event()
        self._ending = False
        self._main = main or self._until_stopped
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: Future[asyncio.AbstractEventLoop] = Future()

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> Self:
        """Start the thread. Repeating is harmless."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # the process has no room for a thread
                    self._thread = None
                    raise
        return self

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the loop, which was started. The future is cancelled if the loop ends before."""
        loop = self._loop.result()
        with self._lock:
            if not self._ending:
                return asyncio.run_coroutine_threadsafe(work, loop)
        work.close()
        future: Future[T] = Future()
        future.cancel()
        return future

    def call(self, callback: Callable[[], object]) -> None:
        """Call in the loop; does nothing before its start and after its end."""
        if self._thread is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.result().call_soon_threadsafe(callback)

    def stop(self) -> None:
        """End a loop without a `main`; does not wait. Repeating is harmless."""
        self.call(self._stopping.set)

    def join(self) -> bool:
        """Wait for the end of the thread, if it was started. In the thread itself, return False at once."""
        if self._thread is threading.current_thread():
            return False
        if self._thread is not None:
            self._thread.join()
        return True

    async def _until_stopped(self) -> None:
        await self._stopping.wait()

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            loop = runner.get_loop()
            main = loop.create_task(self._main())
            self._loop.set_result(loop)
            try:
                while not main.done():
                    try:
                        loop.run_until_complete(main)
                    except (SystemExit, KeyboardInterrupt) as error:
                        log.warning("%s: a task raised %r, the event loop goes on", self._name, error)
            finally:
                with self._lock:
                    self._ending = True
                # One more turn makes tasks of all that was submitted; the runner cancels only tasks.
                loop.run_until_complete(asyncio.sleep(0))
