"""Datasets: formats, Harbor directories, errors with file and line."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path

import pytest

from afield.datasets import read_tasks
from afield.datasets.harbor import read_config, scan, task_directory
from afield.errors import UsageError
from afield.settings.values import line_of

TOML = """\
schema_version = "1.4"

[metadata]
difficulty = "easy"

[agent]
timeout_sec = 120.0

[verifier]
timeout_sec = 60.0

[environment]
docker_image = "ubuntu:24.04"
memory = "2G"
"""


def harbor_task(folder: Path, toml: str = TOML) -> Path:
    (folder / "tests").mkdir(parents=True)
    (folder / "solution").mkdir()
    (folder / "task.toml").write_text(toml)
    (folder / "instruction.md").write_text("Write 4 to /app/answer.txt\n")
    (folder / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    (folder / "solution" / "solve.sh").write_text("echo 4 > /app/answer.txt\n")
    return folder


def test_jsonl_rows_are_kept_as_they_are(tmp_path):
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"id": "a", "n": 1.0}\n\n{"q": [null, {"x": "ä"}]}\n')
    assert [(task.id, task.input) for task in read_tasks(file)] == [
        ("a", {"id": "a", "n": 1.0}),
        ("line-3", {"q": [None, {"x": "ä"}]}),
    ]


def test_parquet_rows_are_kept_with_json_types(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [
        {
            "id": "a",
            "prompt": [{"role": "user"}],
            "at": datetime.datetime(2026, 1, 2),
            "raw": b"\0",
        },
        {"id": "b", "prompt": [], "at": None, "raw": b"xyz"},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "tasks.parquet")
    tasks = read_tasks(tmp_path / "tasks.parquet")
    assert [task.id for task in tasks] == ["a", "b"]
    assert tasks[0].input["prompt"] == [{"role": "user"}]
    assert tasks[0].input["at"] == "2026-01-02T00:00:00"
    assert tasks[0].input["raw"] == "AA=="
    assert read_tasks(tmp_path) == tasks


def test_missing_numbers_of_parquet_are_null_and_infinite_ones_are_refused(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    nan, inf = float("nan"), float("inf")
    parquet.write_table(pyarrow.table({"x": [1.5, nan], "y": [[nan], []]}), tmp_path / "tasks.parquet")
    assert [task.input for task in read_tasks(tmp_path)] == [{"x": 1.5, "y": [None]}, {"x": None, "y": []}]
    parquet.write_table(pyarrow.table({"x": [inf]}), tmp_path / "tasks.parquet")
    with pytest.raises(UsageError, match="row 0, column 'x': inf has no JSON form"):
        read_tasks(tmp_path)


def test_value_that_python_cannot_hold_is_a_usage_error(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    column = pyarrow.array([2**30], pyarrow.date32())
    parquet.write_table(pyarrow.table({"day": column}), tmp_path / "tasks.parquet")
    with pytest.raises(UsageError, match=r"tasks.parquet cannot be read as Parquet: .*1073741824"):
        read_tasks(tmp_path)


def test_several_splits_in_one_directory_are_refused(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    for shard in range(2):
        file = tmp_path / f"train-{shard:05}-of-00002.parquet"
        parquet.write_table(pyarrow.table({"x": [shard]}), file)
    assert [task.input["x"] for task in read_tasks(tmp_path)] == [0, 1]
    parquet.write_table(pyarrow.table({"x": [2]}), tmp_path / "test-00000-of-00001.parquet")
    with pytest.raises(UsageError, match="files of several splits: test, train"):
        read_tasks(tmp_path)


def test_hugging_face_directory_is_read_without_the_datasets_package(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import ipc

    split = tmp_path / "train"
    split.mkdir()
    table = pyarrow.Table.from_pylist([{"q": "1+1"}, {"q": "2+2"}])
    with (
        (split / "data-00000-of-00001.arrow").open("wb") as file,
        ipc.new_stream(file, table.schema) as writer,
    ):
        writer.write_table(table)
    (split / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]})
    )
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))
    assert [task.input["q"] for task in read_tasks(split)] == ["1+1", "2+2"]
    with pytest.raises(UsageError, match=r"several splits; choose one of: .*train"):
        read_tasks(tmp_path)


def test_harbor_directory_is_a_dataset_without_solution_or_tests_in_its_rows(tmp_path):
    for name in ("b", "a", "suite/c"):
        harbor_task(tmp_path / name)
    tasks = read_tasks(tmp_path)
    assert [task.id for task in tasks] == ["a", "b", "suite--c"]
    assert tasks[0].input["instruction"] == "Write 4 to /app/answer.txt\n"
    assert tasks[0].input["agent_timeout_s"] == 120.0
    assert tasks[0].input["image"] == "ubuntu:24.04"
    assert tasks[0].input.pop("hidden")["task_path"] == str(tmp_path / "a")
    assert str(tmp_path) not in json.dumps(tasks[0].input)
    [one] = scan(tmp_path / "a")
    assert one.config.environment.memory_mb == 2048


def test_digest_changes_with_any_file(tmp_path):
    task = harbor_task(tmp_path / "a")
    before = scan(task)[0].digest
    assert scan(task)[0].digest == before
    (task / "tests" / "test.sh").chmod(0o755)
    assert (executable := scan(task)[0].digest) != before
    (task / "tests" / "data.txt").write_text("x")
    assert (added := scan(task)[0].digest) not in (before, executable)
    (task / "environment").mkdir()
    assert (empty := scan(task)[0].digest) not in (before, executable, added)
    (task / "environment").rmdir()
    (task / "environment").symlink_to("../shared")
    assert (linked := scan(task)[0].digest) not in (before, executable, added, empty)
    (tmp_path / "shared").mkdir()
    assert scan(task)[0].digest == linked
    (task / "environment").unlink()
    (task / "environment").symlink_to("../other")
    assert scan(task)[0].digest != linked


BROKEN = {
    "unclosed string": ('[agent]\ntimeout_sec = "abc\n', r"task.toml:2: Illegal character '\\n'"),
    "not TOML": ("schema_version = \n", "task.toml:1: Invalid value"),
    "same key twice": (
        "[agent]\ntimeout_sec = 1\ntimeout_sec = 2\n",
        "task.toml:3: Cannot overwrite a value",
    ),
    "same table twice": ("[agent]\n\n[agent]\n", "task.toml:3: Cannot declare"),
    "text for a number": (
        '[metadata]\n\n[agent]\ntimeout_sec = "long"\n',
        "task.toml:4: agent.timeout_sec = 'long': Expected `float | null`, got `str`",
    ),
    "negative time": (
        "[verifier]\ntimeout_sec = -1\n",
        "task.toml:2: verifier.timeout_sec = -1: Expected `float` > 0",
    ),
    "number for a table": ("agent = 3\n", "task.toml:1: agent = 3: Expected `object`, got `int`"),
    "unknown network mode": (
        '[environment]\ncpus = 1\nnetwork_mode = "off"\n',
        "task.toml:3: environment.network_mode = 'off': Invalid enum value 'off'",
    ),
    "Windows": ('[environment]\nos = "windows"\n', "task.toml:2: environment.os = 'windows': only linux"),
    "hosts without allowlist": (
        '[environment]\nallowed_hosts = ["a.example"]\n',
        "task.toml:2: environment.allowed_hosts needs",
    ),
    "several steps": ('[[steps]]\nname = "one"\n', "task.toml:1: multi-step tasks are not supported"),
    "endless time": (
        "[verifier]\ntimeout_sec = inf\n",
        "task.toml:2: verifier.timeout_sec = inf: Expected `float` <= 1000000000",
    ),
    "size without a unit": (
        "[environment]\ncpus = 1\nmemory = 4096\n",
        "task.toml:3: environment.memory = 4096: write memory_mb in MiB",
    ),
    "size that is none": ('[environment]\nstorage = "much"\n', "task.toml:2: environment.storage = 'much'"),
    "relative working directory": (
        '[environment]\nworkdir = "app"\n',
        "task.toml:2: environment.workdir = 'app': write an absolute path",
    ),
    "no variable": (
        '[verifier.env]\nA = "1"\nB = "2\\u0000"\n',
        r"task.toml:3: verifier.env: 'B' = '2\\x00' is no environment variable",
    ),
    "deep nesting": (f"a = {'[' * 5000}{']' * 5000}\n", "task.toml: its values are nested too deeply"),
    "number in the environment": (
        "[environment.env]\nA = 1\n",
        "task.toml:2: environment.env.A = 1: Expected `str`, got `int`",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_task_file_is_named_with_its_line(tmp_path, case):
    text, message = BROKEN[case]
    task = harbor_task(tmp_path / "task", text)
    with pytest.raises(UsageError, match=message.replace("(", r"\(").replace("|", r"\|")):
        read_config(task / "task.toml")


def test_text_that_is_not_utf8_is_named_with_its_line(tmp_path):
    task = harbor_task(tmp_path / "task")
    (task / "task.toml").write_bytes(TOML.encode() + b'[solution.env]\nA = "\xe9"\n')
    with pytest.raises(UsageError, match=r"task.toml:16: byte 0xe9 is not UTF-8"):
        scan(task)


def test_byte_order_marks_are_no_part_of_a_text(tmp_path):
    task = harbor_task(tmp_path / "task")
    for file in ("task.toml", "instruction.md"):
        (task / file).write_bytes(b"\xef\xbb\xbf" + (task / file).read_bytes())
    assert scan(task)[0].instruction == "Write 4 to /app/answer.txt\n"
    file = tmp_path / "tasks.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"id": "a"}\r\n\r\n{"id": "b"}\r\n')
    assert [row.id for row in read_tasks(file)] == ["a", "b"]


def test_two_tasks_with_one_id_are_refused(tmp_path):
    harbor_task(tmp_path / "a--b")
    harbor_task(tmp_path / "a" / "b")
    with pytest.raises(UsageError, match=r"a--b/task.toml: .*a/b has the same task id 'a--b'; rename"):
        scan(tmp_path)


def test_link_to_a_parent_directory_is_not_followed(tmp_path):
    harbor_task(tmp_path / "a")
    (tmp_path / "again").symlink_to(tmp_path)
    assert [task.id for task in scan(tmp_path)] == ["a"]


def test_special_and_unreadable_files_of_a_task_are_named(tmp_path):
    task = harbor_task(tmp_path / "a")
    os.mkfifo(task / "tests" / "pipe")
    with pytest.raises(UsageError, match="tests/pipe: is no file, directory or symbolic link"):
        scan(task)


def test_all_broken_tasks_are_listed_at_once(tmp_path):
    harbor_task(tmp_path / "good")
    harbor_task(tmp_path / "bad", "agent = 3\n")
    (harbor_task(tmp_path / "empty") / "instruction.md").write_text(" \n")
    (harbor_task(tmp_path / "untested") / "tests" / "test.sh").unlink()
    harbor_task(tmp_path / "imageless", "")
    with pytest.raises(UsageError) as caught:
        scan(tmp_path)
    text = str(caught.value)
    assert text.startswith("4 of 5 tasks are broken")
    for part in (
        "bad/task.toml:1:",
        "empty/instruction.md:1: empty",
        "untested/tests/test.sh: missing",
        "imageless",
    ):
        assert part in text


def test_task_directory_prefers_the_row_then_the_root_then_the_template(tmp_path):
    own, rooted, templated = (harbor_task(tmp_path / name) for name in ("own", "root/x", "data/s/x"))
    row = {"id": "x", "suite": "s", "task_path": str(own)}
    template = str(tmp_path / "data" / "{suite}" / "{id}")
    assert task_directory(row, root=tmp_path / "root", template=template) == own
    row["task_path"] = str(tmp_path / "gone")
    assert task_directory(row, root=tmp_path / "root", template=template) == rooted
    assert task_directory(row, root=tmp_path / "elsewhere", template=template) == templated
    nested = harbor_task(tmp_path / "root" / "s" / "y")
    assert task_directory({"id": "s--y"}, root=tmp_path / "root") == nested
    assert task_directory({"id": "y"}, root=nested) == nested
    assert task_directory({"instance_id": "x", "id": "s--y"}, root=tmp_path / "root") == rooted
    assert task_directory({"id": "z", "hidden": {"task_path": str(own)}}, root=tmp_path / "root") == own
    with pytest.raises(UsageError, match=r"looked at: .*gone, .*elsewhere/x"):
        task_directory(row, root=tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="needs the column 'nothing'"):
        task_directory(row, template="{nothing}")
    with pytest.raises(UsageError, match="does not fit the row"):
        task_directory(row, template="/{id.nothing}")


def test_line_of_a_key_is_found_in_tables_and_dotted_keys():
    text = (
        'a = 1\n[environment]\n# cpus = 0\ncpus = 2\n[environment.env]\n"B" = "x"\n[verifier]\nenv.C = "y"\n'
    )
    assert line_of(text, ["environment", "cpus"]) == 4
    assert line_of(text, ["environment", "env", "B"]) == 6
    assert line_of(text, ["verifier", "env", "C"]) == 8
    assert line_of(text, ["environment", "missing"]) == 2
    assert line_of(text, ["nowhere"]) == 1


@pytest.mark.parametrize("name", ["nothing", "text.txt", "folder"])
def test_path_that_is_no_dataset_is_named(tmp_path, name):
    (tmp_path / "text.txt").write_text("not json\n")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match=name):
        read_tasks(tmp_path / name)
