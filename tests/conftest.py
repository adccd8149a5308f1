import atexit
import gc
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

# Several workers share the cores, and the models are small: torch's threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Examples have no deadline: a loaded machine is slow. Other programs' environments have no hypothesis.
with suppress(ImportError):
    import hypothesis

    hypothesis.settings.register_profile("afield", deadline=None)
    hypothesis.settings.load_profile("afield")

# Background jobs of a shell ignore SIGINT, and processes that tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
pytest.register_assert_rewrite("tests.contracts.runtime_contract")

# Collection imports what stays: searching it for garbage would double the time that each worker takes.
gc.disable()

# Workers get whole files in this order: a long file that starts last would run alone.
LONGEST_FIRST = (
    *("test_crashes", "test_examples", "test_runtime", "test_agentcore", "test_sessions", "test_code_blocks"),
    *("test_train", "test_torch", "test_a_rollout", "test_command", "test_exactness", "test_isolation"),
    *("test_faults", "test_hostile_agents", "test_processes", "test_cuda_graphs", "test_transport"),
    *("test_attacks", "test_kubernetes_contract", "test_verifier_runtimes", "test_bad_agents"),
    *("test_sandbox", "test_recipes", "test_server", "test_kubernetes", "test_kubernetes_cluster"),
    *("test_gradients", "test_rollout"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: n for n, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: rank.get(Path(item.path).stem, len(rank)))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
