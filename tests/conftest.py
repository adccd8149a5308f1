import pytest

pytest.register_assert_rewrite("contracts.runtime_contract")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
