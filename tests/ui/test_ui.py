"""The UI's server gives every page's data, to its user alone, and changes nothing."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import shutil
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from afield.orchestrator.state import RunDirectory, RunState
from afield.runs.training_record import VALUES, RecordedTurn, TokenRecord
from afield.types import Attempt
from afield.ui.app import STATIC, Runs, UiApp, data
from afield.ui.export import export_html
from afield.ui.live_gateway import metrics
from afield.ui.run_list import RunList
from afield.ui.views import shared_prefix
from afield.utils.columns import indexed, numbers, pack
from bench.ui.runs import FAILURES, write_evaluation, write_hostile, write_many, write_verl
from support.written_runs import write_run

KEY = "the-key"
MODEL = Path(__file__).parents[2] / "src" / "afield" / "demo" / "policy"
pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunList]:
    folder = tmp_path_factory.mktemp("runs")
    write_many(folder / "many", 64, steps=2, model=str(MODEL))
    write_hostile(folder / "hostile")
    write_verl(folder / "verl", steps=3)
    run_list = RunList([], folder)
    yield run_list
    for run in run_list.current():
        run.close()


@pytest.fixture
def app(runs: RunList) -> UiApp:
    return UiApp(Runs(runs.current), key=KEY, cookie="ui")


class Response:
    def __init__(self, messages: list[Any]) -> None:
        self.status: int = messages[0]["status"]
        self.headers = {name.decode(): value.decode() for name, value in messages[0]["headers"]}
        self.body: bytes = messages[1]["body"]

    def json(self) -> Any:
        return json.loads(self.body)


async def get(
    app: UiApp,
    target: str,
    *,
    method: str = "GET",
    host: str = "127.0.0.1:8700",
    key: str = KEY,
    **headers: str,
) -> Response:
    path, _, query = target.partition("?")
    given = {"host": host, "authorization": f"Bearer {key}", **headers}
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
    }
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request"}

    await app(scope, receive, send)
    return Response(sent)


def unpack(body: bytes) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Columns as the page decodes them."""
    length = int.from_bytes(body[:4], "little")
    header = json.loads(body[4 : 4 + length])
    columns: dict[str, list[Any]] = {}
    for column in header["columns"]:
        values = array({"f4": "f", "f8": "d", "u4": "I", "u1": "B"}[column["type"]])
        start = 4 + length + column["offset"]
        assert start % 8 == 0
        values.frombytes(body[start : start + header["rows"] * values.itemsize])
        strings = column.get("values")
        columns[column["name"]] = [strings[v] for v in values] if strings else list(values)
    return header, columns


# --- access --------------------------------------------------------------------------------------


async def test_requests_without_the_key_are_refused(app: UiApp) -> None:
    assert (await get(app, "/api/runs", key="")).status == 401
    assert (await get(app, "/", key="wrong")).status == 401
    assert (await get(app, "/api/runs")).status == 200


async def test_the_printed_address_sets_a_cookie_that_opens_the_page(app: UiApp) -> None:
    opened = await get(app, f"/?key={KEY}", key="")
    assert (opened.status, opened.headers["location"]) == (303, "/")
    cookie = opened.headers["set-cookie"].partition(";")[0]
    assert (await get(app, "/", key="", cookie=cookie)).status == 200
    assert (await get(app, f"/api/runs?key={KEY}", key="")).status == 401  # keys in addresses leak


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:1", 200),
        ("[::1]:1", 200),
        ("10.0.0.3", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil", 403),
        ("", 403),
    ],
)
async def test_names_that_others_can_point_here_are_refused(app: UiApp, host: str, status: int) -> None:
    assert (await get(app, "/api/runs", host=host)).status == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
async def test_only_get_is_served(app: UiApp, method: str) -> None:
    assert (await get(app, "/api/runs", method=method)).status == 405


@pytest.mark.parametrize(
    "path", ["/../data.py", "/%2e%2e/data.py", "/vendor/../../app.py", "/nothing", "//etc/passwd"]
)
async def test_files_outside_of_static_are_not_served(app: UiApp, path: str) -> None:
    assert (await get(app, path)).status == 404


