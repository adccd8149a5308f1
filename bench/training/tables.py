"""Training tables of docs/benchmarks.md, from saved results: trainers, tree, engine, publish, smollm."""

from __future__ import annotations

from typing import Any

from bench.report import table, verdict
from bench.training.acceptance import engine_criteria, tree_criteria

UNMEASURED = "Not measured yet; run `make accept PART={}`."
SHAPES = {"shared prompt": "8 rollouts that share a prompt", "sub-agents": "64 trajectories with sub-agents"}
HOW = ("stochastic", "nearest")
FORMS = {"per_turn": "a row per turn", "merged": "merged rows", "varlen": "merged rows, no padding"}


def sections(
    run: dict[str, Any] | None,
    tree: dict[str, Any] | None,
    engine: dict[str, Any] | None,
    publish: dict[str, Any] | None,
    smollm: dict[str, Any] | None,
) -> dict[str, str]:
    return {
        **_trainers(run),
        "tree": _tree(tree),
        "engine": _engine(engine),
        "publish": _publish(publish),
        "smollm": _smollm(smollm),
    }


def _publish(line: dict[str, Any] | None) -> str:
    if line is None:
        return UNMEASURED.format("gpu")
    machine = line["machine"]
    origin = (
        f"One {machine['device']}, commit `{line['commit'][:12]}`, torch {machine['torch']}, vLLM"
        f" {machine['vllm']}; the control is {line['control']} in the mean."
    )
    rows = [
        (engine, name, steps, *(kept[how] for how in HOW), *(diff[f"{how}_times_control"] for how in HOW))
        for engine, settings in line["kept"].items()
        for name, marks in settings.items()
        for steps, kept in marks.items()
        for diff in (line["logprob_diff"][engine][name][steps],)
    ]
    head = ("engine", "weights, learning rate", "steps", "kept", "kept, nearest", "apart", "apart, nearest")
    return f"{origin}\n\n{table(head, rows)}"


def _smollm(line: dict[str, Any] | None) -> str:
    if line is None:
        return UNMEASURED.format("gpu")
    origin = (
        f"One {line['machine']['device']}, commit `{line['commit'][:12]}`, {line['rollouts']} rollouts of"
        f" {line['turns']} turns a step, the engine in {line['engine_dtype']}."
    )
    rows = [
        (
            int(step["step"]),
            step["reward"],
            f"{step['logprob_diff']:.4f}",
            f"{step['control']:.4f}",
            round(step["times_control"], 2),
            round(step["update_kept"], 4),
        )
        for step in line["steps"]
    ]
    head = ("step", "reward", "apart, mean", "control", "times the control", "update kept")
    return f"{origin}\n\n{table(head, rows)}"


def _trainers(run: dict[str, Any] | None) -> dict[str, str]:
    if run is None:
        return dict.fromkeys(("origin", "learning", "bars"), UNMEASURED.format("trainers"))
    result, machine = run["runs"], run["machine"]
    origin = (
        f"The numbers are of commit `{run['commit']}`, on a machine with {machine['cores']} cores and Python"
        f" {machine['python']}, without a GPU."
    )
    rows = [_learnt(name, result[name]) for name in ("veRL", "TRL", "own loop")]
    bars = [(row["name"], row["measured"], row["required"], verdict(row["ok"])) for row in run["criteria"]]
    return {
        "origin": origin,
        "learning": table(("trainer", "steps", "first", "last", "apart, mean", "apart, at most"), rows),
        "bars": table(("", "measured", "required", ""), bars),
    }


APART = {"veRL": ("probs_diff_mean", "probs_diff_max"), "TRL": ("logprob_diff_mean", "logprob_diff")}


def _learnt(name: str, result: dict[str, Any]) -> tuple[Any, ...]:
    learnt = (result.get(key, "-") for key in ("steps", "first", "last"))
    apart = (f"{result[key]:.1e}" for key in APART[name]) if name in APART else ("", "")
    return (name, *learnt, *apart)


