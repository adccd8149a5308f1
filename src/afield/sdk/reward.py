"""Reward: a base class for graders.

A subclass defines `__call__` (keyword arguments, sync or async) and returns a number, or a dict of
named numbers. What comes out is finite, or a VerifierFailure: an exception in a grader is never
blamed on the agent it grades.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from afield.errors import VerifierFailure
from afield.sdk.classify import attributed
from afield.sdk.result import number, read_rewards


class Reward:
    """`name` is the class's name unless the subclass sets another."""

    name: str = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__
        if "__call__" in cls.__dict__:
            cls.__call__ = _graded(cls.__dict__["__call__"])

    def __call__(self, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} defines no __call__(self, **kwargs) -> float")


def _graded(grade: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(grade)
    def call(self: Reward, *args: Any, **kwargs: Any) -> Any:
        with attributed(VerifierFailure):
            value = grade(self, *args, **kwargs)
        return _later(value, self.name) if inspect.isawaitable(value) else _checked(value, self.name)

    async def later(self: Reward, *args: Any, **kwargs: Any) -> Any:
        return await call(self, *args, **kwargs)

    # Frameworks ask whether a callable is a coroutine function before they decide how to call it.
    return functools.wraps(grade)(later) if inspect.iscoroutinefunction(grade) else call


async def _later(value: Awaitable[Any], name: str) -> Any:
    with attributed(VerifierFailure):
        value = await value
    return _checked(value, name)


def _checked(value: object, name: str) -> float | dict[str, float]:
    return read_rewards(value) if isinstance(value, Mapping) else number(value, f"reward {name!r}")
