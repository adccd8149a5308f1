"""`afield ui` in Chromium: a demo that is killed, hostile strings, keys, phones, exported files."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from afield.engines.scripted import ScriptedEngine, ScriptedReply
from afield.engines.torch.engine import TorchEngine
from afield.errors import Unavailable
from bench.ui import run as bench
from bench.ui.runs import write_evaluation, write_hostile, write_many, write_verl
from support.chromium import Browser, Page, browser, program
from support.gateways import ADMIN, running
from support.ui import element, serving, show, text

pytestmark = [pytest.mark.real, pytest.mark.anyio]
MODEL = Path(bench.MODEL)
SMALL = ("#/r/small", "#/r/small/rollouts", "#/r/small/o/s1-g0-r1", "#/r/small/g/s1-g0", "#/r/small/excluded")
VERL = ("#/r/verl", "#/r/verl/rollouts", "#/r/verl/o/s1g0-1", "#/r/verl/g/s1g0", "#/r/verl/timeline")
PLACES = (
    *(*SMALL, "#/r/small/timeline", "#/compare?runs=small", "#/r/small/diff?a=s1-g0-r0&b=s1-g0-r1", "#/"),
    *(*VERL, "#/compare?runs=small,verl", "#/compare?runs=first,second"),
)
AGENT = """
import openai

import afield


@afield.agent
def agent(task: dict, rollout: afield.Context) -> float:
    with openai.OpenAI(base_url=rollout.openai_base_url, api_key=rollout.api_key) as client:
        messages = [{"role": "user", "content": task["question"]}]
        client.chat.completions.create(model=rollout.model_id, messages=messages, max_tokens=8)
    return 0.5
"""
CLIENT = """
import json

import afield
from agent import agent

rows = [json.loads(line) for line in open("tasks.jsonl")]
with afield.RolloutClient.open(agent=agent, gateway="{gateway}", admin_key="{key}", exp_id="mine") as client:
    assert len(list(client.run_batch(rows, rollouts=2, timeout=100))) == 6