async def test_answers_carry_a_strict_policy(app: UiApp) -> None:
    for path in ("/", "/app.js", "/api/runs", "/api/runs/none"):
        policy = (await get(app, path)).headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "require-trusted-types-for 'script'" in policy


# --- pages ---------------------------------------------------------------------------------------


async def test_page_of_a_run_with_prices_has_its_cost(tmp_path: Path) -> None:
    write_run(tmp_path / "priced", "eval", val={"a": [1.0, 0.0]}, prices={"sampled_price": 1e6})
    write_run(tmp_path / "free", "eval", val={"a": [1.0, 0.0]})
    shown = RunList([], tmp_path)
    app = UiApp(Runs(shown.current), key=KEY, cookie="ui")
    assert (await get(app, "/api/runs/priced")).json()["cost"]["per_success"] == 4.0
    assert (await get(app, "/api/runs/free")).json()["cost"] is None
    for run in shown.current():
        run.close()


async def test_every_page_has_its_data(app: UiApp) -> None:
    for path in (
        *("/api/runs", "/api/runs/many", "/api/runs/many/rollouts?limit=5", "/api/runs/many/groups/s1-g0"),
        *("/api/runs/many/rollouts/s1-g0-r1", "/api/runs/many/excluded", "/api/runs/many/timeline"),
        "/api/diff?run_a=many&a=s1-g0-r1&run_b=many&b=s1-g0-r2",
    ):
        response = await get(app, path)
        assert response.status == 200, response.body
        assert response.json()
    for path in ("/api/runs/none", "/api/runs/many/rollouts/none", "/api/nothing", "/api/gateway"):
        response = await get(app, path)
        assert response.status == 404
        assert response.json()["error"]
    assert (await get(app, "/api/runs/many/tokens/s1-g0-r1?a=x")).status == 400


async def test_an_evaluation_has_estimates_with_intervals(tmp_path: Path) -> None:
    write_evaluation(tmp_path / "eval")
    shown = RunList([], tmp_path)
    run = (await get(UiApp(Runs(shown.current), key=KEY, cookie="ui"), "/api/runs/eval")).json()
    assert (run["kind"], run["split"], run["metrics"]) == ("eval", "val", [])
    estimates = run["evaluation"]["estimates"]
    assert estimates.keys() == {"mean reward", "pass@1", "pass@2", "pass@4"}
    assert estimates["pass@2"]["low"] <= estimates["pass@2"]["mean"] <= estimates["pass@2"]["high"]
    shown.current()[0].close()


async def test_a_run_of_veRL_has_steps_versions_and_the_data_of_every_page(app: UiApp) -> None:
    run = (await get(app, "/api/runs/verl")).json()
    assert [(line["step"], line["rollouts"]) for line in run["metrics"]] == [(1, 16), (2, 16), (3, 16)]
    assert all(isinstance(line["train_s"], float) for line in run["metrics"])
    assert [(line["step"], line["rollouts"]) for line in run["validation"]] == [(3, 4)]
    assert run["exactness"]["trained"] == sum(line["trained_tokens"] for line in run["metrics"])
    marks = (await get(app, "/api/runs/verl/timeline")).json()["marks"]
    assert [m["value"] for m in marks if m["kind"] == "trained"] == [1, 2, 3]
    assert [m["value"] for m in marks if m["kind"] == "published"] == [0, 1, 2, 3]
    for page in (
        *("rollouts?limit=5", "rollouts.bin", "events", "excluded", "rollouts/s1g0-0", "tokens/s1g0-0"),
        *("text/s1g0-0", "groups/s1g0"),
    ):
        assert (await get(app, f"/api/runs/verl/{page}")).status == 200
    diff = await get(app, "/api/diff?run_a=verl&a=s1g0-0&run_b=many&b=s1-g0-r1")
    assert diff.json()["shared"] >= 0


