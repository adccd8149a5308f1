"""Environment of the tests with Harbor's own package, made once under the cache."""

from __future__ import annotations

from pathlib import Path

from afield.harnesses import terminus_2
from afield.harnesses.base import PyPI
from afield.settings.environment import Environment
from afield.utils.installations import interpreter, python_environment
from support.paths import ROOT


def harbor_python() -> Path:
    """Interpreter that has harbor and afield without extras. Raises Unavailable."""
    package = terminus_2.agent.package
    assert isinstance(package, PyPI)
    requirements = ("-e", str(ROOT), *package.packages)
    return python_environment(Environment.read().envs, "harbor", requirements, python=interpreter("3.12"))
