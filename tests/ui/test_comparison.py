"""Figures of the page Compare, computed by its JavaScript in Node."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from afield.ui.app import STATIC

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="Node is not installed")
TABLE = """
const table = (rows) => ({
  rows: rows.length,
  reward: Float32Array.from(rows.map((row) => row.reward ?? NaN)),
  text: (name, row) => rows[row][name],
});
"""


def evaluated(tmp_path: Path, expression: str) -> Any:
    """Value of an expression over the functions of comparison.js."""
    module = tmp_path / "comparison.mjs"
    shutil.copyfile(STATIC / "comparison.js", module)
    code = (
        f"import * as c from {json.dumps(module.as_uri())};{TABLE}console.log(JSON.stringify({expression}))"
    )
    command = [str(NODE), "--input-type=module", "-e", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return json.loads(done.stdout)


def test_only_rollouts_of_one_split_are_compared(tmp_path: Path) -> None:
    first = [
        {"task_id": "a", "split": "train", "reward": 1},
        {"task_id": "a", "split": "val", "reward": 0},
        {"task_id": "b", "split": "val", "reward": 1},
    ]
    second = [
        {"task_id": "a", "split": "val", "reward": 1},
        {"task_id": "b", "split": "val", "reward": None},
        {"task_id": "b", "split": "train", "reward": 0},
    ]
    tables = f"[table({json.dumps(first)}), table({json.dumps(second)})]"
    train, val = evaluated(tmp_path, f"['train', 'val'].map((split) => c.differences({tables}, split))")
    assert train == []
    assert [(task["task"], task["means"], task["ns"]) for task in val] == [("a", [0, 1], [1, 1])]


def test_an_evaluation_is_compared_by_validation_rollouts(tmp_path: Path) -> None:
    runs = json.dumps([{"split": "train"}, {"split": "val"}])
    assert evaluated(tmp_path, f"[c.sharedSplit({runs}), c.sharedSplit({runs}.slice(0, 1))]") == [
        "val",
        "train",
    ]


def test_estimates_of_all_evaluations_are_named_once(tmp_path: Path) -> None:
    runs = [
        {"evaluation": {"estimates": {"mean reward": {}, "pass@1": {}}}},
        {},
        {"evaluation": {"estimates": {"mean reward": {}, "pass@2": {}}}},
    ]
    assert evaluated(tmp_path, f"c.estimateNames({json.dumps(runs)})") == ["mean reward", "pass@1", "pass@2"]


def test_lines_without_times_do_not_count_for_the_seconds_of_a_step(tmp_path: Path) -> None:
    lines = [{"collect_s": 1, "train_s": 2}, {"collect_s": 5}, {"collect_s": 2, "train_s": 3}, {}]
    assert evaluated(tmp_path, f"[c.stepSeconds({json.dumps(lines)}), c.stepSeconds([{{}}])]") == [4, None]
