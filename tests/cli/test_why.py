"""`afield why` on runs of clients: exit codes, evidence, JSON, and single rollouts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.conftest import RunCommand
from tests.cli.test_show import collected, refused_agent

from afield.types import Budget
from support.client_gateway import ThreadedGateway, threaded_gateway


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[ThreadedGateway]:
    with threaded_gateway(tmp_path) as gateway:
        yield gateway


def test_sound_and_broken_runs(gateway: ThreadedGateway, run_command: RunCommand) -> None:
    collected(gateway, "sound")
    collected(gateway, "broken", refused_agent, budget=Budget(context=4))

    code, out, err = run_command("why", "sound")
    assert (code, err) == (0, "")
    assert "nothing found; checked:" in out and "unreachable_gateway" in out

    code, out, _ = run_command("why")
    assert code == 1
    assert "1. context_overflow (generation)" in out and "max_context" in out

    code, out, _ = run_command("why", "broken", "--json")
    answer = json.loads(out)
    (finding,) = answer["findings"]
    assert (code, finding["name"], answer["rollouts"]) == (1, "context_overflow", 4)
    assert finding["commands"][0] == f"afield show broken {finding['rollouts'][0]}"
    assert finding["pages"][0] == f"#/r/broken/o/{finding['rollouts'][0]}"
    code, out, err = run_command(*finding["commands"][0].split()[1:])
    assert code == 0, err

    rollout = finding["rollouts"][0]
    for words in (("broken", rollout), (rollout,), (gateway.root / "runs" / "broken", f"{rollout}.1")):
        code, out, _ = run_command("why", *words)
        assert code == 1
        assert out.startswith(f"rollout {rollout} of run broken") and "context_overflow" in out

    code, out, err = run_command("why", "nowhere")
    assert (code, out) == (2, "") and "unknown run 'nowhere'" in err
    code, out, err = run_command("why", "broken", "nobody")
    assert (code, out) == (2, "") and "nobody" in err
