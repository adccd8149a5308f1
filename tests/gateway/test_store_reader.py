"""The store of a gateway without a run is shown like a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from afield.cli.main import main
from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.interfaces import SessionSpec
from afield.orchestrator.state import RunDirectory
from support.gateways import running, vocabulary

VOCAB = vocabulary()
YES = ScriptedReply(token_ids=(*VOCAB.encode("Yes."), VOCAB.id_of("<|im_end|>") or 0))
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Is it?"}]}


@pytest.mark.anyio
async def test_closed_sessions_of_a_store_are_shown_as_rollouts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"

    def shown(*words: str) -> list[dict[str, Any]]:
        assert main(["show", str(store), *words, "--json"]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    async with running(ScriptedEngine(lambda _: YES), store) as up:
        keys = {}
        for name in ("done", "gone", "open"):
            keys[name] = (await up.client.open(SessionSpec(id=name, input_id=f"task {name}"))).api_key
            assert (await up.ask("POST", f"/s/{name}/v1/chat/completions", CHAT, keys[name]))[0] == 200
        assert (await up.ask("POST", "/s/done/v1/chat/completions", {"messages": 1}, keys["done"]))[0] == 400
        assert (await up.ask("POST", "/s/done/complete", {"reward": 0.5}, keys["done"]))[0] == 200
        await up.client.abort("gone", "nobody waits for it")
        first = {row["rollout"]: row for row in shown("--rollouts")}
        assert {name: (row["reward"], row["failure"], row["turns"]) for name, row in first.items()} == {
            "done": (0.5, None, 1),
            "gone": (None, "infrastructure/cancelled", 1),
        }
        assert first["done"]["refused"] == {"invalid_request_error": 1}
        assert (first["done"]["task"], first["done"]["question"]) == ("task done", "Is it?")
        record = await up.client.finalize("done")
        await up.client.finalize("open")
    assert [row["rollout"] for row in shown("--sort", "task:asc")] == ["done", "gone", "open"]
    assert RunDirectory(store).info.kind == "gateway"
    (whole,) = shown("done")
    assert [turn["id"] for turn in whole["turns"]] == [turn.id for turn in record.turns]
    assert [tuple(t["token_ids"]) for t in whole["trajectories"]] == [
        t.token_ids for t in record.trajectories
    ]