async def test_the_run_has_outcomes_metrics_and_exactness(app: UiApp) -> None:
    run = (await get(app, "/api/runs/many")).json()
    assert [line["step"] for line in run["metrics"]] == [1, 2]
    trained = [o for o in run["outcomes"] if o["split"] == "train" and o["step"] is not None]
    assert sum(o["n"] for o in trained) == 64
    assert {o["kind"] for o in run["outcomes"]} > {None}
    assert run["exactness"]["logprob_diff_max"]["all"] == 3e-6
    assert run["state"] == "stopped"
    assert [line["step"] for line in (await get(app, "/api/runs/many/metrics?from=2")).json()["metrics"]] == [
        2
    ]


async def test_columns_have_every_rollout_once(app: UiApp) -> None:
    header, columns = unpack((await get(app, "/api/runs/many/rollouts.bin")).body)
    assert header["rows"] == 64 + 4 + 4
    assert len(set(columns["id"])) == header["rows"]
    rows = (await get(app, "/api/runs/many/rollouts")).json()["rollouts"]
    assert [row["id"] for row in rows] == columns["id"]
    assert [row["reward"] if row["reward"] is not None else "nan" for row in rows] == [
        x if x == x else "nan" for x in columns["reward"]
    ]
    later, _ = unpack((await get(app, f"/api/runs/many/rollouts.bin?after={rows[60]['seq']}")).body)
    assert later["rows"] == header["rows"] - 61


async def test_tokens_are_those_of_the_turns_each_once_with_their_fates(app: UiApp, runs: RunList) -> None:
    page = (await get(app, "/api/runs/many/rollouts/s1-g0-r1")).json()
    _, columns = unpack((await get(app, "/api/runs/many/tokens/s1-g0-r1")).body)
    [run] = [run for run in runs.current() if run.key == "many"]
    whole = run.directory.index.read(run.directory.index.find("s1-g0-r1"))
    assert columns["id"] == [token for t in whole.turns for token in (*t.delta_ids, *t.token_ids)]
    sampled = [p for t in whole.turns for p in t.logprobs]
    assert [p for p in columns["logprob"] if p == p] == pytest.approx(sampled)
    assert page["tokens"] == len(columns["id"])
    assert {t["id"]: t["fate"] for t in page["turns"]} == dict.fromkeys(("t1", "t3", "t4"), "trained") | {
        "t2": "abandoned"
    }
    header, part = unpack((await get(app, "/api/runs/many/tokens/s1-g0-r1?a=10&b=15")).body)
    assert (header["a"], part["id"]) == (10, columns["id"][10:15])
    text = (await get(app, "/api/runs/many/text/s1-g0-r1?a=10&b=15")).json()
    assert len(text["tokens"]) == 5


async def test_rollouts_that_wait_for_a_step_and_validations_have_their_fate(app: UiApp) -> None:
    assert (await get(app, "/api/runs/many/rollouts/pending-g0-r0")).json()["fate"] == "pending"
    assert (await get(app, "/api/runs/many/rollouts/val-g0-r0")).json()["fate"] == "validation"


async def test_a_difference_is_at_the_first_token_that_differs(app: UiApp) -> None:
    diff = (await get(app, "/api/diff?run_a=many&a=s1-g0-r0&run_b=many&b=s1-g0-r1")).json()
    columns = [unpack((await get(app, f"/api/runs/many/tokens/s1-g0-r{k}")).body)[1]["id"] for k in (0, 1)]
    assert 0 < diff["shared"] < min(side["length"] for side in diff["sides"])
    turns = diff["sides"][1]["main"]
    assert turns == ["t1", "t3", "t4"]
    assert columns[0][: diff["shared"]] == columns[1][: diff["shared"]]


def test_a_shared_prefix_ends_where_tokens_differ() -> None:
    for first, second, length in (
        ([], [], 0),
        ([1], [2], 0),
        ([1, 2], [1, 2], 2),
        ([1, 2, 3], [1, 2], 2),
        ([1, 5, 3], [1, 2, 3], 1),
    ):
        assert shared_prefix(array("I", first), array("I", second)) == length


