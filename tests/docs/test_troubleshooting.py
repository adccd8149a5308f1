"""The code contains every message on the troubleshooting page."""

from __future__ import annotations

import ast
import functools
import re

import pytest

from support.pages import DOCS, SOURCE

PAGE = DOCS / "troubleshooting.md"
MESSAGES = re.findall(r"^### `(.+)`$", PAGE.read_text(), re.M)


@functools.cache
def literals() -> str:
    """All string literals of the package, f-strings with `...` in place of their values."""
    texts: list[str] = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


@pytest.mark.parametrize("message", MESSAGES)
def test_code_contains_the_message(message: str) -> None:
    assert message in literals()


def test_troubleshooting_page_has_at_least_20_messages() -> None:
    assert len(MESSAGES) >= 20
