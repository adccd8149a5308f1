"""The table of parameters against the SDKs' other major lines and vLLM's own request types."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tests.real.vllm_server import CACHE

from afield.conformance import pins
from afield.gateway.parameters import TABLE
from afield.utils.installations import python_environment

pytestmark = pytest.mark.real
SCRIPT = Path(__file__).parents[1] / "support" / "sdk_parameters.py"


def missing(python: Path) -> dict[str, list[str]]:
    done = subprocess.run([str(python), str(SCRIPT)], capture_output=True, text=True, check=True, timeout=170)
    document: dict[str, list[str]] = json.loads(done.stdout)
    assert "chat" in document and "anthropic" in document
    return {name: gone for name, asked in document.items() if (gone := sorted(set(asked) - set(TABLE[name])))}


def test_every_parameter_of_the_other_lines_of_the_SDKs_is_in_the_table() -> None:
    python = python_environment(CACHE, "sdks", pins.PYTHON["sdks"])
    assert missing(python) == {}


def test_every_parameter_of_vLLM_is_in_the_table() -> None:
    assert missing(python_environment(CACHE, "vllm", pins.VLLM, without=pins.VLLM_WITHOUT)) == {}
