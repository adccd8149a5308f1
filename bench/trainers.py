"""The parts `trainers` and `gpu` of `make accept`: stock trainers, equal gradients, a real model; trees.

`gpu` runs where there is a CUDA device and nowhere else. Its numbers are saved beside those of the part, as
tree-COMMIT.json and engine-COMMIT.json, which is what docs/benchmarks.md is written from.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bars import RESULTS, ROOT, Absent, Bars, Tested, commit, last_line, tested

RISE = 0.2
EXACT = 1e-5  # relative error of gradients in float32
LOOP = ROOT / "examples" / "own_loop" / "loop.py"


def trainers(bars: Bars, cwd: Path) -> dict[str, Any]:
    """The same exact rollouts in stock veRL, stock TRL, the embedded trainer and a loop of one's own."""
    return {
        "veRL": verl(bars),
        "TRL": trl(bars),
        "gradients": gradients(bars),
        "SmolLM2": smollm(bars),
        "own loop": own_loop(bars, cwd),
    }


def verl(bars: Bars) -> dict[str, Any]:
    told = last_line([sys.executable, "bench/verl.py", "--json"], ROOT)
    rose = round(told["last"] - told["first"], 3)
    bars.check("veRL learns: last - first", rose, rose >= RISE, f">= {RISE}")
    mean = told["probs_diff_mean"]
    bars.check("veRL: sampler and trainer apart, mean probability", f"{mean:.1e}", mean < 1e-6, "< 1e-6")
    remax = last_line([sys.executable, "bench/verl.py", "--json", "--estimator", "remax"], ROOT)
    rose = round(remax["last"] - remax["first"], 3)
    bars.check("veRL learns with remax: last - first", rose, rose >= RISE, f">= {RISE}")
    told["remax"] = remax
    shown(bars, "veRL, sync and asynchronous", tested("tests/real/test_verl.py"))
    shown(bars, "veRL's contract", tested("tests/real/test_verl_contract.py"))
    shown(bars, "losses are veRL's", tested("tests/real/test_verl_losses.py"))
    return told


def trl(bars: Bars) -> dict[str, Any]:
    """To the demo's bar, with the demo's agent."""
    told = last_line([sys.executable, "bench/trl.py", "--json"], ROOT)
    bars.check("TRL learns: first", told["first"], told["first"] <= 0.35, "<= 0.35")
    bars.check("TRL learns: last", told["last"], told["last"] >= 0.8, ">= 0.80")
    bars.check("TRL: failed rollouts", told["failed"], told["failed"] == 0, "0")
    apart = told["logprob_diff"]
    name = "TRL: sampler and trainer apart, largest log-probability"
    bars.check(name, f"{apart:.1e}", apart < EXACT, f"< {EXACT}")
    shown(bars, "TRL's protocols, and its synchronous trainer", tested("tests/real/test_trl.py"))
    return told


def gradients(bars: Bars) -> dict[str, Any]:
    """Per turn, merged, as a tree; and through TRL's loss."""
    sys.path.append(str(ROOT / "tests"))
    from support.trl_env import trl_environment, trl_python

    ours = tested("tests/trainers/test_gradients.py")
    shown(bars, "gradients per turn, merged and of the tree", ours, "relative_error", EXACT)
    suite = ("tests/real/trl_suite.py", "-k", "same_gradient", "--timeout", 300, "-W", "default")
    theirs = tested(*suite, python=trl_python(), environment=trl_environment())
    shown(bars, "gradients through TRL's loss", theirs, "relative_error", EXACT)
    return {"forms": ours._asdict(), "TRL": theirs._asdict()}


def smollm(bars: Bars) -> dict[str, Any]:
    told = tested("tests/real/test_smollm.py")
    for when in ("logprob_diff", "logprob_diff_after"):
        shown(bars, f"a step of SmolLM2-135M-Instruct, {when}", told, when, 1e-4)
    return told._asdict()


def own_loop(bars: Bars, cwd: Path) -> dict[str, Any]:
    done = subprocess.run([sys.executable, LOOP], cwd=cwd, stdout=subprocess.PIPE, text=True, check=False)
    rewards = [float(reward) for reward in re.findall(r"reward (\S+)", done.stdout)]
    if done.returncode or not rewards:
        bars.check("a loop of one's own", f"ended with {done.returncode}", False, "learns")
        return {"rewards": rewards}
    first, last = (round(statistics.mean(part), 3) for part in (rewards[:3], rewards[-3:]))
    bars.check("a loop of one's own: last - first", round(last - first, 3), last >= first + 0.3, ">= 0.3")
    return {"first": first, "last": last, "steps": len(rewards), "rewards": rewards}