"""
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture
async def chromium() -> AsyncIterator[Browser]:
    try:
        program()
    except Unavailable as error:
        pytest.fail(str(error)) if os.environ.get("CI") else pytest.skip(str(error))
    async with browser() as started:
        yield started


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_many(folder / "small", 128, steps=4, model=str(MODEL))
    write_hostile(folder / "hostile", model=str(MODEL))
    write_verl(folder / "verl", model=str(MODEL))
    for seed, name in enumerate(("first", "second")):
        write_evaluation(folder / name, seed=seed)
    return folder


async def opened(page: Page, url: str) -> None:
    await page.open(url)
    await page.wait_for(element(".tbody a"))


async def test_a_demo_is_shown_while_it_trains_and_after_it_was_killed(
    chromium: Browser, tmp_path: Path
) -> None:
    demo = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "afield", "demo", "--steps", "40", "--json"),
        cwd=tmp_path,
        start_new_session=True,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    killed = False
    try:
        async with asyncio.timeout(120):
            while not list(tmp_path.glob("runs/*/metrics.jsonl")):  # noqa: ASYNC240
                await asyncio.sleep(0.1)
        async with serving(tmp_path / "runs") as url, chromium.page() as page:
            await opened(page, url)
            await page.evaluate("document.querySelector('.tbody a').click()")
            await page.wait_for(
                f"{text('of 40')} && {element('.state.running')} && {element('.chart canvas')}"
            )
            steps = "document.querySelectorAll('.steps a').length"
            before = await page.evaluate(steps)
            await page.wait_for(f"{steps} > {before}")  # without a reload
            os.killpg(demo.pid, signal.SIGKILL)
            killed = True
            await page.wait_for(element(".state.stopped"))
            await page.press("2")
            await page.wait_for(element(".tbody a"))
            await page.press("Enter")
            await page.wait_for(
                f"{element('.tokens .sampled')} && {text('get_')} && {element('canvas.strip')}"
            )
            assert await page.evaluate(text("<|im_start|>"))  # text of tokens, from the model's tokenizer
            assert page.errors == []
    finally:
        if not killed:
            os.killpg(demo.pid, signal.SIGKILL)
        await demo.wait()


async def test_every_page_fits_a_phone_and_a_desktop_in_both_colours(chromium: Browser, runs: Path) -> None:
    async with serving(runs) as url, chromium.page() as page:
        await opened(page, url)
        for width, dark in ((390, True), (1280, False)):
            await page.size(width, 844, dark=dark)
            for place in PLACES:
                await show(page, place, f"document.querySelector('main > *') && !{element('[aria-busy]')}")
                assert await page.evaluate(OVERFLOW) <= 0, (place, width)
            assert await page.evaluate("document.documentElement.dataset.theme") == (
                "dark" if dark else "light"
            )
        assert page.errors == []


async def test_keys_move_open_search_and_change_colours(chromium: Browser, runs: Path) -> None:
    async with serving(runs, str(runs / "small")) as url, chromium.page() as page:
        await opened(page, url)
        await show(page, "#/r/small/rollouts?sort=-seconds", element(".tbody a"))
        chosen = "document.querySelector('.chosen a').textContent"
        first = await page.evaluate(chosen)
        await page.press("j")
        await page.wait_for(f"{chosen} !== {json.dumps(first)}")
        await page.press("k")
        await page.wait_for(f"{chosen} === {json.dumps(first)}")
        await page.press("/")
        assert await page.evaluate("document.activeElement.type") == "search"
        for letter in "s1-g0":
            await page.press(letter)
        await page.wait_for(
            "location.hash.includes('q=s1-g0') && document.querySelectorAll('.tbody .tr').length === 16"
        )
        await page.evaluate("document.activeElement.blur()")
        await page.press("Enter")
        await page.wait_for("location.hash.includes('/o/s1-g0-r')")
        await page.wait_for(element(".tokens span"))
        before = await page.evaluate("location.hash")
        await page.press("]")
        await page.wait_for(f"location.hash !== {json.dumps(before)}")
        theme = "document.documentElement.dataset.theme"
        before = await page.evaluate(theme)
        await page.press("t")
        assert await page.evaluate(theme) != before
        await page.press("1")
        await page.wait_for("location.hash === '#/r/small'")
        assert page.errors == []


async def test_tokens_show_branches_fates_and_the_first_difference(chromium: Browser, runs: Path) -> None:
    async with serving(runs) as url, chromium.page() as page:
        await opened(page, url)
        await show(page, "#/r/small/o/s1-g0-r1?color=fate", element(".tokens .named"))
        marks = "[...document.querySelectorAll('.turn-mark')].map((m) => m.textContent).join()"
        assert await page.evaluate(marks) == "t1,t2,t3,t4"
        assert await page.evaluate("document.querySelectorAll('section svg circle').length") == 4
        await show(page, "#/r/small/o/s1-g0-r1?path=t4", f"{marks} === 't1,t3,t4'")
        await show(
            page, "#/r/small/diff?a=s1-g0-r0&b=s1-g0-r1", "document.querySelectorAll('.mark').length === 2"
        )
        assert page.errors == []


async def test_gateway_page_shows_engines_and_sessions_of_a_running_gateway(
    chromium: Browser, runs: Path, tmp_path: Path
) -> None:
    engine = ScriptedEngine([ScriptedReply(token_ids=(65, 66))])
    async with running(engine, tmp_path / "store") as up:
        agent = await up.agent("watched.1")
        await agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "Is it so?"}])
        async with (
            serving(runs, "--gateway", up.url, AFIELD_ADMIN_KEY=ADMIN) as url,
            chromium.page() as page,
        ):
            await opened(page, url)
            await show(page, "#/gateway", f"{text('watched.1')} && {text('ready')}")
            assert not await page.evaluate(text("undefined"))
            assert page.errors == []


async def test_gateway_page_counts_calls_in_flight_and_their_cost(
    chromium: Browser, runs: Path, tmp_path: Path
) -> None:
    quick, held = ScriptedReply(token_ids=(65, 66)), ScriptedReply(token_ids=(65,), fail="hang")
    async with running(ScriptedEngine([quick, held, held, held]), tmp_path / "store") as up:
        agents = [await up.agent(f"flying{n}.1") for n in range(3)]
        messages: list[Any] = [{"role": "user", "content": "Is it so?"}]
        await agents[0].chat.completions.create(model="m", messages=messages)
        calls = [
            asyncio.create_task(agent.chat.completions.create(model="m", messages=messages, user=str(n)))
            for n, agent in enumerate(agents)
        ]
        try:
            async with (
                serving(runs, "--gateway", up.url, AFIELD_ADMIN_KEY=ADMIN) as url,
                chromium.page() as page,
            ):
                await opened(page, url)
                tile = "[...document.querySelectorAll('.tile')].find((t) => t.innerText.startsWith({}))"
                running_calls = tile.format(json.dumps("calls running")) + ".innerText.includes('\\n3\\n')"
                await show(page, "#/gateway?in=1&out=1000000", f"{text('flying2.1')} && {running_calls}")
                cost = tile.format(json.dumps("cost")) + ".querySelector('.tile-value').textContent"
                await page.wait_for(f"{cost} > 0")
                assert page.errors == []
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)


async def test_runs_of_an_evaluation_and_of_a_client_show_tasks_and_rewards(
    chromium: Browser, tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    tasks = [{"id": f"q{n}", "question": f"How many red mugs are left in room {n}?"} for n in range(3)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    runs = tmp_path / "runs"
    evaluate = ("eval", "agent.py:agent", "--tasks", "tasks.jsonl", "--model", str(MODEL), "--attempts", "2")
    command = [sys.executable, "-m", "afield", *evaluate, "--run", "before", "--json"]
    done = await asyncio.to_thread(subprocess.run, command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    async with running(TorchEngine(MODEL), tmp_path / "store") as up:
        script = CLIENT.format(gateway=up.url, key=ADMIN)
        environment = {**os.environ, "AFIELD_RUNS": str(runs)}
        client = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", script), cwd=tmp_path, env=environment
        )
        assert await client.wait() == 0
    async with serving(runs) as url, chromium.page() as page:
        await opened(page, url)
        for name, kind, rollouts in (("before", "eval", 6), ("mine", "client", 6)):
            await show(page, f"#/r/{name}", f"{text('pass@2')} && {text('room 2')} && {text(kind)}")
            assert await page.evaluate("document.querySelectorAll('.tbody .tr').length") == 3
            await show(page, f"#/r/{name}/rollouts", text(f"{rollouts} of {rollouts} rollouts"))
            await page.press("Enter")
            await page.wait_for(f"{element('.tokens .sampled')} && {text('of kind ' + kind)}")
        assert await page.evaluate("document.querySelector('option[value=entropy]').disabled")
        assert page.errors == []


async def test_recorded_training_colours_tokens(chromium: Browser, tmp_path: Path) -> None:
    command = (sys.executable, "-m", "afield", "demo", "--steps", "1", "--record-training", "--run", "demo")
    done = await asyncio.to_thread(subprocess.run, command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    async with serving(tmp_path / "runs") as url, chromium.page() as page:
        await opened(page, url)
        await show(page, "#/r/demo/rollouts?sort=-advantage", element(".tbody a"))
        await page.press("Enter")
        await page.wait_for(element(".tokens .sampled"))
        spans = "[...document.querySelectorAll('.tokens .sampled')]"
        coloured = f"{spans}.filter((s) => s.style.background).length"
        for mode in ("trainer_logprob", "difference", "entropy", "ratio", "importance", "advantage"):
            chosen = f"(() => {{ const s = document.querySelector('.toolbar select'); s.value = '{mode}';"
            await page.evaluate(f"{chosen} s.dispatchEvent(new Event('change')); }})()")
            await page.wait_for(f"location.hash.includes('color={mode}') && {coloured} === 12")
        await page.evaluate("document.querySelector('.tokens .sampled').click()")
        await page.wait_for(f"{text('entropy 0')} && {text('ratio 1')} && {text('· trained')}")
        assert not await page.evaluate(text("Not recorded"))
        assert page.errors == []


async def test_a_run_of_veRL_is_shown_on_every_page(chromium: Browser, tmp_path: Path) -> None:
    write_verl(tmp_path / "verl", model=str(MODEL))
    write_many(tmp_path / "many", 64, steps=2, model=str(MODEL))
    async with serving(tmp_path) as url, chromium.page() as page:
        await opened(page, url)
        assert await bench.other_trainer(page) == []


async def test_evaluations_are_compared_by_their_estimates(chromium: Browser, runs: Path) -> None:
    async with serving(runs) as url, chromium.page() as page:
        await opened(page, url)
        ready = " && ".join(map(text, ("Evaluations", "mean reward", "pass@2", "validation rollouts")))
        await show(page, "#/compare?runs=first,second", f"{ready} && {text('task-0')}")
        assert not await page.evaluate(f"{text('per step')} || {text('NaN')}")
        assert page.errors == []


async def test_no_script_of_an_agent_runs(chromium: Browser, runs: Path) -> None:
    async with serving(runs) as url, chromium.page() as page:
        await opened(page, url)
        assert await bench.hostile(page) == []
        inserted = "(() => { try { document.body.innerHTML = '<b>x</b>' } catch (e) { return e.name } })()"
        assert await page.evaluate(inserted) == "TypeError"  # Trusted Types refuse HTML from strings


async def test_an_exported_file_works_without_a_server(chromium: Browser, runs: Path, tmp_path: Path) -> None:
    result = await bench.exported(chromium, runs, tmp_path / "runs.html")
    assert result["export_problems"] == []
    assert result["export"]["rollouts"] == 128 + 4 + 4 + 8


async def test_another_site_cannot_read_runs(chromium: Browser, runs: Path, tmp_path: Path) -> None:
    site = tmp_path / "site.html"
    site.write_text("<title>evil</title>")
    async with serving(runs) as url, chromium.page() as page:
        await opened(page, url)  # the cookie is set now
        await page.open(site.as_uri())
        await page.wait_for("document.title === 'evil'")
        target = url.partition("?")[0] + "api/runs"
        for mode in ("cors", "no-cors"):
            request = f"fetch({json.dumps(target)}, {{mode: '{mode}', credentials: 'include'}})"
            assert await page.evaluate(f"{request}.then((r) => r.text()).catch(() => '')") == ""


def test_the_benchmark_prints_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "bench/ui/run.py", "--json", "--rollouts", "640", "--tokens", "20000"]
    root = Path(bench.ROOT)
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=170, check=True)
    result = json.loads(done.stdout)
    assert result["hostile_problems"] == result["verl_problems"] == result["export_problems"] == []
