"""`afield plan`: output, exit codes, and what it does not load."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from afield.cli.main import main
from support.pages import DOCS

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_settings_that_fit_are_printed(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(model), "--gpus", "8x80"]) == 0
    text = capsys.readouterr().out
    assert "7.62 B parameters" in text
    assert '[train.learn]\ndtype = "bfloat16"\ncheckpointing = true\n' in text
    assert "vllm_tensor_parallel = 1" in text


def test_what_does_not_fit_ends_with_1_and_the_nearest_that_does(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", str(model), "--gpus", "1x24"]) == 1
    text = capsys.readouterr().out
    assert "too large trainer on 1" in text
    assert "[train]" not in text
    assert "fits with " in text


def test_json_has_the_memory_of_each_part(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(model), "--gpus", "8x80", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["parameters"] == 7_615_616_512
    best = plan["fits"][0]
    assert best["trainer"]["weights"] * best["trainer_gpus"] == pytest.approx(
        4 * plan["parameters"], rel=1e-6
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gpus", "8"], "give COUNTxGIB"),
        (["--gpus", "8x80", "--context", "0"], "context = 0 must be at least 1"),
        (["--gpus", "8x80", "--concurrency", "0"], "concurrency = 0 must be at least 1"),
        (["--gpus", "8x80", "--sampled-share", "2"], "sampled_share = 2 must be above 0"),
        (["--gpus", "8x80", "--lora", "-1"], "lora = -1 must be 0 or a rank"),
    ],
)
def test_wrong_input_ends_with_2(
    model: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", str(model), *flags]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--simulate", "--agents", "4", "--rollouts", "2"]])
def test_neither_torch_nor_transformers_is_loaded(model: Path, flags: list[str]) -> None:
    code = (
        "import sys; from afield.cli.main import main; main(sys.argv[1:]);"
        " print(*sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", "--model", str(model), "--gpus", "8x80", *flags],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.split() == []


# --- simulation ---------------------------------------------------------------------------------------

SMALL = ["--simulate", "--agents", "32", "--rollouts", "4", "--turns", "3", "--reply-tokens", "50"]


def test_a_simulation_names_division_bottleneck_and_sources(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", str(model), "--gpus", "4x141,8x141", *SMALL]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Qwen2ForCausalLM: 7.62 B parameters, vllm, costs of NVIDIA H200"
    table = [line.split() for line in lines[4:8]]
    assert [row[:2] for row in table] == [[f"{n}x141", mode] for n in (4, 8) for mode in ("sync", "async")]
    assert sum(line.startswith(("4x141: mode async", "8x141: mode async")) for line in lines) == 2
    assert any("measured: bench/results/tree-" in line for line in lines)
    assert any(line.startswith("  left out: ") for line in lines)


def test_a_simulation_as_json_has_forecasts_and_constants(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--gpus", "8x141", *SMALL, "--mode", "async", "--max-staleness", "3", "--json"]
    assert main(["plan", "--model", str(model), *flags]) == 0
    document = json.loads(capsys.readouterr().out)
    (plan,) = document["plans"]
    assert (plan["mode"], plan["staleness"], plan["times"]["load"]["tasks_per_step"]) == ("async", 3, 8)
    assert sum(plan["forecast"]["trainer"].values()) == pytest.approx(plan["forecast"]["step_s"])
    assert document["costs"]["train_flops_per_s"]["basis"] == "measured"


def test_the_pages_table_is_what_the_command_prints(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "how-to" / "plan.md").read_text()
    table = page.partition("<!-- simulated -->")[2].partition("<!-- end of simulated -->")[0]
    assert main(["plan", "--model", str(model), "--gpus", "8x141", "--simulate", "--agents", "256"]) == 0
    assert table.strip().removeprefix("```text\n").removesuffix("\n```") in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--agents", "100"], "--agents = 100 is an option of the simulation; add --simulate"),
        (["--simulate", "--agents", "0"], "agents = 0 must be at least 1"),
        (["--simulate", "--tool-s", "nan"], "tool_s = nan must be at least 0"),
        (["--simulate", "--tool-spread", "9"], "tool_spread = 9 must be at most 5"),
        (["--simulate", "--mode", "sync", "--max-staleness", "2"], "max_staleness = 2 needs --mode async"),
        (["--simulate", "--turns", "1000"], "context = 802000 is more than the model's 32768 tokens"),
        (["--simulate", "--costs", "h100"], "costs = 'h100' is neither a file nor one of"),
        (["--simulate", "--trainer-gpus", "9"], "trainer_gpus = 9 is more than the 8 GPUs"),
    ],
)
def test_wrong_input_of_a_simulation_ends_with_2(
    model: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", str(model), "--gpus", "8x141", *flags]) == 2
    assert words in capsys.readouterr().err
