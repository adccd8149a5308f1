"""Registry of other projects' test suites, by name, with their expected failures."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from msgspec import structs

from afield.conformance.clients.base import from_npm, from_pypi
from afield.conformance.pins import NPM, OPENRESPONSES, VLLM, VLLM_TESTS, VLLM_WITHOUT
from afield.conformance.suites.runner import ForeignSuite
from afield.errors import UsageError
from afield.harnesses.base import ClientCommand, Stage
from afield.utils.installations import git_files, npm_environment, python_environment

N = "asks for n > 1, which the gateway refuses with 400: each answer is a call of its own"
PROMPTS = (
    "sends several prompts in one request, which the gateway refuses with 400: each is a call of its own"
)
TOKENIZER = "counts the tokens of another model's tokenizer"
DOWNLOAD = "loads another model's tokenizer from the internet"
LAST_CHUNK = "expects text in the chunk that has the finish reason, where OpenAI's API has none"
FIELD = "reads `reasoning`, vLLM's name for what the gateway calls `reasoning_content`"
ALL_TOKENS = "asks for the log-probabilities of the whole vocabulary, which the gateway refuses with 400"
TEMPLATE = "changes how the prompt is rendered, which the gateway refuses with 400"
ZEPHYR, OPT, QWEN = "HuggingFaceH4/zephyr-7b-beta", "facebook/opt-125m", "Qwen/Qwen3-0.6B"
CHAT, COMPLETION, ECHO = "plain/test_chat", "plain/test_completion", "plain/test_chat_echo"
TOOLS = "thinking/test_completion_with_function_calling"
SIMPLE = "thinking/test_simple"

NOT_OURS = {
    f"{CHAT}/test_prompt_logprobs_chat[{ZEPHYR}-None]": (
        "expects the field `prompt_logprobs` in answers to requests that do not ask for it"
    ),
    **{f"{CHAT}/test_single_chat_session[{model}]": TOKENIZER for model in (ZEPHYR, "zephyr-lora")},
    **{f"{CHAT}/test_chat_streaming[{model}]": LAST_CHUNK for model in (ZEPHYR, "zephyr-lora")},
    **{
        f"{CHAT}/test_chat_completion_stream_options[{model}]": (
            "asks for min_tokens, which the gateway refuses with 400"
        )
        for model in (ZEPHYR, "zephyr-lora")
    },
    f"{CHAT}/test_custom_role": "sends a role that no API has, which the gateway refuses with 400",
    f"{CHAT}/test_long_seed": "expects the words of another library in the error message",
    f"{CHAT}/test_invocations": "sends requests without a key",
    f"{CHAT}/test_chat_completion_n_parameter_non_streaming[{ZEPHYR}]": N,
    f"{CHAT}/test_chat_completion_n_parameter_streaming[{ZEPHYR}]": N,
    f"{CHAT}/test_chat_completion_n_with_seed[{ZEPHYR}]": N,
    **{
        f"{ECHO}/test_chat_session_with_echo_and_continue_final_message[test_case{n}]": TEMPLATE
        for n in (0, 1)
    },
    f"{ECHO}/test_prompt_logprobs": ALL_TOKENS,
    f"{ECHO}/test_top_logprobs": "sends a string for `logprobs`, where OpenAI's API has true or false",
    f"{COMPLETION}/test_single_completion[{OPT}]": TOKENIZER,
    f"{COMPLETION}/test_completion_truncation_side_controls_prompt_truncation[{OPT}]": (
        "asks for truncate_prompt_tokens, which the gateway refuses with 400"
    ),
    **{
        f"{COMPLETION}/{test}": "asks for logprob_token_ids, which the gateway refuses with 400"
        for test in ("test_logprob_token_ids", "test_logprob_token_ids_stream")
    },
    **{
        f"{COMPLETION}/test_prompt_logprobs_completion[{OPT}-{count}]": PROMPTS
        for count in ("0", "1", "None")
    },
    f"{COMPLETION}/test_completion_streaming[{OPT}]": LAST_CHUNK,
    f"{COMPLETION}/test_parallel_no_streaming[{OPT}]": N,
    f"{COMPLETION}/test_parallel_streaming[{OPT}]": N,
    f"{COMPLETION}/test_completion_stream_options[{OPT}]": (
        "asks for continuous_usage_stats, which the gateway refuses with 400"
    ),
    f"{COMPLETION}/test_batch_completions[{OPT}]": PROMPTS,
    **{f"{COMPLETION}/test_echo_logprob_completion[{n}-{OPT}]": DOWNLOAD for n in (0, 1)},
    "plain/test_messages/test_anthropic_streaming_cache_usage": (
        "passes an argument that the installed Anthropic SDK does not have"
    ),
    **{
        f"{TOOLS}/test_function_tool_use[True-{choice}-{stream}-{QWEN}]": FIELD
        for choice in ("auto", "required", "tool_choice2")
        for stream in (True, False)
    },
    f"{TOOLS}/test_named_tool_use": "expects empty content beside a call, where OpenAI's API has null",
    f"{SIMPLE}/test_enable_response_messages[Qwen/Qwen3-8B]": (
        "asks for enable_response_messages, which the gateway refuses with 400"
    ),
    f"{SIMPLE}/test_extra_sampling_params[Qwen/Qwen3-8B]": (
        "reads the model's reasoning, which the request did not ask for"
    ),
}


SCRIPTS = Path(__file__).parent / "scripts"
PYTEST = ("-q", "-c", os.devnull, "-p", "no:cacheprovider", "-p", "report_outcomes")
# One event loop per session, because the tests reuse clients.
ASYNC = (
    *("-o", "asyncio_mode=auto", "-o", "asyncio_default_test_loop_scope=session"),
    *("-o", "asyncio_default_fixture_loop_scope=session"),
)


def _pytest(file: str, *options: str) -> Callable[[Stage, str], ClientCommand]:
    """Command that runs pytest on a file of `suites/scripts`, with the session in the environment."""

    def command(stage: Stage, variant: str) -> ClientCommand:
        argv = (str(stage.programs / "python"), "-m", "pytest", *PYTEST, *options, str(SCRIPTS / file))
        return ClientCommand(argv, session(stage, variant) | {"PYTHONPATH": str(SCRIPTS)})

    return command


def session(stage: Stage, variant: str) -> dict[str, str]:
    """Environment variables of a suite's session."""
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