async def test_excluded_tokens_add_up_by_reason(app: UiApp) -> None:
    page = (await get(app, "/api/runs/many/excluded")).json()
    reasons = {row["reason"]: row["tokens"] for row in page["reasons"]}
    assert {"abandoned", "side:opencode/title"} <= reasons.keys()
    assert sum(reasons.values()) == sum(row["tokens"] for row in page["rollouts"])
    assert all(row["remedy"] for row in page["reasons"])


async def test_the_timeline_has_the_calls_of_a_window(app: UiApp) -> None:
    page = (await get(app, "/api/runs/many/timeline")).json()
    assert {mark["kind"] for mark in page["marks"]} == {"trained", "published"}
    header, columns = unpack((await get(app, "/api/runs/many/events")).body)
    assert header["rows"] == page["events"] - len(page["marks"])
    assert {"queue", "launch", "call", "tool", "outcome"} <= set(columns["kind"])
    middle = sorted(columns["t"])[len(columns["t"]) // 2]
    _, later = unpack((await get(app, f"/api/runs/many/events?t0={middle}")).body)
    assert later["t"] == [t for t in columns["t"] if t >= middle]


async def test_discarded_work_counts_retried_attempts_failures_and_dropped_groups(tmp_path: Path) -> None:
    run = write_many(tmp_path / "run", 32, steps=2)
    with RunState(run.run_state) as state:
        for rollout_id, tokens in (("s1-g0-r1", 30), ("s1-g0-r2", 5)):
            state.begin_attempt(Attempt(rollout_id, 1))
            state.fail_attempt(Attempt(rollout_id, 1), FAILURES[3], tokens)
    last = run.read_metrics()[-1]
    run.append_metrics({**last, "dropped_groups": {"s2-g0": "too few"}})
    run.index.close()
    shown = RunList([], tmp_path)
    page = (await get(UiApp(Runs(shown.current), key=KEY, cookie="ui"), "/api/runs/run/timeline")).json()
    [index] = [one.directory.index for one in shown.current()]
    failed = index.fetch("SELECT sum(sampled_tokens) FROM rollouts WHERE reward IS NULL")[0][0]
    dropped = index.fetch(
        "SELECT sum(sampled_tokens) FROM rollouts WHERE group_id='s2-g0' AND reward IS NOT NULL"
    )[0][0]
    assert page["discarded_tokens"]["retried_attempts"] == 35
    assert page["discarded_tokens"]["failed_rollouts"] == failed > 0
    assert page["discarded_tokens"]["dropped_groups"] == dropped > 0
    assert {row["id"] for row in page["discarded"] if row["dropped"]} == {f"s2-g0-r{k}" for k in range(16)}
    shown.current()[0].close()


async def test_settings_that_may_hold_keys_are_not_sent(tmp_path: Path) -> None:
    run = write_many(
        tmp_path / "run", 16, steps=1, docker={"env": {"TOKEN": "s3cret"}}, transport="redis://:s3cret@h"
    )
    run_list = RunList([run], tmp_path)
    answer = data(Runs(run_list.current), "/api/runs/run", {})
    assert b"s3cret" not in answer.body
    run_list.current()[0].close()


# --- parts ---------------------------------------------------------------------------------------


def test_columns_survive_packing() -> None:
    codes, strings = indexed(["b", None, "a", "b"])
    header, columns = unpack(
        pack({"x": numbers("f4", [1, None, 2, 3]), "s": codes}, {"s": strings}, note="n")
    )
    assert (header["rows"], header["note"], columns["s"]) == (4, "n", ["b", "", "a", "b"])
    assert str(columns["x"]) == "[1.0, nan, 2.0, 3.0]"
    assert unpack(pack({"x": numbers("f8", [])}))[0]["rows"] == 0


def test_two_runs_of_one_name_have_two_keys(tmp_path: Path) -> None:
    runs = [write_many(tmp_path / parent / "run", 16, steps=1) for parent in ("a", "b")]
    run_list = RunList(runs, tmp_path)
    assert [run.key for run in run_list.current()] == ["run", "run~2"]
    for run in run_list.current():
        run.close()


def test_gateway_metrics_are_read_without_buckets() -> None:
    page = '# HELP x\nafield_calls_total{dialect="chat",finish="a\\"b"} 3\nafield_s_bucket{le="1"} 2\n'
    page += "afield_up 1.5\n"
    assert metrics(page) == [
        {"name": "calls_total", "labels": {"dialect": "chat", "finish": 'a\\"b'}, "value": 3.0},
        {"name": "up", "labels": {}, "value": 1.5},
    ]


def test_the_page_is_small_and_loads_nothing_from_elsewhere() -> None:
    files = [path for path in STATIC.rglob("*") if path.is_file()]
    total = sum(len(gzip.compress(path.read_bytes())) for path in files)
    assert total <= 150_000
    for path in files:
        if path.suffix in (".js", ".html", ".css") and path.parent.name != "vendor":
            text = path.read_text()
            assert "innerHTML" not in text
            assert not re.search(r"(src|href|url\(|import\b.*|fetch\()\s*=?\s*[\"'`(]?(https?:)?//", text), (
                path
            )


# --- training record -----------------------------------------------------------------------------


async def test_tokens_carry_the_training_record_or_the_reason_why_there_is_none(tmp_path: Path) -> None:
    write_many(tmp_path / "many", 8, steps=1, model=str(MODEL))
    run_list = RunList([], tmp_path)
    [run] = run_list.current()
    row = run.rows()[0]
    app = UiApp(Runs(run_list.current), key=KEY, cookie="ui")
    page = (await get(app, f"/api/runs/many/rollouts/{row.id}")).json()
    assert (page["recorded"], page["not_recorded"]) == (False, "train with --record-training to record them")
    turns = [turn for turn in page["turns"] if turn["sampled"]]
    recorded, start = [], 0
    for turn in turns:
        recorded.append(RecordedTurn(turn["id"], turn["sampled"], start))
        start += turn["sampled"]
    columns: dict[str, array[Any]] = {name: array("f", range(start)) for name in VALUES}
    columns["mask"] = array("B", [n % 2 for n in range(start)])
    directory = run.directory
    records = {row.id: TokenRecord(tuple(recorded), columns, ("", "clipped")).encode()}
    directory.write_rollouts(1, directory.read_rollouts(1), records=records)
    assert (await get(app, f"/api/runs/many/rollouts/{row.id}")).json()["recorded"] is True
    _, table = unpack((await get(app, f"/api/runs/many/tokens/{row.id}")).body)
    expected = 0
    for turn in page["turns"]:
        first = turn["start"] + turn["prompt"]
        assert all(map(math.isnan, table["entropy"][turn["start"] : first]))
        for index in range(first, first + turn["sampled"]):
            assert (table["ratio"][index], table["trainer_logprob"][index]) == (expected, expected)
            assert table["mask"][index] == ("clipped" if expected % 2 else "")
            expected += 1
    for run in run_list.current():
        run.close()


@pytest.mark.parametrize("query", ["from=nan", "from=inf", "from=1e400", "from=x"])
async def test_numbers_that_are_not_finite_are_refused(app: UiApp, query: str) -> None:
    assert (await get(app, f"/api/runs/many?{query}")).status == 400


@pytest.mark.parametrize("query", ["after=1e30", "after=-1e30", "limit=1e30", "after=9007199254740993"])
async def test_numbers_beyond_any_row_are_answered(app: UiApp, query: str) -> None:
    assert (await get(app, f"/api/runs/many/rollouts?{query}")).status == 200


@pytest.mark.parametrize("path", ["/a\0b", "/" + "x" * 5000, "/" + "../" * 40 + "etc/passwd", "/pages"])
async def test_names_that_no_file_has_are_not_found(app: UiApp, path: str) -> None:
    assert (await get(app, path)).status == 404


def write_damaged(folder: Path) -> None:
    """A sound run beside runs whose files were damaged in different ways."""
    for name in ("sound", "info", "index", "metrics", "line", "summary"):
        write_many(folder / name, 16, steps=2)
        for file in (folder / name).glob("index.sqlite*") if name != "sound" else ():
            file.unlink()
    (folder / "info" / "info.json").write_text('{"kind": 5, "agent": {"a": 1}, "steps": "many"}')
    (folder / "index" / "index.sqlite").mkdir()
    line = {"step": 3, "version": 3, "reward": None, "trainer": {"sampler_trainer_logprob_diff_max": None}}
    with (folder / "metrics" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n[]\n" + json.dumps({**line, "step": 4, "trainer": None}) + "\n")
    (folder / "summary" / "summary.json").write_text('{"pass_reward": null}')
    (folder / "summary" / "metrics.jsonl").unlink()
    lost = folder / "line" / "rollouts" / "step-0001.jsonl"
    text = lost.read_bytes().splitlines(keepends=True)
    RunDirectory(folder / "line").index.refresh()
    status = lost.stat()
    lost.write_bytes(b"".join([b"x" * (len(text[0]) - 1) + b"\n", *text[1:]]))
    os.utime(lost, ns=(status.st_atime_ns, status.st_mtime_ns))  # the index does not notice


async def test_a_damaged_run_is_shown_as_far_as_it_can_be_read(tmp_path: Path) -> None:
    write_damaged(tmp_path)
    run_list = RunList([], tmp_path)
    app = UiApp(Runs(run_list.current), key=KEY, cookie="ui")
    listed = {run["run"]: run for run in (await get(app, "/api/runs")).json()["runs"]}
    assert set(listed) == {"sound", "info", "index", "metrics", "line", "summary"}
    assert {name for name, run in listed.items() if run["state"] == "unreadable"} == {"index"}
    assert "index.sqlite" in listed["index"]["error"]
    assert "agent" not in listed["info"] and "steps" not in listed["info"]
    for name in sorted(set(listed) - {"index"}):
        for page in ("", "/rollouts", "/rollouts.bin", "/timeline", "/events", "/excluded"):
            answer = await get(app, f"/api/runs/{name}{page}")
            assert answer.status == 200, (name, page, answer.body)
    assert (await get(app, "/api/runs/index")).status in (400, 500)
    (row, *_) = (await get(app, "/api/runs/line/rollouts")).json()["rollouts"]
    answer = await get(app, f"/api/runs/line/rollouts/{row['id']}")
    assert answer.status == 400 and "cannot be read" in answer.json()["error"]
    attempts = (await get(app, f"/api/runs/line/groups/{row['group_id']}")).json()["attempts"]
    assert [("missing" in one) for one in attempts] == [True] + [False] * (len(attempts) - 1)
    report = export_html(run_list.current(), tmp_path / "all.html")
    assert (report["runs"], report["left_out"], list(report["unreadable"])) == (5, 1, ["index"])
    for run in run_list.current():
        run.close()


async def test_a_run_that_is_removed_while_it_is_shown_hides_no_other(tmp_path: Path) -> None:
    for name in ("kept", "removed"):
        write_many(tmp_path / name, 16, steps=1)
    run_list = RunList([], tmp_path)
    chosen = RunList([RunDirectory(tmp_path / name) for name in ("kept", "removed")], tmp_path)
    apps = [UiApp(Runs(runs.current), key=KEY, cookie="ui") for runs in (run_list, chosen)]
    for app in apps:
        assert len((await get(app, "/api/runs")).json()["runs"]) == 2
    shutil.rmtree(tmp_path / "removed")
    for app in apps:
        names = [run["run"] for run in (await get(app, "/api/runs")).json()["runs"]]
        assert "kept" in names
        assert (await get(app, "/api/runs/kept")).status == 200
        assert (await get(app, "/api/runs/removed")).status in (200, 404)
    assert not (tmp_path / "removed").exists()
    for run in (*run_list.current(), *chosen.current()):
        run.close()
