"""README and docs are true: their code runs, their commands parse, their tables say what the code does."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import types
import urllib.request
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from msgspec import NODEFAULT, Struct, structs

from afield.chat.escape import POLICIES
from afield.chat.parsers.formats import FORMATS, HARMONY
from afield.chat.tokenizer import THINKING
from afield.cli.main import parser
from afield.cli.report import Summary
from afield.cli.train import OVERRIDABLE
from afield.conformance.client import ClientCommand, Stage
from afield.conformance.clients import CLIENTS
from afield.exclusions import REASONS, SIDE_CALL_HEADER, SideCalls
from afield.factory import RUNTIMES, TOLD
from afield.gateway import admin_api, dialects, prompts, sessions, stored_responses
from afield.interfaces import SessionSpec, SessionState
from afield.options import (
    AgentCoreOptions,
    ContainerOptions,
    KubernetesOptions,
    Limits,
    RayOptions,
    SandboxOptions,
)
from afield.orchestrator.config import DEFAULT_RETRIES, RolloutConfig
from afield.orchestrator.deadlines import Deadlines
from afield.orchestrator.groups import Mode
from afield.orchestrator.training_loop import StepMetrics
from afield.sdk import serve
from afield.settings import TrainConfig, from_file, train_config
from afield.types import Budget, FailureKind, Link, Reason, Sampling, Turn
from support.gateways import ADMIN, POLICY
from support.paths import ROOT
from support.processes import afield, finish, start, summary

SOURCE = ROOT / "src" / "afield"
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
LIVE = {"reference/http-api.md", "how-to/clients.md"}  # their blocks follow each other and talk to a gateway
APART = {"how-to/rollout-client.md"}  # `test_opening` runs its blocks
ADDRESS = "http://127.0.0.1:8400"


def name_of(page: Path) -> str:
    return str(page.relative_to(DOCS if page.is_relative_to(DOCS) else ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.S)


def section(page: Path, heading: str) -> str:
    """The text under a heading, to the next one."""
    _, found, rest = page.read_text().partition(f"# {heading}\n")
    assert found, f"{page.name} has no heading {heading!r}"
    return re.split(r"^#+ ", rest, maxsplit=1, flags=re.M)[0]


def table(page: Path, heading: str) -> list[list[str]]:
    """The cells of all tables under a heading, without their heads."""
    rows: list[list[str]] = []
    for found in re.findall(r"(?:^\|.*\|\n)+", section(page, heading), re.M):
        rows += [[cell.strip() for cell in row.strip("|").split(" | ")] for row in found.splitlines()[2:]]
    assert rows, f"{page.name} has no table under {heading!r}"
    return rows


def named(page: Path, heading: str, column: int = 0) -> list[str]:
    """What stands between backticks in a column."""
    return [name for row in table(page, heading) for name in re.findall(r"`([^`]+)`", row[column])]


# --- what runs -----------------------------------------------------------------------------------

PYTHON = [
    (page, code)
    for page in PAGES
    if name_of(page) not in LIVE | APART
    for code in blocks(page, "python")
    if ADDRESS not in code
]


@pytest.mark.parametrize(
    ("page", "code"), PYTHON, ids=[f"{name_of(p)}-{n}" for n, (p, _) in enumerate(PYTHON)]
)
def test_every_python_block_runs(page: Path, code: str) -> None:
    module = types.ModuleType("documented")
    sys.modules["documented"] = module
    exec(compile(code, str(page), "exec"), module.__dict__)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a gateway with the demo's policy."""
    arguments = ("--model", POLICY, "--port", 0, "--admin-key", ADMIN, "--json")
    process = start(tmp_path_factory.mktemp("gateway"), "gateway", *arguments)
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        finish(process)


