"""Acceptance parts `trainers` and `gpu`: veRL, TRL, equal gradients, a pretrained model, trees.

`gpu` needs a CUDA device. It also saves tree-COMMIT.json, engine-COMMIT.json, publish-COMMIT.json and
smollm-COMMIT.json, from which docs/benchmarks.md is written.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench import ROOT, report
from bench.criteria import Criteria, RequirementMissing, TestReport, run_benchmark, run_tests

RISE = 0.2
EXACT = 1e-5  # relative error of gradients in float32
LOOP = ROOT / "examples" / "own_loop" / "loop.py"


def trainers(criteria: Criteria, cwd: Path) -> dict[str, Any]:
    """The same rollouts in veRL, TRL, the embedded trainer and a custom loop."""
    return {
        "veRL": verl(criteria),
        "TRL": trl(criteria),
        "gradients": gradients(criteria),
        "SmolLM2": smollm(criteria),
        "own loop": own_loop(criteria, cwd),
    }


def verl(criteria: Criteria) -> dict[str, Any]:
    result = run_benchmark("training.verl", "--json")
    rose = round(result["last"] - result["first"], 3)
    criteria.check("veRL learns: last - first", rose, rose >= RISE, f">= {RISE}")
    mean = result["probs_diff_mean"]
    criteria.check("veRL: sampler and trainer apart, mean probability", f"{mean:.1e}", mean < 1e-6, "< 1e-6")
    remax = run_benchmark("training.verl", "--json", "--estimator", "remax")
    rose = round(remax["last"] - remax["first"], 3)
    criteria.check("veRL learns with remax: last - first", rose, rose >= RISE, f">= {RISE}")
    result["remax"] = remax
    check_report(criteria, "veRL, sync and asynchronous", run_tests("tests/real/test_verl.py"))
    check_report(criteria, "veRL's contract", run_tests("tests/real/test_verl_contract.py"))
    check_report(criteria, "losses are veRL's", run_tests("tests/real/test_verl_losses.py"))
    return result


def trl(criteria: Criteria) -> dict[str, Any]:
    """TRL with the demo's agent and the demo's criteria."""
    result = run_benchmark("training.trl", "--json")
    criteria.check("TRL learns: first", result["first"], result["first"] <= 0.35, "<= 0.35")
    criteria.check("TRL learns: last", result["last"], result["last"] >= 0.8, ">= 0.80")
    criteria.check("TRL: failed rollouts", result["failed"], result["failed"] == 0, "0")
    apart = result["logprob_diff"]
    name = "TRL: sampler and trainer apart, largest log-probability"
    criteria.check(name, f"{apart:.1e}", apart < EXACT, f"< {EXACT}")
    check_report(
        criteria, "TRL's protocols, and its synchronous trainer", run_tests("tests/real/test_trl.py")
    )
    return result


def gradients(criteria: Criteria) -> dict[str, Any]:
    """Gradients per turn, of merged rows, of the tree, and through TRL's loss."""
    from support.trl_env import trl_environment, trl_python

    ours = run_tests("tests/trainers/test_gradients.py")
    check_report(criteria, "gradients per turn, merged and of the tree", ours, "relative_error", EXACT)
    suite = ("tests/real/trl_suite.py", "-k", "same_gradient", "--timeout", 300, "-W", "default")
    theirs = run_tests(*suite, python=trl_python(), environment=trl_environment())
    check_report(criteria, "gradients through TRL's loss", theirs, "relative_error", EXACT)
    return {"forms": ours._asdict(), "TRL": theirs._asdict()}


def smollm(criteria: Criteria) -> dict[str, Any]:
    result = run_tests("tests/real/test_smollm.py")
    for when in ("logprob_diff", "logprob_diff_after"):
        check_report(criteria, f"a step of SmolLM2-135M-Instruct, {when}", result, when, 1e-4)
    return result._asdict()


def own_loop(criteria: Criteria, cwd: Path) -> dict[str, Any]:
    done = subprocess.run([sys.executable, LOOP], cwd=cwd, stdout=subprocess.PIPE, text=True, check=False)
    rewards = [float(reward) for reward in re.findall(r"reward (\S+)", done.stdout)]
    if done.returncode or not rewards:
        criteria.check("custom loop", f"ended with {done.returncode}", False, "learns")
        return {"rewards": rewards}
    first, last = (round(statistics.mean(part), 3) for part in (rewards[:3], rewards[-3:]))
    criteria.check("custom loop: last - first", round(last - first, 3), last >= first + 0.3, ">= 0.3")
    return {"first": first, "last": last, "steps": len(rewards), "rewards": rewards}


