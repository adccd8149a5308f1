"""Where sampled tokens went: counted once, by reason, and said where a person or a program looks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from tests.cli.test_live_chart import LINE
from tests.runs.test_exclusions import DECLARED, chat, user

from afield.cli import show
from afield.cli.live_chart import Screen, describe
from afield.cli.report import account_of, describe_tokens
from afield.integrations.trl.worker import token_account as trl_account
from afield.integrations.verl import rows
from afield.integrations.verl.manager import GenerateCall, StepCounts
from afield.orchestrator.state import RunDirectory
from afield.runs.index import FilePosition, row_of
from afield.runs.token_account import ExclusionWatch, TokenAccount, count_tokens
from afield.settings.train import train_config
from afield.trajectories import linear
from afield.types import Exclusion, RolloutResult, Split
from support.client_gateway import threaded_gateway
from support.dialect_clients import knock
from support.dialect_session import answering, said
from support.gateways import ADMIN
from support.training_groups import finished, forest, group

pytestmark = pytest.mark.anyio


def rolled(name: str, reward: float | None, *excluded: Exclusion) -> RolloutResult:
    grown = forest(int(name))
    made = structs.replace(finished(name, reward, linear(grown).trajectories), turns=tuple(grown.turns))
    return structs.replace(made, excluded=excluded)


def owned(*some: RolloutResult) -> int:
    return sum(row.owned for one in some for row in one.trajectories)


# --- the account ---------------------------------------------------------------------------------


def test_every_sampled_token_of_a_rollout_is_counted_once() -> None:
    kept = rolled("0", 1.0, Exclusion("x", 7, "aborted"), Exclusion("y", 0, "dangling"))
    lost = rolled("1", None, Exclusion("z", 2, "side:declared"))
    account = count_tokens([kept, lost])
    assert account.trained == owned(kept)
    assert account.excluded == {"aborted": 7, "side:declared": 2}
    assert account.untrained == {"infrastructure_failure": owned(lost)}
    assert account.sampled == owned(kept, lost) + 9


def test_accounts_add_up_and_have_shares() -> None:
    one = TokenAccount(trained=80, excluded={"aborted": 10}, untrained={"no_advantage": 10})
    both = one + TokenAccount(excluded={"aborted": 5, "abandoned": 5}, untrained={"no_advantage": 90})
    assert both == TokenAccount(
        trained=80, excluded={"aborted": 15, "abandoned": 5}, untrained={"no_advantage": 100}
    )
    assert (both.sampled, both.excluded_share, both.trained_share) == (200, 0.1, 0.4)
    assert TokenAccount().excluded_share == 0.0
    assert both.metrics() == {
        "delivered_share": 0.4,
        "excluded_share": 0.1,
        "excluded_tokens.aborted": 15.0,
        "excluded_tokens.abandoned": 5.0,
        "untrained_tokens.no_advantage": 100.0,
    }


def test_more_than_five_percent_excluded_tokens_give_a_warning() -> None:
    assert TokenAccount(trained=95, excluded={"aborted": 5}).warning() is None
    told = TokenAccount(trained=90, excluded={"side:opencode/title": 8, "aborted": 2}).warning()
    assert told is not None
    assert told.startswith(
        "10.0% of the sampled tokens are excluded from training (side:opencode/title 8, ab"
    )
    assert 'side_calls = "train"' in told


def test_rollouts_without_trained_tokens_give_no_warning() -> None:
    assert TokenAccount(trained=1, untrained={"no_advantage": 99}).warning() is None


def test_a_warning_comes_once_and_again_with_a_new_reason() -> None:
    watch = ExclusionWatch()
    assert watch.add(TokenAccount(trained=90, excluded={"aborted": 10}))
    assert watch.add(TokenAccount(trained=90, excluded={"aborted": 20})) is None
    assert watch.add(TokenAccount(trained=90, excluded={"abandoned": 20}))
    assert watch.add(TokenAccount(trained=90, excluded={"abandoned": 20})) is None


# --- a run ---------------------------------------------------------------------------------------

EXCLUDING = structs.replace(
    LINE,
    sampled_tokens=100,
    trained_tokens=70,
    excluded_tokens={"side:opencode/title": 20},
    excluded_share=0.2,
    untrained_tokens={"no_advantage": 10},
)


def test_the_line_of_a_step_has_excluded_tokens_by_reason_and_their_share() -> None:
    assert "tokens 100  excluded 20 (20.0%: side:opencode/title 20)  collect" in describe(EXCLUDING, 3)
    assert "tokens 80  excluded 0  collect" in describe(LINE, 3)


def screen_of(tmp_path: Path) -> Screen:
    values = {"agent": "agent.py:agent", "model": "model", "tasks": "tasks.jsonl", "steps": 3}
    return Screen(train_config(None, values), RunDirectory(tmp_path / "runs" / "first"), to_stderr=False)


def test_run_with_many_excluded_tokens_warns_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    screen = screen_of(tmp_path)
    screen.step_done(EXCLUDING)
    screen.step_done(structs.replace(EXCLUDING, step=2))
    out = capsys.readouterr().out
    assert out.count("of the sampled tokens are excluded from training") == 1
    assert 'side_calls = "train" trains them' in out


def test_lines_of_a_run_add_up_to_its_account() -> None:
    lines: list[dict[str, Any]] = [structs.asdict(EXCLUDING), structs.asdict(EXCLUDING)]
    account = account_of(lines)
    assert account == TokenAccount(
        trained=140, excluded={"side:opencode/title": 40}, untrained={"no_advantage": 20}
    )
    assert describe_tokens(account) == (
        "200 tokens sampled, 140 trained (70.0%), 40 excluded (20.0%: side:opencode/title 40),"
        " 20 in rollouts that were not trained (no_advantage 20)"
    )


def test_show_prints_excluded_tokens_of_every_rollout() -> None:
    line = show.brief(row_of(rolled("0", 1.0, Exclusion("x", 7, "aborted")), FilePosition("f", 0, 0), 1))
    assert line["excluded_tokens"] == {"aborted": 7}
    assert line["sampled_tokens"] == line["trained_tokens"] + 7


# --- the gateway ---------------------------------------------------------------------------------


async def test_the_state_of_a_session_and_the_metrics_count_excluded_tokens(tmp_path: Path) -> None:
    async with answering(tmp_path, said("Mugs."), said("A title.")) as there:
        client = await there.client()
        await chat(client, user("Hi"))
        assert (await there.get("/sessions/r.1"))["excluded"] == {}
        await chat(client, user("Name it."), headers=DECLARED)
        tokens = len(there.ledger.recorded[1].token_ids)
        assert (await there.get("/sessions/r.1"))["excluded"] == {"side:declared": tokens}
        await knock(there.app, "POST", "/sessions/r.1/finalize", key=ADMIN)
        assert (await there.get("/sessions/r.1"))["excluded"] == {"side:declared": tokens}
        page = (await knock(there.app, "GET", "/metrics", key=ADMIN)).body.decode()
        assert f'afield_excluded_tokens_total{{reason="side:declared"}} {tokens}' in page


# --- clients and other trainers ------------------------------------------------------------------


def aside(payload: dict[str, Any], context: Any) -> dict[str, float]:
    """An agent of one call that counts and one that it declares to be none of its work."""
    import openai

    client = openai.OpenAI(base_url=context.openai_base_url, api_key=context.api_key)
    for headers in ({}, DECLARED):
        messages: Any = [{"role": "user", "content": f"Yes? {len(headers)}"}]
        client.chat.completions.create(model="m", messages=messages, extra_headers=headers)
    return {"reward": 1.0}


def test_a_client_has_the_account_of_its_rollouts_and_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with threaded_gateway(tmp_path) as there, there.client(aside) as client, caplog.at_level(logging.WARNING):
        (item,) = client.run_batch([{}], rollouts=1)
        assert set(item.tokens.excluded) == {"side:declared"}
        assert item.tokens.trained > 0
        assert client.tokens == item.tokens
    assert "excluded from training (side:declared" in caplog.text


def test_veRL_gets_excluded_tokens_of_each_session_and_of_the_step() -> None:
    some = [rolled("0", 1.0, Exclusion("x", 7, "aborted")), rolled("1", 0.0), rolled("2", None)]
    judged = rows.group_rows(some, quorum=2)
    assert judged.sessions[0].info["excluded_tokens"] == 7
    assert judged.sessions[0].info["excluded_tokens.aborted"] == 7
    assert judged.sessions[0].info["sampled_tokens"] == owned(some[0]) + 7
    account = rows.token_account(some, judged)
    assert account == TokenAccount(
        trained=owned(*some[:2]),
        excluded={"aborted": 7},
        untrained={"infrastructure_failure": owned(some[2])},
    )
    dropped = rows.token_account(some, rows.group_rows(some, quorum=3))
    assert dropped.trained == 0
    assert dropped.untrained["dropped_group"] == owned(*some[:2])


class TrlRow:
    def __init__(self, tokens: int, advantage: float) -> None:
        import numpy as np

        self.completion_mask = np.ones(tokens, dtype=np.int64)
        self.advantage = advantage


def test_TRL_counts_rows_without_an_advantage_separately() -> None:
    both = group(rolled("0", 1.0, Exclusion("x", 7, "aborted")), rolled("1", 1.0))
    given = [TrlRow(owned(f), 0.0) for f in both.finished]
    assert trl_account(both, given, None) == TokenAccount(
        excluded={"aborted": 7}, untrained={"no_advantage": owned(*both.finished)}
    )
    given[0].advantage = 0.5
    assert trl_account(both, given, None).trained == owned(both.finished[0])
    assert trl_account(both, [], "too few").untrained == {"dropped_group": owned(*both.finished)}


def test_veRL_step_reports_excluded_tokens_by_reason() -> None:
    some = [rolled("0", 1.0, Exclusion("x", 7, "aborted")), rolled("1", 0.0)]
    judged = rows.group_rows(some, quorum=2)
    tally = StepCounts(GenerateCall(step=3, split=Split.TRAIN, version=2, groups=1))
    assert tally.add(judged, rows.token_account(some, judged))
    assert f"{owned(*some) + 7} tokens, " in str(tally) and "excluded (aborted 7)" in str(tally)
    assert tally.fields == {"groups": 1, "dropped": 0, "sessions": 2, "rows": 2}
