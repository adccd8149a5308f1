from importlib.util import find_spec

import pytest

pytest.register_assert_rewrite("contracts.runtime_contract")

if find_spec("hypothesis"):  # not in the environments of trainers
    from hypothesis import HealthCheck, settings

    # A law does not break because the machine is slow.
    settings.register_profile("afield", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("afield")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
