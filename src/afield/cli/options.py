"""The options that `afield train` and `afield demo` share, and a parser whose complaints are one line.

An option stands for the key of `[train]` of the same name; what has no option is said with --set.
"""

from __future__ import annotations

import argparse
import difflib
from pathlib import Path
from typing import Any, NoReturn

from msgspec import structs

from afield.settings import TrainConfig

RUNTIMES = "process, sandbox, container=IMAGE, agentcore=ARN, kubernetes=IMAGE, ray, inline, served=URL,URL"
ADVANTAGES = "grpo, dr_grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, remax"

# Name, what it takes (int, float, list, a word, or nothing: a switch), what it says.
COLLECTING = (
    ("steps", int, "training steps"),
    ("epochs", int, "times every task is attempted, instead of --steps"),
    ("tasks-per-step", int, "tasks attempted in each step"),
    ("rollouts", int, "rollouts of each task (the group)"),
    ("seed", int, "order of tasks, sampling, learning"),
    ("mode", "MODE", "sync, one-step-off or async: whether collecting waits for learning"),
    ("max-staleness", int, "policy versions between sampling and training, in mode async"),
    ("on-stale", "WHAT", "drop or correct groups that are staler than allowed"),
    ("val-tasks", "FILE", "JSONL of tasks to validate on, every val_every steps"),
)
PLACES = (
    ("runtime", "WHERE", f"where agents run: {RUNTIMES}"),
    ("workers", int, "agent processes"),
    ("process-per-rollout", None, "a new process for every rollout"),
    ("concurrency", int, "rollouts at once"),
    ("attempt-timeout-s", float, "seconds one attempt may take"),
    ("idle-timeout-s", float, "seconds between model calls"),
    ("launch-rate", float, "launches and stops of agents per second"),
    ("cold-start-s", float, "seconds an agent takes to start; with the rate, how many start at once"),
    ("verifier", "FILE.py:NAME", "gives the rewards, in a place of its own"),
    ("verifier-runtime", "WHERE", "where the verifier runs"),
    ("transport", "SPEC", "how outcomes come back: files, memory, or an address such as s3://BUCKET?sqs=URL"),
    ("deliver", "TO", "store, or gateway: agents post their outcomes there; auto: what they can reach"),
)
SAMPLING = (
    ("temperature", float, "of sampling"),
    ("max-tokens", int, "per model call"),
    ("max-calls", int, "model calls per rollout"),
    ("max-context", int, "tokens of context"),
    ("abandoned-answers", "WHICH", "answers that a client asked for again and did not use: exclude, train"),
    ("side-calls", "WHICH", "side calls kept out of the loss: exclude (declared or known), declared, train"),
    ("unsupported", "HOW", "requests with a parameter that is not supported: refuse them, or ignore it"),
    ("constrained-turns", "HOW", "turns sampled under a constraint: train them, or exclude"),
    ("thinking", "HOW", "earlier reasoning in later prompts: preserve, template, per_turn"),
    ("escape", "HOW", "control tokens in the text of messages: escape, faithful, reject"),
    ("render", "HOW", "conversations that the chat template refuses: fold them by its rules, or strict: 400"),
    ("client-sampling", list, "settings that requests may choose: temperature,top_p,top_k,seed"),
    ("gateway", "URL", "a gateway that is running; its admin key is AFIELD_ADMIN_KEY"),
    ("engine", "KIND[=WHERE]", "of the gateway that is started: torch, vllm=URL, sglang=URL, scripted=FILE"),
    ("engine-dtype", "DTYPE", "dtype of the engine: auto, float32 (equal to the trainer), bfloat16, float16"),
    ("record-engine-calls", None, "write down every engine call"),
)
LEARNING = (
    ("trainer", "NAME", "the embedded one; veRL and TRL are started their own way"),
    ("advantage", "NAME", f"what a reward is measured against: {ADVANTAGES}"),
    ("lr", float, "learning rate (default: 1e-06, with LoRA 1e-05)"),
    ("minibatches", int, "updates per step"),
    ("kl", float, "weight of the KL penalty to the starting policy"),
    ("grad-clip", float, "largest norm of the gradient"),
    ("adam-eps", float, "AdamW's epsilon"),
    ("freeze-weights", None, "collect only, learn nothing"),
    ("durable", None, "survive power cuts, too: fsync after every write"),
    ("keep-weights", int, "versions kept on disk"),
)


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, with the nearest option there is."""

    def refuse(self, extra: list[str]) -> NoReturn:
        words = ", ".join(extra)
        wrong = next((word.split("=")[0] for word in extra if word.startswith("-")), "")
        near = difflib.get_close_matches(wrong, self._option_string_actions, n=1)
        self.error(f"does not understand {words}" + (f"; did you mean {near[0]}?" if near else ""))

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n{self.prog} --help lists what there is\n")


def add_run_arguments(command: argparse.ArgumentParser, recipe: dict[str, Any]) -> None:
    """`recipe` has defaults of its own, in place of the configuration's."""
    defaults = {field.name: field.default for field in structs.fields(TrainConfig)} | recipe
    command.add_argument("--config", type=Path, metavar="FILE", help="TOML with a [train] table")
    command.add_argument(
        "--set", action="append", metavar="KEY=VALUE", help="any key of [train], e.g. learn.loss=cispo"
    )
    command.add_argument(
        "--run", dest="name", metavar="NAME", help="name of the run; one that is there goes on"
    )
    command.add_argument(
        "--resume", nargs="?", const="latest", metavar="RUN", help="go on with a run, by default the newest"
    )
    command.add_argument(
        "--part",
        choices=("all", "collect", "learn"),
        default="all",
        help="do one half here and the other elsewhere; both meet in --run and use one --gateway",
    )
    command.add_argument("--json", action="store_true", help="end with one line of JSON; progress on stderr")
    for title, rows in (
        ("what is attempted", COLLECTING),
        ("agents", PLACES),
        ("the model", SAMPLING),
        ("learning", LEARNING),
    ):
        group = command.add_argument_group(title)
        for name, kind, text in rows:
            _add(group, name, kind, text, defaults[name.replace("-", "_")])


def _add(group: Any, name: str, kind: Any, text: str, default: Any) -> None:
    if kind is None:
        group.add_argument(f"--{name}", action="store_true", default=None, help=text)
        return
    text += "" if default in (None, "", ()) else f" (default: {default})"
    if kind is list:
        group.add_argument(f"--{name}", type=_words, metavar="NAME,NAME", help=text)
    elif isinstance(kind, str):
        group.add_argument(f"--{name}", metavar=kind, help=text)
    else:
        group.add_argument(f"--{name}", type=kind, metavar="N" if kind is int else "X", help=text)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