def _vercel(stage: Stage, variant: str) -> ClientCommand:
    argv = ("node", str(SCRIPTS / "vercel.mjs"), str(stage.programs.parent))
    return ClientCommand(argv, session(stage, variant))


VERCEL = ForeignSuite(
    name="vercel",
    install=from_npm("vercel"),
    command=_vercel,
    variants=("openai-chat", "openai-responses", "anthropic", "google"),
)

# --- Open Responses ------------------------------------------------------------------------------


def _install_openresponses(cache: Path) -> Path:
    """Install the tests, with a link to the npm packages they need."""
    source = git_files(cache, "openresponses", *OPENRESPONSES, ("bin", "src/lib", "src/generated"))
    modules = npm_environment(cache, "openresponses", NPM["openresponses"]).parent
    link = source / "node_modules"
    if not (link.is_symlink() and link.readlink() == modules):
        link.unlink(missing_ok=True)
        link.symlink_to(modules)
    return source / "node_modules" / ".bin"


def _openresponses(stage: Stage, variant: str) -> ClientCommand:
    source = stage.programs.parent.parent
    argv = ("node", str(SCRIPTS / "openresponses.mjs"), str(stage.programs / "tsx"), str(source))
    return ClientCommand(argv, session(stage, variant))


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

GENAI = {"2.34.0": "langgraph", "3.1.0": "inspect"}  # environments by version of google-genai


def _install_genai(cache: Path) -> Path:
    for name in GENAI.values():
        from_pypi(name)(cache)
    return cache


def _genai(stage: Stage, variant: str) -> ClientCommand:
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

# --- vLLM ----------------------------------------------------------------------------------------

VLLM_FILES = {
    "plain": (  # tests of models without reasoning
        "openai/chat_completion/test_chat.py",
        "openai/chat_completion/test_chat_echo.py",
        "openai/completion/test_completion.py",
        "anthropic/test_messages.py",
    ),
    "thinking": (
        "openai/chat_completion/test_completion_with_function_calling.py",
        "openai/responses/test_simple.py",
        "openai/responses/test_structured_output.py",
    ),
}
VLLM_BESIDE = (
    *("__init__.py", "entrypoints/__init__.py", "entrypoints/conftest.py", "entrypoints/openai/__init__.py"),
    *(
        f"entrypoints/openai/{folder}/__init__.py"
        for folder in ("chat_completion", "completion", "responses")
    ),
    *("entrypoints/openai/responses/conftest.py", "entrypoints/anthropic/__init__.py"),
)


def _vllm_tests(cache: Path) -> Path:
    """Directory of vLLM's tests."""
    files = [f"entrypoints/{file}" for files in VLLM_FILES.values() for file in files]
    paths = [f"tests/{path}" for path in (*VLLM_BESIDE, *files)]
    return git_files(cache, "vllm-tests", *VLLM_TESTS, paths)


def _vllm_python(cache: Path) -> Path:
    """Interpreter with vLLM, which the tests import."""
    return python_environment(cache, "vllm", VLLM, without=VLLM_WITHOUT)


def _install_vllm(cache: Path) -> Path:
    for install in (_vllm_tests, _vllm_python, from_pypi("pytest")):
        install(cache)
    return cache


def _vllm(stage: Stage, variant: str) -> ClientCommand:
    cache = stage.programs
    tests, pytest = _vllm_tests(cache), from_pypi("pytest")(cache).parent
    [packages] = pytest.glob("lib/python*/site-packages")
    files = [str(tests / "tests" / "entrypoints" / file) for file in VLLM_FILES[variant]]
    argv = (str(_vllm_python(cache)), "-m", "pytest", *PYTEST, *ASYNC, "-p", "vllm_gateway", *files)
    paths = ":".join(str(path) for path in (SCRIPTS, tests, packages))
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_TARGET_DEVICE": "cpu"}
    return ClientCommand(argv, session(stage, variant) | offline | {"PYTHONPATH": paths})


VLLM_SERVER = ForeignSuite(
    name="vllm",
    install=_install_vllm,
    command=_vllm,
    variants=tuple(VLLM_FILES),
    without_reasoning=("plain",),
    not_ours=NOT_OURS,
    optional=True,
)

_ALL = (LANGCHAIN, VERCEL, OPEN_RESPONSES, GOOGLE_GENAI, INSPECT, VERIFIERS, VLLM_SERVER)
SUITES: dict[str, ForeignSuite] = {suite.name: suite for suite in _ALL}


def select_suites(names: list[str]) -> list[ForeignSuite]:
    """Suites with these names; all for an empty list."""
    for name in names:
        if name not in SUITES:
            raise UsageError(f"unknown suite {name!r}; choose from: {', '.join(SUITES)}")
    return [SUITES[name] for name in names] if names else list(SUITES.values())