def shown(bars: Bars, name: str, told: Tested, number: str = "", most: float = 0.0) -> None:
    """Tests that pass; where they record how far something is off, so far at most."""
    if not number:
        return bars.check(name, told.said, told.ok, "all pass")
    off = told.numbers.get(number)
    seen = told.said if off is None else f"{off:.1e} ({told.said})"
    return bars.check(name, seen, told.ok and off is not None and off <= most, f"<= {most}")


# --- on a GPU ------------------------------------------------------------------------------------


def gpu(bars: Bars, cwd: Path) -> dict[str, Any]:
    """Trees against rows, the embedded engine against `generate`, and weights that reach engines."""
    import torch

    if not torch.cuda.is_available():
        raise Absent("it needs a CUDA device, and there is none here")
    shown(bars, "steps on the device are those on a CPU", tested("tests/trainers/test_cuda.py"))
    tree = last_line([sys.executable, "bench/tree.py", "--json", "--exact"], ROOT)
    engine = last_line([sys.executable, "bench/engine.py", "--json"], ROOT)
    with_vllm = ["--vllm", "start"] if find_spec("vllm") else []
    publish = last_line([sys.executable, "bench/publish.py", "--json", *with_vllm], ROOT)
    smollm = last_line([sys.executable, "bench/gpu_smollm.py", "--json", "--steps", "4"], ROOT)
    device = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    publish["machine"] = {**device, "vllm": version("vllm") if with_vllm else "not installed"}
    smollm["machine"] = device
    for name, line in (("tree", tree), ("engine", engine), ("publish", publish), ("smollm", smollm)):
        kept = {"commit": commit(), "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **line}
        (RESULTS / f"{name}-{commit()}.json").write_text(json.dumps(kept, indent=1) + "\n")
    for row in (*tree_bars(tree), *engine_bars(engine), *publish_bars(publish)):
        bars.check(*row)
    times = smollm["times_control"]
    bars.check("SmolLM2: sampler and trainer apart, times the control", times, times <= 1.5, "<= 1.5")
    return {"tree": tree, "engine": engine, "publish": publish, "smollm": smollm}


Verdict = tuple[str, Any, bool, str]


def tree_bars(tree: dict[str, Any]) -> list[Verdict]:
    """What a saved line of bench/tree.py comes to: a name, what was seen, whether it is enough, the bar."""
    found: list[Verdict] = []
    for shape, line in (("shared prompt", tree), ("sub-agents", tree["forest"])):
        for form, ratio in line["token_ratio"].items():
            least = round(0.9 * ratio, 3)
            seen = line["speedup"][form]
            found.append((f"{shape}: faster than {form}", seen, seen >= least, f">= {least} (0.9 x {ratio})"))
        peak, cosine = line["peak_ratio"], line["grad_cosine"]
        found.append((f"{shape}: peak memory over merged rows'", peak, peak <= 1, "<= 1"))
        found.append((f"{shape}: cosine of gradients", cosine, cosine >= 0.999, ">= 0.999"))
    return found


def publish_bars(publish: dict[str, Any]) -> list[Verdict]:
    found: list[Verdict] = []
    for engine, settings in publish["kept"].items():
        kept = min(mark["stochastic"] for marks in settings.values() for mark in marks.values())
        apart = publish["logprob_diff"][engine].values()
        times = max(mark["stochastic_times_control"] for marks in apart for mark in marks.values())
        found.append((f"{engine}: share of the update that arrives", kept, kept >= 0.99, ">= 0.99"))
        found.append((f"{engine}: apart, times the control", times, times <= 1.5, "<= 1.5"))
    return found


def engine_bars(engine: dict[str, Any]) -> list[Verdict]:
    rates = engine["tok_s"]
    if not (rates["afield"] and rates["generate"]):
        return [("engine over generate", f"not measured: {engine['failed']}", False, ">= 5")]
    ratio = round(rates["afield"] / rates["generate"], 2)
    told = engine["logprob_diff"]
    return [
        ("engine over generate", ratio, ratio >= 5, ">= 5"),
        ("engine's log-probabilities and the trainer's", told, bool(told), "measured"),
    ]
