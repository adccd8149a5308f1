import atexit
import os
import shutil
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

# Secrets of the gateways that tests start stay out of the user's own state.
_STATE = tempfile.mkdtemp(prefix="afield-tests-state-")
os.environ["XDG_STATE_HOME"] = _STATE
atexit.register(shutil.rmtree, _STATE, ignore_errors=True)

# A loaded machine gives slower answers, not other ones: examples have no deadline. Suites that run in the
# environments of other programs have no hypothesis.
with suppress(ImportError):
    import hypothesis

    hypothesis.settings.register_profile("afield", deadline=None)
    hypothesis.settings.load_profile("afield")

# A shell that starts something in the background has it ignore Ctrl-C, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
pytest.register_assert_rewrite("tests.contracts.runtime_contract")

# Files are handed out whole and in this order. One that takes a minute or more must not begin when the
# others have ended, since it would then have the machine to itself.
LONGEST_FIRST = (
    *("test_crashes", "test_examples", "test_bounded_memory", "test_train", "test_learning", "test_docs"),
    *("test_bad_agents", "test_hostile_agents", "test_exactness", "test_agentcore"),
    *("test_turn_tree_oracle", "test_kill", "test_runtime", "test_lora", "test_export"),
    *("test_template", "test_cuda_graphs", "test_torch", "test_bad_input"),
    *("test_sessions", "test_invariants"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: n for n, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: rank.get(Path(item.path).stem, len(rank)))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
