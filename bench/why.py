"""Diagnosis of really broken runs: `afield why` ranks the class that was broken first.

    python bench/why.py [--json] [--only NAME,NAME] [--keep DIR]

1. Each class of `afield.diagnosis.registry` has at least one run that is broken in this way: by its agent,
   tools, template, engine, settings or reward. Runs are real: `afield train`, `eval` or a RolloutClient.
2. Healthy runs of different kinds give no finding.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from afield.client import RolloutClient
from afield.demo import shop
from afield.diagnosis.registry import CLASSES
from bench import ROOT, why_agents

POLICY = ROOT / "src" / "afield" / "demo" / "policy"
AGENTS = ROOT / "bench" / "why_agents.py"
AFIELD = [sys.executable, "-m", "afield"]
TIMEOUT_S = 300
CALL = '<tool_call>\n{"name": "get_price", "arguments": {"item": "red mug"}}\n</tool_call>'
ANSWERS = [f"It costs {n} crowns." for n in range(11, 40, 3)]
LENGTHS = [" ".join(["It costs a lot of money."] * n) for n in range(1, 11)]
SOUND: list[dict[str, Any]] = [{"match": "<tool_response>", "one_of": ANSWERS}, {"match": "", "text": CALL}]
"""Replies of a model that calls a tool, then answers."""
TALK: list[dict[str, Any]] = [{"match": "", "one_of": ANSWERS}]
"""Replies of a model that answers at once."""
SMALL = ("--steps", 1, "--tasks-per-step", 4, "--rollouts", 8, "--retries-infrastructure", 0)
Break = Callable[["Folder"], str]


class RunFailed(Exception):
    """A command ended otherwise than it should."""


class Folder:
    """A working directory with the runs that are made in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True)
        rows = shop.tasks(0, 64)
        self.tasks = self.write("tasks.jsonl", rows)

    def write(self, name: str, rows: Sequence[dict[str, Any]]) -> Path:
        path = self.path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def afield(self, *words: object, fails: bool = False) -> str:
        """Run a command; returns its output."""
        done = subprocess.run(
            [*AFIELD, *map(str, words)],
            cwd=self.path,
            env={**os.environ, "AFIELD_RUNS": str(self.path / "runs"), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if bool(done.returncode) != fails and words[0] != "why":
            raise RunFailed(
                f"{words} ended with {done.returncode}:\n{done.stdout[-500:]}{done.stderr[-3000:]}"
            )
        if words[0] == "why" and done.returncode not in (0, 1):
            raise RunFailed(f"{words} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        return done.stdout

    def train(self, agent: str, *options: object, fails: bool = False) -> str:
        """Train the demo's policy with an agent; returns the name of the run."""
        words = ["train", f"{AGENTS}:{agent}", "--run", "broken", "--json"]
        if "--model" not in options:
            words += ["--model", str(POLICY)]
        if "--tasks" not in options:
            words += ["--tasks", str(self.tasks)]
        self.afield(*words, *options, fails=fails)
        return "broken"

    def sample(
        self, agent: str, script: Sequence[dict[str, Any]], *options: object, fails: bool = False
    ) -> str:
        """Collect rollouts from scripted replies, without training."""
        engine = f"scripted={self.write('script.jsonl', script)}"
        return self.train(agent, *SMALL, "--freeze-weights", "--engine", engine, *options, fails=fails)

    def why(self, run: str) -> dict[str, Any]:
        return json.loads(self.afield("why", run, "--json"))


class Case(NamedTuple):
    """A run that is broken in one way."""

    name: str
    """Class that `afield why` must rank first; `healthy` for none."""
    how: str
    """How the run is broken, or what kind of run it is."""
    make: Break
    """Makes the run in a folder; returns its name."""


# --- ways to break a run ---------------------------------------------------------------------------


def evaluated(agent: str, name: str) -> Break:
    """An evaluation of the demo's policy."""

    def make(folder: Folder) -> str:
        folder.afield(
            *("eval", f"{AGENTS}:{agent}", "--model", POLICY, "--tasks", folder.tasks, "--run", name),
            *("--attempts", 4, "--temperature", 1, "--json"),
        )
        return name

    return make


def scripted(
    agent: str, script: Sequence[dict[str, Any]] = SOUND, *options: object, fails: bool = False
) -> Break:
    return lambda folder: folder.sample(agent, script, *options, fails=fails)


def trained(agent: str, *options: object) -> Break:
    return lambda folder: folder.train(agent, *options)


def changed_template(old: str, new: str) -> Break:
    """A run of the demo's policy with another chat template."""

    def make(folder: Folder) -> str:
        model = folder.path / "model"
        shutil.copytree(POLICY, model)
        template = model / "chat_template.jinja"
        text = template.read_text()
        assert old in text, old
        template.write_text(text.replace(old, new, 1))
        return folder.sample("sound", SOUND, "--model", model)

    return make


def engine_with_wrong_logprobs(*, first: float, later: float) -> Break:
    """Replay what the policy sampled, with log-probabilities that are off in first or later turns."""

    def make(folder: Folder) -> str:
        task = [shop.tasks(0, 1)[0]]
        tasks = folder.write("one.jsonl", task)
        options = ("--tasks", tasks, "--steps", 1, "--tasks-per-step", 1, "--rollouts", 2)
        folder.afield(
            *("train", f"{AGENTS}:alternates", "--model", POLICY, "--run", "sampled"),
            *(*options, "--freeze-weights", "--json"),
        )
        line = (folder.path / "runs" / "sampled" / "rollouts" / "step-0001.jsonl").read_text().splitlines()[0]
        turns = json.loads(line)["turns"]
        assert len(turns) == 2, turns
        rows = [
            {
                "match": match,
                "token_ids": turn["token_ids"],
                "logprobs": [value - shift for value in turn["logprobs"]],
            }
            for match, turn, shift in (("<tool_response>", turns[1], later), ("", turns[0], first))
        ]
        engine = f"scripted={folder.write('script.jsonl', rows)}"
        more = ("--steps", 2, "--rollouts", 4, "--lr", 1e-9, "--engine", engine)
        # The gateway notices too, as soon as it has to serve the weights of the first step.
        return folder.train("alternates", *options, *more, fails=True)

    return make


def killed_while_agents_hang(folder: Folder) -> str:
    """Kill a run, as a user or the kernel does, after its agents began and before one of them ended."""
    engine = f"scripted={folder.write('script.jsonl', SOUND)}"
    words = ["train", f"{AGENTS}:hangs", "--run", "broken", "--model", POLICY, "--tasks", folder.tasks]
    process = subprocess.Popen(
        [*AFIELD, *map(str, (*words, *SMALL, "--freeze-weights", "--engine", engine))],
        cwd=folder.path,
        env={**os.environ, "AFIELD_RUNS": str(folder.path / "runs")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        calls = folder.path / "runs" / "broken" / "gateway" / "gateway.sqlite"
        deadline = time.monotonic() + TIMEOUT_S
        while not calls.exists() or not _sessions(calls):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RunFailed("no agent began")
            time.sleep(0.5)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
    return "broken"


def _sessions(store: Path) -> int:
    """Number of turns in the store of a gateway."""
    with contextlib.closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as database:
        try:
            return database.execute("SELECT count(*) FROM turns").fetchone()[0]
        except sqlite3.OperationalError:  # being created
            return 0


def slow_groups(folder: Folder) -> str:
    """Every other group ends several steps after its last model call."""
    metrics = str(folder.path / "runs" / "broken" / "metrics.jsonl")
    tasks = folder.write("slow.jsonl", [{**task, "metrics": metrics} for task in shop.tasks(0, 64)])
    return folder.train(
        "takes_its_time",
        *("--tasks", tasks, "--no-shuffle", "--tasks-per-step", 1, "--rollouts", 8, "--max-tokens", 64),
        *("--steps", 16, "--mode", "async", "--max-staleness", 8, "--on-stale", "correct", "--lr", 3e-3),
    )


def rewarded_habits(folder: Folder) -> str:
    """Four tasks again and again, with a reward for the most common reply to each."""
    tasks = folder.write("few.jsonl", shop.tasks(0, 4))
    return folder.train(
        "rewards_the_usual",
        *(*DEMO_STEP, "--tasks", tasks, "--steps", 36, "--lr", 1.2e-3, "--workers", 1, "--minibatches", 2),
        *("--grad-clip", 0.1, "--adam-eps", 1e-4),
    )


def nearest_rounding(folder: Folder) -> str:
    """Small updates of weights that start on the grid of bfloat16, as published checkpoints do."""
    import torch
    from safetensors.torch import load_file, save_file

    model = folder.path / "model"
    shutil.copytree(POLICY, model)
    weights = load_file(model / "model.safetensors")
    rounded = {name: value.to(torch.bfloat16).float() for name, value in weights.items()}
    save_file(rounded, model / "model.safetensors", metadata={"format": "pt"})
    return folder.train(
        "shop_agent",
        *(*DEMO_STEP, "--model", model, "--steps", 3, "--lr", 1e-6, "--engine-dtype", "bfloat16"),
        *("--set", "learn.rounding=nearest"),
    )


DEMO_STEP = ("--no-shuffle", "--tasks-per-step", 4, "--rollouts", 8, "--max-tokens", 64)
BROKEN_CALL = '<tool_call>\n{"name": "get_price", "arguments": {"item": </tool_call>'
FAILING = [{"match": "<tool_response>", "fail": "unavailable"}, *SOUND]
SOMETIMES_FAILING = [{"match": "How many", "fail": "unavailable"}, *SOUND]

CASES: tuple[Case, ...] = (
    # infrastructure
    Case(
        "nothing_collected",
        "agents hang, and the run is killed",
        killed_while_agents_hang,
    ),
    Case("unreachable_gateway", "the agent calls another address", scripted("wrong_address", fails=True)),
    Case(
        "unreachable_gateway",
        "the agent calls another address and returns 0 when it fails",
        scripted("swallows_connection_errors"),
    ),
    Case(
        "infrastructure_failures",
        "the engine fails for half of the tasks",
        scripted("sound", SOMETIMES_FAILING),
    ),
    Case(
        "infrastructure_failures", "agents die", scripted("dies", SOUND, "--process-per-rollout", fails=True)
    ),
    Case(
        "infrastructure_zeros",
        "the agent returns 0 when the engine fails in the second turn",
        scripted("swallows_errors", FAILING),
    ),
    Case(
        "infrastructure_zeros",
        "the agent returns 0 when the engine fails for half of the tasks",
        scripted("swallows_errors", SOMETIMES_FAILING),
    ),
    Case("agent_errors", "the agent raises KeyError", scripted("raises", fails=True)),
    Case("slow_tool", "a tool sleeps", scripted("slow_tools")),
    Case(
        "timeouts",
        "the agent never ends",
        scripted("never_ends", SOUND, "--attempt-timeout", 3, "--rollouts", 4),
    ),
    Case("idle_engine", "launches are limited", scripted("sound", SOUND, "--launch-rate", 3)),
    # generation
    Case(
        "context_overflow",
        "tool results are long",
        scripted("long_results", SOUND, "--max-context", 300),
    ),
    Case("refused_calls", "the agent asks for audio first", scripted("asks_for_audio")),
    Case(
        "unstable_template",
        "the template counts the messages at its top",
        changed_template(
            '{{- "<|im_start|>system\\n" -}}', '{{- "<|im_start|>system\\n" ~ (messages | length) ~ "\\n" -}}'
        ),
    ),
    Case("empty_tool_schema", "tools have no parameters", scripted("untyped_tools")),
    Case(
        "malformed_tool_calls",
        "the model writes broken JSON",
        scripted("sound", [{"match": "", "one_of": [BROKEN_CALL, CALL]}]),
    ),
    Case("no_tool_calls", "the model only talks", scripted("sound", TALK)),
    Case("lost_tool_results", "the agent appends no result", scripted("forgets_results")),
    Case(
        "lost_tool_results",
        "the agent sends the same request again",
        scripted("forgets_replies", [{"match": "", "text": CALL}]),
    ),
    Case("edited_replies", "the agent rewrites replies", scripted("edits_replies")),
    Case(
        "unenforced_constraints",
        "a JSON schema is ignored",
        scripted("wants_json", TALK, "--constrained-turns", "ignore"),
    ),
    Case(
        "truncated_replies", "max_tokens is small", scripted("wants_whole_replies", TALK, "--max-tokens", 3)
    ),
    Case("main_path_excluded", "every request is declared a side call", scripted("declares_side_calls")),
    Case(
        "identical_samples",
        "the temperature is almost 0",
        trained("alternates", *DEMO_STEP, "--steps", 2, "--temperature", 0.001),
    ),
    # log-probabilities
    Case(
        "sampler_trainer_mismatch",
        "the engine's log-probabilities are wrong",
        engine_with_wrong_logprobs(first=0.5, later=0.5),
    ),
    Case(
        "sampler_trainer_mismatch",
        "the engine's log-probabilities are wrong behind a prefix",
        engine_with_wrong_logprobs(first=0.0, later=0.02),
    ),
    Case(
        "lost_update",
        "weights are rounded to the nearest bfloat16",
        nearest_rounding,
    ),
    Case(
        "stale_data",
        "steps train what was sampled long ago",
        slow_groups,
    ),
    Case(
        "entropy_collapse",
        "the reward is for what the policy says most often",
        rewarded_habits,
    ),
    Case(
        "diverged_policy",
        "the learning rate is too high",
        trained("shop_agent", *DEMO_STEP, "--steps", 7, "--lr", 3e-2),
    ),
    # advantage, reward
    Case("all_equal_rewards", "the reward is constant", trained("constant", *DEMO_STEP, "--steps", 2)),
    Case(
        "verifier_failures",
        "the verifier raises",
        scripted(
            *("submits", SOUND, "--verifier", f"{AGENTS}:failing_verifier", "--verifier-runtime", "process"),
            fails=True,
        ),
    ),
    Case("constant_reward", "the reward of an evaluation is always 0", evaluated("worthless", "broken")),
    Case(
        "truncation_as_success",
        "the reward looks for a word that comes first",
        scripted("ignores_the_end", [{"match": "", "text": "I look. " * 40}], "--max-tokens", 16),
    ),
    Case(
        "reward_follows_length",
        "the reward is the length",
        scripted("pays_for_length", [{"match": "", "one_of": LENGTHS}], "--max-tokens", 200),
    ),
)


# --- healthy runs ----------------------------------------------------------------------------------


def demo(*options: object) -> Break:
    def make(folder: Folder) -> str:
        folder.afield("demo", "--run", "healthy", "--json", *options)
        return "healthy"

    return make


def client_run(folder: Folder) -> str:
    """Rollouts of a RolloutClient on a gateway of its own."""
    engine = f"scripted={folder.write('script.jsonl', SOUND)}"
    words = ["gateway", "--model", POLICY, "--engine", engine, "--port", 0, "--store", folder.path / "store"]
    gateway = subprocess.Popen(
        [*AFIELD, *map(str, words), "--json"],
        cwd=folder.path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert gateway.stdout is not None
        address = json.loads(gateway.stdout.readline())
        with RolloutClient.open(
            agent=why_agents.sound,
            gateway=address["local_url"],
            admin_key=address["admin_key"],
            exp_id="client",
            directory=folder.path / "runs" / "client",
        ) as client:
            groups = list(client.run_groups(shop.tasks(0, 4), rollouts=8, timeout=TIMEOUT_S))
        assert len(groups) == 4
    finally:
        gateway.terminate()
        gateway.communicate(timeout=30)  # also closes its pipe
    return "client"


HEALTHY: tuple[Case, ...] = (
    Case("healthy", "demo on the embedded engine", demo("--steps", 4)),
    Case(
        "healthy",
        "demo in mode async on Strands",
        demo("--steps", 4, "--mode", "async", "--agent", "strands"),
    ),
    Case("healthy", "client", client_run),
    Case("healthy", "evaluation", evaluated("shop_agent", "eval")),
    Case(
        "healthy",
        "frozen, with a verifier",
        scripted(
            "submits", SOUND, "--verifier", f"{AGENTS}:grading_verifier", "--verifier-runtime", "process"
        ),
    ),
    Case("healthy", "frozen, ends with a tool call", scripted("brief")),
)


# --- the benchmark ---------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """What `afield why` said about a run."""

    case: Case
    names: list[str]
    seconds: float

    @property
    def ok(self) -> bool:
        return not self.names if self.case.name == "healthy" else self.names[:1] == [self.case.name]


def run_case(case: Case, root: Path) -> Outcome:
    began = time.monotonic()
    name = re.sub(r"[^a-z0-9]+", "-", f"{case.name} {case.how}".lower())[:100]
    folder = Folder(root / name)
    try:
        answer = folder.why(case.make(folder))
        names = [finding["name"] for finding in answer["findings"]]
    except (RunFailed, subprocess.TimeoutExpired) as error:
        names = [f"error: {error}"]
    outcome = Outcome(case, names, time.monotonic() - began)
    mark = "ok  " if outcome.ok else "MISS"
    print(
        f"{mark} {case.name} ({case.how}): {', '.join(names) or 'nothing'}  {outcome.seconds:.0f} s",
        flush=True,
    )
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the last line only")
    parser.add_argument("--only", default="", metavar="NAMES", help="classes to break, or healthy")
    parser.add_argument("--keep", metavar="DIR", help="directory in which the runs stay")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="runs at once (default: 2)")
    args = parser.parse_args()
    only = set(filter(None, args.only.split(",")))
    cases = [case for case in (*CASES, *HEALTHY) if not only or case.name in only]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(args.jobs) as pool:
        root = Path(args.keep).resolve() if args.keep else Path(scratch)
        outcomes = list(pool.map(lambda case: run_case(case, root), cases))
    broken = [one for one in outcomes if one.case.name != "healthy"]
    names = {one.name for one in CLASSES} & {one.case.name for one in broken}
    missed = {one.case.name for one in broken if not one.ok}
    false_alarms = sum(len(one.names) for one in outcomes if one.case.name == "healthy")
    result = {
        "classes": len(CLASSES) if not only else len(names),
        "found_first": len(names - missed),
        "false_alarms": false_alarms,
        "missed": {f"{one.case.name} ({one.case.how})": one.names for one in broken if not one.ok},
    }
    print(json.dumps(result))
    return 0 if result["found_first"] == result["classes"] and not false_alarms else 1


if __name__ == "__main__":
    raise SystemExit(main())