def run_there(gateway: str, words: list[str], code: str, folder: Path | None = None) -> str:
    environment = os.environ | {"AFIELD_ADMIN_KEY": ADMIN, "NO_PROXY": "127.0.0.1"}
    command = [*words, code.replace(ADDRESS, gateway)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def installed(code: str) -> bool:
    """Whether a block can run here; one that says what it needs waits for that."""
    needs = re.match(r"# needs ([\w-]+)\n", code)
    return needs is None or any(d.metadata["Name"] == needs[1] for d in metadata.distributions())


@pytest.mark.parametrize("page", sorted(LIVE))
def test_blocks_about_the_gateway_run_against_one(page: str, gateway: str) -> None:
    code = [block for block in blocks(DOCS / page, "python") if installed(block)]
    assert len(code) > 0
    run_there(gateway, [sys.executable, "-c"], "\n".join(code))
    for block in blocks(DOCS / page, "sh"):
        assert '"error"' not in run_there(gateway, ["bash", "-ec"], block)


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


def test_the_readmes_own_agent_gives_rollouts_to_a_program(gateway: str, tmp_path: Path) -> None:
    agent, program = blocks(ROOT / "README.md", "python")
    rows = blocks(ROOT / "README.md", "json")[0]
    (tmp_path / "my_agent.py").write_text(agent)
    (tmp_path / "tasks.jsonl").write_text(rows)
    told = run_there(gateway, [sys.executable, "-c"], program, tmp_path).splitlines()
    assert len(told) == 8 * len(rows.splitlines())
    assert {line.split()[0] for line in told} == {json.loads(row)["id"] for row in rows.splitlines()}
    assert all(int(line.split()[-1]) > 0 for line in told)


def test_what_certify_is_said_to_print_is_what_it_prints() -> None:
    (block,) = [
        block
        for block in blocks(DOCS / "concepts/tokens.md", "console")
        if "afield inspect-template" in block
    ]
    command, _, told = block.partition("\n")
    code, out, err = afield(ROOT, *command.removeprefix("$ afield ").split())
    assert (code, out) == (0, told), err


# --- links, commands, options --------------------------------------------------------------------


def commands() -> dict[str, dict[str, str | None]]:
    """The options of every command, with their help."""
    found: dict[str, dict[str, str | None]] = {}
    for action in parser()._actions:
        if isinstance(action.choices, dict):
            for name, sub in action.choices.items():
                found[name] = {o: a.help for a in sub._actions for o in a.option_strings}
    return found


def anchors(page: Path) -> set[str]:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_options_exist(page: Path) -> None:
    text = page.read_text()
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
        if not target.startswith("http"):
            there = page.parent / target if target else page
            assert there.exists(), target
            assert not anchor or anchor in anchors(there), f"{page.name}: {target}#{anchor}"
    known = {option for command in commands().values() for option in command}
    known |= {word for action in serve.parser()._actions for word in action.option_strings}
    prose = re.sub(r"`(pip|make|git) [^`]*`|^.*harbor.*$", "", text, flags=re.M)
    for option in set(re.findall(r"`[^`\n]*?(--[a-z][a-z-]+)", prose)):
        assert option in known, f"{page.name} names {option}, which no command has"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_that_can_be_pasted_are_understood(page: Path) -> None:
    for line in "\n".join(blocks(page, "console")).splitlines():
        if found := re.match(r"\$ (?:\.venv/bin/)?afield (.*)", line):
            parser().parse_args(shlex.split(found[1], comments=True))


def shown(command: str) -> set[str]:
    told = {option for option, about in commands()[command].items() if about != "==SUPPRESS=="}
    return told - {"-h", "--help"}


def test_the_gateway_page_lists_every_option_and_nothing_else() -> None:
    assert {
        name.split()[0] for name in named(DOCS / "how-to/gateway.md", "Options") if "--" in name
    } == shown("gateway")


@pytest.mark.parametrize(
    ("command", "page"),
    [
        ("inspect-template", "concepts/tokens.md"),
        ("conformance", "how-to/conformance.md"),
        ("export", "how-to/exports.md"),
    ],
)
def test_every_option_has_its_place(command: str, page: str) -> None:
    text = (DOCS / page).read_text()
    missing = [option for option in shown(command) if f"`{option}" not in text]
    assert not missing, f"{page} does not tell what {missing} do"


# --- the contract over HTTP ----------------------------------------------------------------------

HTTP = DOCS / "reference/http-api.md"


def routes() -> set[str]:
    groups = {"(?P<id>[^/]+)": "{id}", "(?P<model>[^:]+)": "{model}"}
    found = [(method, pattern.pattern) for method, pattern, _ in admin_api.ROUTES]
    found += [(method, "{base}" + path) for method, path in admin_api.REPORTS]
    found += [("POST", "{base}" + pattern.pattern) for _, pattern, _ in dialects.ROUTES]
    found += [(method, "{base}/v1/responses/{id}" + rest) for method, rest in stored_responses.ROUTES]
    found += [("GET", "{base}/v1/models"), ("GET", "{base}/v1beta/models"), ("GET", "/health")]
    served: set[str] = set()
    for method, path in found:
        for group, name in groups.items():
            path = path.replace(group, name)
        several = re.search(r"\(\?P<method>([^)]+)\)", path)
        ends = several[1].split("|") if several else [""]
        served |= {f"{method} {path.replace(several[0], end) if several else path}" for end in ends}
    return served


def test_the_http_page_lists_what_is_served_and_nothing_else() -> None:
    told = re.findall(r"`((?:GET|POST|DELETE|PUT|HEAD) [^`?]+?)(?:\?[^`]*)?`", HTTP.read_text())
    assert set(told) == routes()


def test_the_http_page_lists_the_fields_of_a_session() -> None:
    rows = table(HTTP, "Opening a session")
    told = [name for row in rows for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(told) == sorted(SessionSpec.__struct_fields__)
    meaning = {name: row[2] for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    for name, holder in (("sampling", Sampling), ("budget", Budget)):
        assert re.findall(r"`(\w+)`", meaning[name]) == list(holder.__struct_fields__)
    for name, hint in get_type_hints(SessionSpec).items():
        chosen = [value for value in flat(hint) if isinstance(value, str)]
        assert all(f"`{value}`" in meaning[name] + defaults(rows, name) for value in chosen), name


def flat(hint: Any) -> list[Any]:
    inside = get_args(hint)
    return [value for part in inside for value in flat(part)] if inside else [hint]


def defaults(rows: list[list[str]], name: str) -> str:
    return next(row[1] for row in rows if f"`{name}`" in row[0])


def test_the_http_page_lists_the_fields_of_a_state_and_of_a_turn() -> None:
    told = re.findall(r'"(\w+)"', section(HTTP, "State"))
    assert set(told) == {*SessionState.__struct_fields__, "prompt", "sampled"}
    given = {*Turn.__struct_fields__, "kind", "prompt_len", "prompt_ids"} - {"delta_ids"}
    assert set(named(HTTP, "Turns")) == given
    assert all(f"`{phase}`" in section(HTTP, "State") for phase in sessions.SessionPhase)


def test_the_http_page_lists_every_refusal() -> None:
    source = "".join(path.read_text() for path in (SOURCE / "gateway").rglob("*.py"))
    raised = set(re.findall(r'Refusal\(\s*(\d+),\s*"(\w+)"', source))
    assert {(row[0], row[1].strip("`")) for row in table(HTTP, "What goes wrong")} == raised


# --- running it ----------------------------------------------------------------------------------


def test_the_gateway_page_lists_what_is_counted_and_nothing_else(gateway: str) -> None:
    request = urllib.request.Request(f"{gateway}/metrics", headers={"authorization": f"Bearer {ADMIN}"})
    with urllib.request.urlopen(request) as answer:
        served = re.findall(r"# TYPE (\w+)", answer.read().decode())
    assert set(named(DOCS / "how-to/gateway.md", "Metrics")) == set(served)


def test_the_gateway_page_lists_the_engines() -> None:
    from afield.factory import ENGINES

    assert {name.partition("=")[0] for name in named(DOCS / "how-to/gateway.md", "Engines")} >= set(ENGINES)
    assert set(get_args(get_type_hints(admin_api.PauseBody)["in_flight"])) <= set(
        named(DOCS / "how-to/gateway.md", "Weights")
    )


# --- collecting ----------------------------------------------------------------------------------

COLLECT = DOCS / "concepts/collecting.md"
CONFIG = DOCS / "reference/settings.md"
NONE = "none"
SECTIONS = (
    *("What is trained", "Collecting", "Launching", "Validation", "Sampling", "Learning"),
    "Gateway and engine",
)


def fields(holder: type[Struct]) -> dict[str, Any]:
    """The fields of a struct with their defaults."""
    return {field.name: field.default for field in structs.fields(holder)}


def written(value: Any) -> str:
    """A default as the tables have it."""
    if value is None or value is NODEFAULT:
        return NONE if value is None else "needed"
    return f"{value:g}" if isinstance(value, float) else str(value)


def keys_of(cell: str) -> list[str]:
    return re.findall(r"`(\w+)(?: = [^`]+)?`", cell)


def test_the_page_on_collecting_lists_every_deadline_with_its_default_and_key() -> None:
    rows = table(COLLECT, "Deadlines")
    assert [row[0].strip("`") for row in rows] == list(Deadlines.__struct_fields__)
    for row, default in zip(rows, fields(Deadlines).values(), strict=True):
        assert row[4] == written(default), row[0]
        assert set(keys_of(row[5])) <= set(TrainConfig.__struct_fields__), row[0]
        assert keys_of(row[5]), row[0]
    assert fields(TrainConfig)["attempt_timeout_s"] == float(rows[4][5].split()[1])
    assert all(
        f"`{deadline}`" in (DOCS / "how-to/rollout-client.md").read_text() for deadline in fields(Deadlines)
    )


def test_the_page_on_collecting_lists_every_field_of_a_plan() -> None:
    rows = table(COLLECT, "Groups")
    assert sorted(row[0].strip("`") for row in rows) == sorted(RolloutConfig.__struct_fields__)
    for row in rows:
        name = row[0].strip("`")
        default = fields(RolloutConfig)[name]
        if not isinstance(default, bool | Struct) and name != "retries":
            assert row[1].strip("`") == written(default), name
        assert set(keys_of(row[2])) <= set(TrainConfig.__struct_fields__), name
    assert fields(TrainConfig)["rollouts"] == int(rows[2][2].split()[1])


def test_the_page_on_collecting_lists_failures_modes_and_retries() -> None:
    rows = table(COLLECT, "Failures and retries")
    assert [row[0].strip("`") for row in rows] == list(FailureKind)
    told = {name for row in rows for name in re.findall(r"`(\w+)`", row[1])}
    assert told == set(Reason)
    for kind, number in DEFAULT_RETRIES.items():
        key = f"retries_{kind}"
        assert fields(TrainConfig)[key] == number
        assert f"`{key}`, {number}" in next(row[2] for row in rows if row[0] == f"`{kind}`")
    assert [row[0].split("`")[1] for row in table(COLLECT, "Modes")] == list(get_args(Mode))


def test_the_page_on_collecting_lists_what_is_written_about_steps_and_runs() -> None:
    assert named(COLLECT, "A line of `metrics.jsonl`") == list(StepMetrics.__struct_fields__)
    assert set(named(COLLECT, "`summary.json`")) == set(Summary.__struct_fields__)


def test_the_page_on_configuration_lists_every_key_with_its_default() -> None:
    rows = [row for heading in SECTIONS for row in table(CONFIG, heading)]
    told = {name: default for name, default in fields(TrainConfig).items() if not isinstance(default, Struct)}
    assert sorted(row[0].strip("`") for row in rows) == sorted(told)
    assert [row[0].strip("`") for row in table(CONFIG, "Places")] == list(TOLD)
    for row in rows:
        default = told[row[0].strip("`")]
        default = list(default) if isinstance(default, tuple) else default
        if default is None or default is NODEFAULT:
            assert row[1] == written(default), row[0]
        else:
            assert tomllib.loads(f"value = {row[1].strip('`')}")["value"] == default, row[0]


def test_the_page_on_configuration_knows_the_options_and_what_may_change() -> None:
    text = section(CONFIG, "On the command line")
    listed = set(re.findall(r"`(\w+)`", text.partition("The others")[0])) - {"agent"}
    told = {f"--{name.replace('_', '-')}" for name in listed - {"_"}}
    told |= {name.split()[0] for name in named(CONFIG, "On the command line")}
    assert told == shown("train")
    assert set(re.findall(r"`(\w+)`", section(CONFIG, "When a run goes on"))) == set(OVERRIDABLE)


def test_the_configuration_that_is_shown_is_understood(tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_text(blocks(CONFIG, "toml")[0])
    config = train_config(tmp_path / "train.toml", {"agent": "my_agent.py:agent"})
    assert config.tasks == str(tmp_path / "tasks.jsonl")
    assert config.mode == "async" and config.staleness == 2
    assert set(from_file(tmp_path / "train.toml")) <= set(TrainConfig.__struct_fields__)


# --- tokens --------------------------------------------------------------------------------------

TOKENS = DOCS / "concepts/tokens.md"


def test_the_page_on_tokens_knows_links_side_calls_and_every_reason_of_an_exclusion() -> None:
    assert set(named(TOKENS, "Links")) == set(get_args(get_type_hints(Link)["type"]))
    rows = {row[0].strip(" `"): row[1] for row in table(TOKENS, "What is left out")}
    assert rows == {reason.name: str(reason.ground) for reason in REASONS.values()}
    text = section(TOKENS, "Side calls")
    assert SIDE_CALL_HEADER in text
    assert not [word for word in get_args(SideCalls) if f"`{word}`" not in text]


def test_the_page_on_tokens_knows_tiers_policies_and_formats() -> None:
    assert named(TOKENS, "Tiers")[-1] == prompts.RAW
    assert tuple(row[0].split("`")[1] for row in table(TOKENS, "Thinking")) == THINKING
    assert tuple(row[0].split("`")[1] for row in table(TOKENS, "Control tokens in content")) == POLICIES
    text = section(TOKENS, "Certificates")
    formats = [*(f.name for f in FORMATS), HARMONY]
    assert not [name for name in formats if f"`{name}`" not in text]


# --- clients -------------------------------------------------------------------------------------

CLIENT_PAGE = DOCS / "how-to/clients.md"
PROGRAMS = {
    "Claude Code": "claude-code",
    "Codex": "codex",
    "opencode": "opencode",
    "mini-swe-agent": "mini-swe-agent",
    "harbor": "terminus-2",
}


def staged(name: str, folder: Path) -> ClientCommand:
    """How the conformance suite starts a program."""
    (folder / "home").mkdir()
    (folder / "work").mkdir()
    stage = Stage(
        home=folder / "home",
        work=folder / "work",
        programs=Path("bin"),
        base_url=f"{ADDRESS}/s/my-session",
        api_key="the session's key",
        model="any",
    )
    return CLIENTS[name].commands(stage)[0]


@pytest.mark.parametrize("title", PROGRAMS)
def test_programs_are_told_to_start_as_the_conformance_suite_starts_them(title: str, tmp_path: Path) -> None:
    suite = staged(PROGRAMS[title], tmp_path)
    text = section(CLIENT_PAGE, title)
    told = "\n".join(re.findall(r"```console\n(.*?)```", text, re.S))
    apart = {"PYTHONPATH", "CODEX_HOME"}
    assert {*re.findall(r"\b([A-Z][A-Z_]+)=", told)} == {*suite.environment} - apart
    assert {*re.findall(r" (--?[a-z][a-z-]*)\b", told)} <= {*suite.argv}
    assert f"$ {Path(suite.argv[0]).name} " in told


def test_configuration_files_are_those_of_the_conformance_suite(tmp_path: Path) -> None:
    (tmp_path / "codex").mkdir()
    (tmp_path / "opencode").mkdir()
    staged("codex", tmp_path / "codex")
    suite = tomllib.loads((tmp_path / "codex" / "home" / "config.toml").read_text())
    del suite["model_auto_compact_token_limit"]
    assert tomllib.loads(blocks(CLIENT_PAGE, "toml")[0]) == suite
    staged("opencode", tmp_path / "opencode")
    suite = json.loads((tmp_path / "opencode" / "work" / "opencode.json").read_text())
    assert json.loads(blocks(CLIENT_PAGE, "json")[0]) == suite


def test_the_readmes_tree_has_everything_in_the_package() -> None:
    (tree,) = re.findall(r"```\nsrc/afield/\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    told = {line.split()[0] for line in tree.splitlines()}
    there = {p.name + "/" * p.is_dir() for p in SOURCE.iterdir() if p.is_dir() or p.suffix == ".py"}
    assert told == {name for name in there if not name.startswith("__")}


# --- runtimes ------------------------------------------------------------------------------------

RUNTIMES_PAGE = DOCS / "how-to/runtimes.md"


@pytest.mark.parametrize(
    ("heading", "options"),
    [
        ("Sandbox", SandboxOptions),
        ("Limits", Limits),
        ("Container", ContainerOptions),
        ("AgentCore", AgentCoreOptions),
        ("Kubernetes", KubernetesOptions),
        ("Ray", RayOptions),
    ],
)
def test_the_page_on_runtimes_lists_what_each_place_is_told(heading: str, options: type[Struct]) -> None:
    rows = table(RUNTIMES_PAGE, heading)
    assert [row[0].strip("`") for row in rows] == list(options.__struct_fields__)
    if options is Limits:
        assert {row[0].strip("`"): float(row[1]) for row in rows} == fields(Limits)


def test_the_page_on_runtimes_knows_them_all() -> None:
    told = [name.partition("=")[0] for name in named(RUNTIMES_PAGE, "Where agents run")]
    assert [name for name in told if name in RUNTIMES] == [
        *("process", "sandbox", "container", "agentcore", "kubernetes", "ray", "inline", "served")
    ]
    assert set(RUNTIMES) <= set(told)