def check_report(
    criteria: Criteria, name: str, result: TestReport, number: str = "", most: float = 0.0
) -> None:
    """A criterion of passing tests and, with `number`, of a recorded number of at most `most`."""
    if not number:
        return criteria.check(name, result.summary, result.ok, "all pass")
    off = result.numbers.get(number)
    measured = result.summary if off is None else f"{off:.1e} ({result.summary})"
    return criteria.check(name, measured, result.ok and off is not None and off <= most, f"<= {most}")


# --- on a GPU ------------------------------------------------------------------------------------


def gpu(criteria: Criteria, cwd: Path) -> dict[str, Any]:
    """Trees against rows, the embedded engine against `generate`, rounding of published weights."""
    import torch

    if not torch.cuda.is_available():
        raise RequirementMissing("no CUDA device; run it on a machine with a GPU")
    started_at = report.commit()
    check_report(criteria, "steps on the device are those on a CPU", run_tests("tests/trainers/test_cuda.py"))
    tree = run_benchmark("training.tree_attention", "--json", "--exact")
    engine = run_benchmark("engine.throughput", "--json")
    with_vllm = ["--vllm", "start"] if find_spec("vllm") else []
    publish = run_benchmark("training.weight_rounding", "--json", *with_vllm)
    smollm = run_benchmark("training.smollm", "--json", "--steps", "4")
    device = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    publish["machine"] = {**device, "vllm": version("vllm") if with_vllm else "not installed"}
    smollm["machine"] = device
    for name, line in (("tree", tree), ("engine", engine), ("publish", publish), ("smollm", smollm)):
        report.save(name, line, started_at)
    for row in (*tree_criteria(tree), *engine_criteria(engine), *publish_criteria(publish)):
        criteria.check(*row)
    times = smollm["times_control"]
    criteria.check("SmolLM2: sampler and trainer apart, times the control", times, times <= 1.5, "<= 1.5")
    return {"tree": tree, "engine": engine, "publish": publish, "smollm": smollm}


Verdict = tuple[str, Any, bool, str]


def tree_criteria(tree: dict[str, Any]) -> list[Verdict]:
    """Criteria of a result of bench/training/tree_attention.py: name, measured, met, required."""
    verdicts: list[Verdict] = []
    for shape, line in (("shared prompt", tree), ("sub-agents", tree["forest"])):
        for form, ratio in line["token_ratio"].items():
            least = round(0.9 * ratio, 3)
            measured = line["speedup"][form]
            verdicts.append(
                (f"{shape}: faster than {form}", measured, measured >= least, f">= {least} (0.9 x {ratio})")
            )
        peak, cosine = line["peak_ratio"], line["grad_cosine"]
        verdicts.append((f"{shape}: peak memory over merged rows'", peak, peak <= 1, "<= 1"))
        verdicts.append((f"{shape}: cosine of gradients", cosine, cosine >= 0.999, ">= 0.999"))
    return verdicts


def publish_criteria(publish: dict[str, Any]) -> list[Verdict]:
    verdicts: list[Verdict] = []
    for engine, settings in publish["kept"].items():
        kept = min(mark["stochastic"] for marks in settings.values() for mark in marks.values())
        apart = publish["logprob_diff"][engine].values()
        times = max(mark["stochastic_times_control"] for marks in apart for mark in marks.values())
        verdicts.append((f"{engine}: share of the update that arrives", kept, kept >= 0.99, ">= 0.99"))
        verdicts.append((f"{engine}: apart, times the control", times, times <= 1.5, "<= 1.5"))
    return verdicts


def engine_criteria(engine: dict[str, Any]) -> list[Verdict]:
    rates = engine["tok_s"]
    if not (rates["afield"] and rates["generate"]):
        return [("engine over generate", f"not measured: {engine['failed']}", False, ">= 5")]
    ratio = round(rates["afield"] / rates["generate"], 2)
    result = engine["logprob_diff"]
    return [
        ("engine over generate", ratio, ratio >= 5, ">= 5"),
        ("engine's log-probabilities and the trainer's", result, bool(result), "measured"),
    ]
