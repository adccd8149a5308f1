import pytest

from afield.runtimes.kubernetes import api, runtime


@pytest.fixture(autouse=True)
def short_kubernetes_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry and settle times for an API server in the same process, which needs no seconds."""
    monkeypatch.setattr(api, "PAUSE_S", (0.1, 0.4))
    monkeypatch.setattr(runtime, "SEARCH_S", 0.2)
    monkeypatch.setattr(runtime, "CAUSE_DELAY_S", 0.5)
    monkeypatch.setattr(runtime, "PODLESS_S", 1.0)
