"""Every foreign suite, by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from msgspec import structs

from afield.conformance.client import SCRIPTS, Command, Stage, from_npm, from_pypi
from afield.conformance.environments import git_files, npm_environment
from afield.conformance.foreign.suite import ForeignSuite
from afield.conformance.pins import NPM, OPENRESPONSES
from afield.errors import UsageError

FILES = SCRIPTS / "suites"
PYTEST = ("-q", "-c", os.devnull, "-p", "no:cacheprovider", "-p", "report_outcomes")
# Clients that are kept between tests need the event loop that they were made in.
ASYNC = (
    *("-o", "asyncio_mode=auto", "-o", "asyncio_default_test_loop_scope=session"),
    *("-o", "asyncio_default_fixture_loop_scope=session"),
)


def _pytest(file: str, *options: str) -> Callable[[Stage, str], Command]:
    """pytest over one file of ours, with the session in the environment."""

    def command(stage: Stage, variant: str) -> Command:
        argv = (str(stage.programs / "python"), "-m", "pytest", *PYTEST, *options, str(FILES / file))
        return Command(argv, session(stage, variant) | {"PYTHONPATH": str(FILES)})

    return command


def session(stage: Stage, variant: str) -> dict[str, str]:
    return {
        "SUITE_BASE_URL": stage.base_url,
        "SUITE_API_KEY": stage.api_key,
        "SUITE_MODEL": stage.model,
        "SUITE_VARIANT": variant,
    }


# --- LangChain -----------------------------------------------------------------------------------

LANGCHAIN = ForeignSuite(
    name="langchain",
    install=from_pypi("langgraph"),
    command=_pytest("test_langchain.py", *ASYNC),
    variants=tuple(
        f"{provider}{thinking}"
        for provider in ("openai-chat", "openai-responses", "anthropic", "google")
        for thinking in ("", ".thinking")
    ),
)

# --- Vercel AI SDK -------------------------------------------------------------------------------


def _vercel(stage: Stage, variant: str) -> Command:
    argv = ("node", str(FILES / "vercel.mjs"), str(stage.programs.parent))
    return Command(argv, session(stage, variant))


VERCEL = ForeignSuite(
    name="vercel",
    install=from_npm("vercel"),
    command=_vercel,
    variants=("openai-chat", "openai-responses", "anthropic", "google"),
)

# --- Open Responses ------------------------------------------------------------------------------


def _install_openresponses(cache: Path) -> Path:
    """The tests need nothing but zod, which they find beside them."""
    source = git_files(cache, "openresponses", *OPENRESPONSES, ("bin", "src/lib", "src/generated"))
    modules = npm_environment(cache, "openresponses", NPM["openresponses"]).parent
    link = source / "node_modules"
    if not (link.is_symlink() and link.readlink() == modules):
        link.unlink(missing_ok=True)
        link.symlink_to(modules)
    return source / "node_modules" / ".bin"


def _openresponses(stage: Stage, variant: str) -> Command:
    source = stage.programs.parent.parent
    argv = ("node", str(FILES / "openresponses.mjs"), str(stage.programs / "tsx"), str(source))
    return Command(argv, session(stage, variant))


WEBSOCKET_TESTS = (
    *("websocket-response", "websocket-sequential-responses", "websocket-continuation"),
    *("websocket-reconnect-store-false-recovery", "websocket-previous-response-not-found"),
    *("websocket-failed-continuation-evicts-cache", "websocket-compact-new-chain"),
)
OPEN_RESPONSES = ForeignSuite(
    name="openresponses",
    install=_install_openresponses,
    command=_openresponses,
    not_ours=dict.fromkeys(WEBSOCKET_TESTS, "WebSocket mode, which the gateway refuses"),
    optional=True,
)

# --- google-genai --------------------------------------------------------------------------------

GENAI = {"2.34.0": "langgraph", "3.1.0": "inspect"}  # the environments that have these versions


def _install_genai(cache: Path) -> Path:
    for name in GENAI.values():
        from_pypi(name)(cache)
    return cache


def _genai(stage: Stage, variant: str) -> Command:
    programs = from_pypi(GENAI[variant])(stage.programs)
    return _pytest("test_google_genai.py", *ASYNC)(structs.replace(stage, programs=programs), variant)


GOOGLE_GENAI = ForeignSuite(
    name="google-genai", install=_install_genai, command=_genai, variants=tuple(GENAI)
)

# --- Inspect -------------------------------------------------------------------------------------

INSPECT = ForeignSuite(
    name="inspect", install=from_pypi("inspect"), command=_pytest("test_inspect.py", *ASYNC)
)

# --- verifiers -----------------------------------------------------------------------------------

VERIFIERS = ForeignSuite(
    name="verifiers", install=from_pypi("verifiers"), command=_pytest("test_verifiers.py", *ASYNC)
)

_ALL = (LANGCHAIN, VERCEL, OPEN_RESPONSES, GOOGLE_GENAI, INSPECT, VERIFIERS)
SUITES: dict[str, ForeignSuite] = {suite.name: suite for suite in _ALL}


def chosen_suites(names: list[str]) -> list[ForeignSuite]:
    """These suites, or all."""
    for name in names:
        if name not in SUITES:
            raise UsageError(f"unknown suite {name!r}; choose from: {', '.join(SUITES)}")
    return [SUITES[name] for name in names] if names else list(SUITES.values())
