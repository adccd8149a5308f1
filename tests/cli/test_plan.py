"""`afield plan`: output, exit codes, and what it does not load."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from afield.cli.main import main

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


def test_neither_torch_nor_transformers_is_loaded(model: Path) -> None:
    code = (
        "import sys; from afield.cli.main import main; main(sys.argv[1:]);"
        " print(*sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", "--model", str(model), "--gpus", "8x80"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.split() == []
