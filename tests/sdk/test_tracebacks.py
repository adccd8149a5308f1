"""Tracebacks of agent errors, and results that agents return."""

from __future__ import annotations

import traceback

import pytest

from afield.errors import TaskFailure, VerifierFailure
from afield.sdk.classify import attributed
from afield.sdk.results import read_result


def test_the_traceback_contains_only_frames_of_the_agent() -> None:
    def agent() -> None:
        raise KeyError("answer")

    with pytest.raises(TaskFailure) as raised, attributed(TaskFailure):
        agent()
    text = raised.value.failure.traceback
    assert text.endswith("KeyError: 'answer'\n")
    assert "TaskFailure" not in text
    assert text == "".join(traceback.format_exception(raised.value.__cause__))


def test_a_failure_raised_by_the_agent_keeps_its_cause() -> None:
    with pytest.raises(TaskFailure) as raised, attributed(TaskFailure):
        try:
            raise KeyError("answer")
        except KeyError as error:
            raise TaskFailure("the row has no answer") from error
    text = raised.value.failure.traceback
    assert "KeyError: 'answer'" in text and text.endswith("TaskFailure: the row has no answer\n")


def test_none_as_a_result_is_refused() -> None:
    with pytest.raises(VerifierFailure, match="returned None; return its reward"):
        read_result(None)