def _tree(line: dict[str, Any] | None) -> str:
    if line is None:
        return UNMEASURED.format("gpu")
    origin = (
        f"One {line['device']}, commit `{line['commit'][:12]}`, a model of {line['parameters'] / 1e9:.2f} B"
        f" parameters; large products of matrices reach {line['ceiling_tflops']:,.0f} TFLOP/s on it."
    )
    parts = [origin, *([f"Note: {line['note']}"] if "note" in line else [])]
    for (name, title), shape in zip(SHAPES.items(), (line, line["forest"]), strict=True):
        rows = [_form(form, shape) for form in shape["speedup"]]
        rows.append(("the forest", "1", "1", "", shape["seconds"]["tree"], shape["peak_gib"]["tree"]))
        head = (
            "",
            "token ratio to forest",
            "time ratio to forest",
            "time ratio / token ratio",
            "s",
            "peak, GiB",
        )
        rest = [
            (what, seen, bar, verdict(ok))
            for what, seen, ok, bar in tree_criteria(line)
            if what.startswith(f"{name}: ")
        ]
        rest += [(f"{name}: {what}", seen, "", "") for what, seen in _cosines(shape)]
        rest.append((f"{name}: TFLOP/s, share of the ceiling", f"{shape['tflops']}, {shape['mfu']}", "", ""))
        parts += [
            f"**{title}**, {shape['unique_tokens']:,} tokens in the forest:",
            table(head, rows),
            table(
                ("", "measured", "required", ""), [(what.partition(": ")[2], *more) for what, *more in rest]
            ),
        ]
    return "\n\n".join(parts)


def _cosines(shape: dict[str, Any]) -> list[tuple[str, Any]]:
    """What the forest's gradients are measured by: rows among themselves, and all against float32."""
    exact = shape.get("float32_cosines")
    result = [("the same of rows, padded and not", shape["rows_cosine"])] if "rows_cosine" in shape else []
    if exact:
        result.append(("of the forest's gradients and float32's", exact["tree"]))
        result.append(("of merged rows' gradients and float32's", exact["merged"]))
    return result


def _form(form: str, shape: dict[str, Any]) -> tuple[Any, ...]:
    numbers = (shape[key][form] for key in ("token_ratio", "speedup"))
    share = shape["speedup"][form] / shape["token_ratio"][form]
    return (FORMS[form], *numbers, f"{share:.2f}", shape["seconds"][form], shape["peak_gib"][form])


def _engine(line: dict[str, Any] | None) -> str:
    if line is None:
        return UNMEASURED.format("gpu")
    machine, rates = line["machine"], line["tok_s"]
    load, size = machine["load"], machine["parameters"] / 1e9
    origin = (
        f"One {machine['device']}, commit `{line['commit'][:12]}`, torch {machine['torch']}, transformers"
        f" {machine['transformers']}, {size:.2f} B parameters, {load['requests']} requests"
        f" at once, each with a prompt of {load['prompt']} tokens and {load['new']} sampled tokens"
        f" ({load['batch_new']} with `generate_batch`)."
    )
    names = {"afield": "embedded engine", "generate": "`generate`", "generate_batch": "`generate_batch`"}
    rows = [(label, f"{rates[name]:,}" if rates[name] else "failed") for name, label in names.items()]
    bars = [(name, seen, bar, verdict(ok)) for name, seen, ok, bar in engine_criteria(line)[:1]]
    return "\n\n".join(
        (
            origin,
            table(("", "tokens a second"), rows),
            table(("", "measured", "required", ""), bars),
            _agreement(line["logprob_diff"]),
        )
    )


def _agreement(result: dict[str, Any] | None) -> str:
    if not result:
        return "How far its log-probabilities are from a trainer's was not measured."
    own = result["trainer_own_rounding"]
    kinds = [(f"`{kind}`", result[kind]["mean"], result[kind]["max"]) for kind in ("bfloat16", "float32")]
    kinds.append(("a trainer in bfloat16 from one in float32", own["mean"], own["max"]))
    lead = "Log-probabilities of sampled tokens, the engine's and those of a forward pass over the whole row:"
    return f"{lead}\n\n{table(('', 'apart, mean', 'at most'), kinds)}"
