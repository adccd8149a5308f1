"""README and docs are true: their Python runs, their commands work, their links lead somewhere."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

from afield.cli.main import parser
from gateways import POLICY
from processes import afield, summary

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.S)


PYTHON = [(page, code) for page in PAGES for code in blocks(page, "python")]


@pytest.mark.parametrize(("page", "code"), PYTHON, ids=[f"{p.name}-{n}" for n, (p, _) in enumerate(PYTHON)])
def test_every_python_block_runs(page: Path, code: str) -> None:
    module = types.ModuleType("documented")
    sys.modules["documented"] = module
    exec(compile(code, str(page), "exec"), module.__dict__)


def test_the_readmes_own_agent_and_tasks_train(tmp_path: Path) -> None:
    readme = ROOT / "README.md"
    (tmp_path / "my_agent.py").write_text(blocks(readme, "python")[0])
    (tmp_path / "tasks.jsonl").write_text(blocks(readme, "json")[0])
    told = [line for block in blocks(readme, "console") for line in block.splitlines()]
    (command,) = [line for line in told if line.startswith("$ .venv/bin/afield train")]
    arguments = command.removeprefix("$ .venv/bin/afield ").replace("path/to/hf-model", str(POLICY)).split()
    sizes = ("--steps", 1, "--tasks-per-step", 2, "--rollouts", 2, "--json")
    code, out, err = afield(tmp_path, *arguments, *sizes)
    assert code == 0, err
    assert summary(out)["rollouts"] == 4


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_options_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
    known = {option for command in commands().values() for option in command}
    prose = re.sub(r"`(pip|make|git) [^`]*`", "", text)
    for option in set(re.findall(r"`[^`\n]*?(--[a-z][a-z-]+)", prose)):
        assert option in known, f"{page.name} names {option}, which no command has"


def commands() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for action in parser()._actions:
        if isinstance(action.choices, dict):
            for name, sub in action.choices.items():
                found[name] = {o for a in sub._actions for o in a.option_strings}
    return found


def test_the_http_page_lists_what_is_served() -> None:
    from afield.gateway.control import ROUTES

    text = (ROOT / "docs" / "http-api.md").read_text()
    for method, pattern, _ in ROUTES:
        path = pattern.pattern.replace("(?P<id>[^/]+)", "{id}")
        tail = path.rpartition("/")[2]
        assert f"{method} {path}" in text or f"`/{tail}`" in text, f"{method} {path}"
