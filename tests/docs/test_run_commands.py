"""Commands of the pages that evaluate, show, explain, compare and export runs, run against small runs."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest

from afield.cli.main import main
from afield.orchestrator.state import RunDirectory
from support.client_gateway import threaded_gateway
from support.gateways import POLICY
from support.pages import DOCS, PAGES, page_name, shell_commands
from support.processes import AGENTS, unlearned, write_tasks

SKILLS = (1.0, 1.0, 1.0, 0.3)
ROWS = [{"id": f"q{n}", "question": f"Question {n}?", "skill": skill} for n, skill in enumerate(SKILLS)]
READING = ("show", "why", "compare", "export", "runs", "tail", "ui")
WHOLE = {"export": "--out", "ui": "--export"}
"""Options without which the text only names the command; `ui` would serve until Ctrl-C."""
EVALUATE = DOCS / "how-to" / "evaluate.md"
GENERATED = DOCS / "reference" / "cli.md"


def reading_commands(page: Path) -> list[list[str]]:
    """Commands of a page that read finished runs, from its blocks and its text, as words after `afield`."""
    inline = [code.split() for code in re.findall(r"`(afield [^`\n]*)`", page.read_text())]
    named = [words for words in inline if len(words) > 2 and not any("[" in word for word in words)]
    commands = [words for words in [*shell_commands(page), *named] if words[0].endswith("afield")]
    return [words[1:] for words in commands if words[1] in READING and WHOLE.get(words[1], words[1]) in words]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder with the runs `before` and `after` of the page about evaluation, and the training run `shop`."""
    folder = tmp_path_factory.mktemp("commands")
    shutil.copy(AGENTS / "skilled_agent.py", folder / "agent.py")
    engine, script, freeze = map(str, unlearned(folder))
    tasks = str(write_tasks(folder / "test.jsonl", ROWS))
    with chdir(folder), pytest.MonkeyPatch.context() as patch, threaded_gateway(folder) as gateway:
        provider = gateway.open("endpoint.1")
        patch.setenv("AFIELD_ENDPOINT_KEY", provider.api_key)
        commands = [words[1:] for words in shell_commands(EVALUATE) if "agent.py:agent" in words]
        assert len(commands) == 4  # attempts, prices, an endpoint, a comparison
        for words in ([*commands[0], "--run", "before"], *commands[1:]):
            words = [re.sub("^path/to/.*", str(POLICY), word) for word in words]
            words = [re.sub("^https://.*", provider.openai_base_url, word) for word in words]
            local = [engine, script] if "--endpoint" not in words else []
            assert main([*words, *local, "--runtime", "inline"]) == 0, words
        sizes = ["--steps", "2", "--tasks-per-step", "2", "--rollouts", "2", "--run", "shop", "--json"]
        train = ["train", "agent.py:agent", "--tasks", tasks, "--model", str(POLICY), "--runtime", "inline"]
        assert main([*train, *sizes, engine, script, freeze]) == 0
        yield folder


def test_an_evaluation_goes_on_as_the_page_says(folder: Path) -> None:
    (words,) = re.findall(r"`afield (eval --run NAME --attempts \d+)`", EVALUATE.read_text())
    with chdir(folder):
        assert main(words.replace("NAME", "before").split()) == 0
    assert len(RunDirectory(folder / "runs" / "before").index.rollouts(order="id")) == 8 * len(ROWS)


@pytest.mark.parametrize("page", [p for p in PAGES if p != GENERATED and reading_commands(p)], ids=page_name)
def test_commands_that_read_runs_work(page: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rollout = RunDirectory(folder / "runs" / "before").index.rollouts(order="id")[0].id
    written = {"RUN": "before", "OTHER": "after", "DIR": "runs/before", "ROLLOUT": rollout}
    with chdir(folder):
        for words in reading_commands(page):
            known = [written.get(word, re.sub(r"^demo-\d.*", "shop", word)) for word in words]
            code = main(known)
            out, err = capsys.readouterr()
            assert code == 0 and "Traceback" not in err, f"{words}\n{out}\n{err}"
            assert out, words
