"""Event loops in threads: coroutines of callers, a main coroutine, and their end."""

from __future__ import annotations

import asyncio
from concurrent.futures import CancelledError

import pytest

from afield.utils.loop_thread import LoopThread


async def forever() -> None:
    await asyncio.Event().wait()


async def leave() -> None:
    raise SystemExit(3)


async def current() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def test_coroutines_run_in_one_loop_until_it_is_stopped() -> None:
    thread = LoopThread("test").start()
    loop = thread.submit(current()).result()
    assert thread.start().submit(current()).result() is loop
    hanging = thread.submit(forever())
    thread.stop()
    assert thread.join() and not thread.alive and loop.is_closed()
    with pytest.raises(CancelledError):
        hanging.result()
    thread.stop()
    thread.call(loop.stop)  # does nothing after the end


def test_a_task_that_exits_does_not_end_the_loop() -> None:
    thread = LoopThread("test").start()
    with pytest.raises(SystemExit):
        thread.submit(leave()).result()
    assert thread.submit(current()).result().is_running()
    thread.stop()
    thread.join()


def test_the_loop_ends_with_its_main_coroutine_and_cancels_what_it_left() -> None:
    left: list[asyncio.Task[None]] = []
    joined: list[bool] = []

    async def main() -> None:
        left.append(asyncio.create_task(forever()))
        joined.append(thread.join())  # does not wait for itself

    thread = LoopThread("test", main)
    thread.start()
    assert thread.join() and left[0].cancelled() and joined == [False]


def test_what_is_submitted_at_the_end_or_later_is_cancelled() -> None:
    async def main() -> None:
        """Ends while others submit."""

    for _ in range(50):
        thread = LoopThread("test", main).start()
        futures = [thread.submit(forever()) for _ in range(50)]
        thread.join()
        futures.append(thread.submit(forever()))
        for future in futures:
            with pytest.raises(CancelledError):
                future.result(60)


def test_one_that_was_not_started_has_nothing_to_end() -> None:
    thread = LoopThread("test")
    thread.stop()
    assert thread.join() and not thread.alive
