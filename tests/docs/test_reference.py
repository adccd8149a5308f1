"""Tables of the docs list exactly what the code has: routes, fields, errors, deadlines, reasons, settings."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from msgspec import NODEFAULT, Struct, structs

from afield import factory
from afield.chat.escape import POLICIES
from afield.chat.parsers.formats import FORMATS, HARMONY
from afield.chat.tokenizer import THINKING
from afield.cli.report import Summary
from afield.conformance.clients import CLIENTS
from afield.engines.scripted import Failing, ScriptRow
from afield.factory import ENGINES, RUNTIMES
from afield.gateway import admin_api, dialects, prompts, sessions, stored_responses
from afield.harnesses import TARGETS, find
from afield.harnesses.base import ClientCommand, Stage
from afield.interfaces import SessionSpec, SessionState
from afield.orchestrator.config import DEFAULT_RETRIES
from afield.orchestrator.deadlines import Deadlines
from afield.orchestrator.groups import Mode
from afield.orchestrator.training_loop import StepMetrics
from afield.runs.exclusions import REASONS, SIDE_CALL_HEADER, SideCalls
from afield.settings.runtimes import (
    AgentCoreOptions,
    ContainerOptions,
    KubernetesOptions,
    RayOptions,
    ResourceLimits,
    SandboxOptions,
)
from afield.settings.train import TrainConfig
from afield.types import Budget, FailureKind, Link, Reason, Sampling, Turn
from support.gateways import POLICY
from support.pages import DOCS, SOURCE, blocks, names, section, table

# --- HTTP API ------------------------------------------------------------------------------------

HTTP = DOCS / "reference" / "http-api.md"


def routes() -> set[str]:
    groups = {"(?P<id>[^/]+)": "{id}", "(?P<model>[^:]+)": "{model}"}
    served = [(method, pattern.pattern) for method, pattern, _ in admin_api.ROUTES]
    served += [(method, "{base}" + path) for method, path in admin_api.SESSION_ROUTES]
    served += [("POST", "{base}" + pattern.pattern) for _, pattern, _ in dialects.ROUTES]
    served += [(method, "{base}/v1/responses/{id}" + rest) for method, rest in stored_responses.ROUTES]
    served += [
        ("GET", "{base}/v1/models"),
        ("GET", "{base}/v1beta/models"),
        ("GET", "/health"),
        ("GET", "/live"),
    ]
    calls: set[str] = set()
    for method, path in served:
        for group, name in groups.items():
            path = path.replace(group, name)
        several = re.search(r"\(\?P<method>([^)]+)\)", path)
        ends = several[1].split("|") if several else [""]
        calls |= {f"{method} {path.replace(several[0], end) if several else path}" for end in ends}
    return calls


def test_http_page_lists_every_route_and_no_other() -> None:
    listed = re.findall(r"`((?:GET|POST|DELETE|PUT|HEAD) [^`?]+?)(?:\?[^`]*)?`", HTTP.read_text())
    assert set(listed) == routes()


def test_http_page_lists_the_fields_of_a_session() -> None:
    rows = table(HTTP, "Open a session")
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(listed) == sorted(SessionSpec.__struct_encode_fields__)
    meaning = {name: " ".join(row[1:]) for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    for name, holder in (("sampling", Sampling), ("budget", Budget)):
        assert re.findall(r"`(\w+)`", meaning[name]) == list(holder.__struct_fields__)
    for name, hint in get_type_hints(SessionSpec).items():
        choices = [value for value in flat(hint) if isinstance(value, str)]
        assert all(f"`{value}`" in meaning[name] for value in choices), name


def flat(hint: Any) -> list[Any]:
    inside = get_args(hint)
    return [value for part in inside for value in flat(part)] if inside else [hint]


def test_http_page_lists_the_fields_of_a_state_and_of_a_turn() -> None:
    listed = re.findall(r'"(\w+)"', section(HTTP, "State"))
    assert set(listed) == {*SessionState.__struct_encode_fields__, "prompt", "sampled"}
    fields = {*Turn.__struct_encode_fields__, "kind", "prompt_len", "prompt_ids"} - {"delta_ids"}
    assert set(names(HTTP, "Turns")) == fields
    assert all(f"`{phase}`" in section(HTTP, "State") for phase in sessions.SessionPhase)


def test_http_page_lists_every_error() -> None:
    source = "".join(path.read_text() for path in (SOURCE / "gateway").rglob("*.py"))
    raised = set(re.findall(r'ApiError\(\s*(\d+),\s*"(\w+)"', source))
    assert {(row[0], row[1].strip("`")) for row in table(HTTP, "Errors")} == raised


def test_gateway_page_lists_engines_and_pause_modes() -> None:
    page = DOCS / "how-to" / "gateway.md"
    assert {name.partition("=")[0] for name in names(page, "Engines")} >= set(ENGINES)
    assert set(get_args(get_type_hints(admin_api.PauseBody)["in_flight"])) <= set(names(page, "Weights"))


# --- Collection ----------------------------------------------------------------------------------

COLLECTING = DOCS / "concepts" / "collecting.md"
RUN_DIRECTORY = DOCS / "reference" / "run-directory.md"


def defaults(holder: type[Struct]) -> dict[str, Any]:
    return {field.name: field.default for field in structs.fields(holder)}


def written(value: Any) -> str:
    """A default as the tables write it."""
    if value is None or value is NODEFAULT:
        return "none" if value is None else "required"
    return f"{value:g}" if isinstance(value, float) else str(value)


def test_collecting_page_lists_every_deadline_with_default_and_setting() -> None:
    rows = table(COLLECTING, "Deadlines")
    assert [row[0].strip("`") for row in rows] == list(Deadlines.__struct_fields__)
    for row, default in zip(rows, defaults(Deadlines).values(), strict=True):
        assert row[4] == written(default), row[0]
        settings = re.findall(r"`(\w+)`", row[5])
        assert settings, row[0]
        assert set(settings) <= set(TrainConfig.__struct_fields__), row[0]
    client = (DOCS / "how-to" / "rollout-client.md").read_text()
    assert all(f"`{deadline}`" in client for deadline in defaults(Deadlines))


def test_collecting_page_lists_failures_retries_and_modes() -> None:
    rows = table(COLLECTING, "Failures and retries")
    assert [row[0].strip("`") for row in rows] == list(FailureKind)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row[1])} == set(Reason)
    for kind, number in DEFAULT_RETRIES.items():
        key = f"retries_{kind}"
        assert defaults(TrainConfig)[key] == number
        assert f"`{key}`, {number}" in next(row[2] for row in rows if row[0] == f"`{kind}`")
    assert [row[0].split("`")[1] for row in table(COLLECTING, "Modes")] == list(get_args(Mode))


def test_run_directory_page_lists_the_fields_of_metrics_and_summary() -> None:
    assert names(RUN_DIRECTORY, "A line of `metrics.jsonl`") == list(StepMetrics.__struct_fields__)
    assert set(names(RUN_DIRECTORY, "`summary.json`")) == set(Summary.__struct_fields__)


# --- Tokens --------------------------------------------------------------------------------------

TOKENS = DOCS / "concepts" / "tokens.md"


def test_tokens_page_lists_links_side_calls_and_exclusion_reasons() -> None:
    assert set(names(TOKENS, "Links")) == set(get_args(get_type_hints(Link)["type"]))
    rows = {row[0].strip(" `"): row[1] for row in table(TOKENS, "Exclusions")}
    assert rows == {reason.name: str(reason.ground) for reason in REASONS.values()}
    text = section(TOKENS, "Side calls")
    assert SIDE_CALL_HEADER in text
    assert not [word for word in get_args(SideCalls) if f"`{word}`" not in text]


def test_tokens_page_lists_tiers_policies_and_tool_formats() -> None:
    assert names(TOKENS, "Tiers")[-1] == prompts.RAW
    assert tuple(row[0].split("`")[1] for row in table(TOKENS, "Thinking")) == THINKING
    assert tuple(row[0].split("`")[1] for row in table(TOKENS, "Control tokens in content")) == POLICIES
    text = section(TOKENS, "Template profiles")
    assert not [name for name in [*(f.name for f in FORMATS), HARMONY] if f"`{name}`" not in text]


# --- Clients -------------------------------------------------------------------------------------

CLIENT_PAGE = DOCS / "how-to" / "clients.md"
HARNESS_PAGE = DOCS / "how-to" / "harnesses.md"
ADDRESS = "http://127.0.0.1:8400"
PROGRAMS = {
    "Claude Code": "claude-code",
    "Codex": "codex",
    "opencode": "opencode",
    "mini-swe-agent": "mini-swe-agent",
    "harbor": "terminus-2",
}


def suite_command(name: str, folder: Path) -> ClientCommand:
    """The command with which the conformance suite starts a program."""
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
def test_program_starts_as_in_the_conformance_suite(title: str, tmp_path: Path) -> None:
    suite = suite_command(PROGRAMS[title], tmp_path)
    text = "\n".join(re.findall(r"```console\n(.*?)```", section(CLIENT_PAGE, title), re.S))
    assert {*re.findall(r"\b([A-Z][A-Z_]+)=", text)} == {*suite.environment} - {"PYTHONPATH", "CODEX_HOME"}
    assert {*re.findall(r" (--?[a-z][a-z-]*)\b", text)} <= {*suite.argv}
    assert f"$ {Path(suite.argv[0]).name} " in text


def test_configuration_files_equal_those_of_the_conformance_suite(tmp_path: Path) -> None:
    (tmp_path / "codex").mkdir()
    (tmp_path / "opencode").mkdir()
    suite_command("codex", tmp_path / "codex")
    suite = tomllib.loads((tmp_path / "codex" / "home" / "config.toml").read_text())
    del suite["model_auto_compact_token_limit"]
    assert tomllib.loads(blocks(CLIENT_PAGE, "toml")[0]) == suite
    suite_command("opencode", tmp_path / "opencode")
    suite = json.loads(
        (tmp_path / "opencode" / "home" / ".config" / "opencode" / "opencode.json").read_text()
    )
    assert json.loads(blocks(CLIENT_PAGE, "json")[0]) == suite


# --- Harnesses -----------------------------------------------------------------------------------


def test_harness_page_lists_every_harness_with_its_api_and_version() -> None:
    rows = [[cell.strip("`") for cell in row[:3]] for row in table(HARNESS_PAGE, "Harnesses")]
    found = [harness for name in TARGETS if (harness := find(name))]
    assert rows == [[one.name, one.protocol, one.package.packages[0]] for one in found]


# --- Runtimes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "heading", "options"),
    [
        ("sandbox", "Settings", SandboxOptions),
        ("sandbox", "Limits", ResourceLimits),
        ("container", "Settings", ContainerOptions),
        ("agentcore", "Settings", AgentCoreOptions),
        ("kubernetes", "Settings", KubernetesOptions),
        ("ray", "Settings", RayOptions),
    ],
)
def test_runtime_page_lists_every_setting(page: str, heading: str, options: type[Struct]) -> None:
    rows = table(DOCS / "how-to" / f"{page}.md", heading)
    assert [row[0].strip("`") for row in rows] == list(options.__struct_fields__)
    if options is ResourceLimits:
        assert {row[0].strip("`"): float(row[1]) for row in rows} == defaults(ResourceLimits)


def test_gateway_page_lists_the_fields_of_a_script(tmp_path: Path) -> None:
    page = DOCS / "how-to" / "gateway.md"
    rows = table(page, "Scripted answers")
    assert [row[0].strip("`") for row in rows] == list(ScriptRow.__struct_fields__)
    fail = next(row[1] for row in rows if row[0] == "`fail`")
    assert set(re.findall(r"`(\w+)`", fail)) == set(get_args(Failing))
    example = next(block for block in blocks(page, "json") if '"match"' in block)
    (tmp_path / "script.jsonl").write_text(example)
    model = tmp_path / "model"
    model.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (POLICY / name).exists():
            shutil.copy(POLICY / name, model)
    for context, expected in (({"max_position_embeddings": 200_000}, 200_000), ({}, 4096)):
        (model / "config.json").write_text(json.dumps(context))
        script = f"scripted={tmp_path / 'script.jsonl'}"
        made = factory.engines.engine(script, model, slots=0, seed=0, record=None)
        assert asyncio.run(made.info()).max_context == expected


def test_runtimes_page_lists_every_runtime() -> None:
    listed = {name.partition("=")[0] for name in names(DOCS / "how-to" / "runtimes.md", "Choose a runtime")}
    assert set(RUNTIMES) <= listed


def test_install_page_lists_every_extra() -> None:
    extras = tomllib.loads((SOURCE.parent.parent / "pyproject.toml").read_text())["project"]
    listed = set(re.findall(r"afield\[([\w-]+)\]", (DOCS / "install.md").read_text()))
    assert set(extras["optional-dependencies"]) <= listed
