"""Links, commands and options of README and docs exist."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from afield.cli.main import parser
from afield.harbor import server as harbor_server
from afield.sdk import serve
from support.pages import DOCS, PAGES, page_name, shell_commands
from support.paths import ROOT


def commands() -> dict[str, dict[str, str | None]]:
    """Options of every command, with their help texts."""
    options: dict[str, dict[str, str | None]] = {}
    for action in parser()._actions:
        if isinstance(action.choices, dict):
            for name, command in action.choices.items():
                options[name] = {o: a.help for a in command._actions for o in a.option_strings}
    return options


def anchors(page: Path) -> set[str]:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_and_options_exist(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
        if not target.startswith(("http://", "https://")):
            linked = page.parent / target if target else page
            assert linked.exists(), target
            assert not anchor or anchor in anchors(linked), f"{page_name(page)}: {target}#{anchor}"
    options = {option for command in commands().values() for option in command}
    modules = (*serve.parser()._actions, *harbor_server.parser()._actions)
    options |= {word for action in modules for word in action.option_strings}
    text = re.sub(
        r"`(pip|make|git|vllm|mkdocs|pytest|podman-compose) [^`]*`|^.*harbor.*$", "", text, flags=re.M
    )
    for option in set(re.findall(r"`[^`\n]*?(--[a-z][a-z-]+)", text)) - FOREIGN_OPTIONS:
        assert option in options, f"{page_name(page)} names {option}, which no command has"


FOREIGN_OPTIONS = {
    "--logprobs-mode",
    "--enable-scale-out",
    "--strict",
    "--format",
    "--build-arg",
    "--profile",
    "--measure",
}


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_afield_commands_parse(page: Path) -> None:
    for words in shell_commands(page):
        # An image's command is `afield`.
        runs_image = words[:2] == ["podman", "run"] and "--entrypoint" not in words
        start = words.index("localhost/afield") if runs_image and "localhost/afield" in words else 0
        if words[start].rpartition("/")[2] == "afield" and not {"--help", "--version"} & set(words):
            parser().parse_args(words[start + 1 :])


@pytest.mark.parametrize("page", [p for p in PAGES if p.is_relative_to(DOCS)], ids=page_name)
def test_page_starts_with_what_the_reader_can_do_after_it(page: Path) -> None:
    first = page.read_text().split("\n\n")[1]
    assert first.startswith(("After this ", "On this page ", "This page lists ")), first


def test_cli_page_is_written_from_the_parsers() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "cli_page.py"))["page"]()
    assert (DOCS / "reference" / "cli.md").read_text() == page, "run .venv/bin/python scripts/cli_page.py"


@pytest.mark.parametrize(
    ("command", "page"),
    [
        ("inspect-template", "concepts/tokens.md"),
        ("conformance", "how-to/conformance.md"),
        ("export", "how-to/exports.md"),
        ("agentcore-local", "reference/agentcore-local.md"),
    ],
)
def test_page_explains_every_option_of_its_command(command: str, page: str) -> None:
    options = {option for option, text in commands()[command].items() if text != "==SUPPRESS=="}
    explained = (DOCS / page).read_text()
    missing = [option for option in options - {"-h", "--help"} if f"`{option}" not in explained]
    assert not missing, f"{page} does not explain {missing}"
