"""Precedence of settings: command line, environment, file; errors name the source."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from afield.cli import gateway, train
from afield.cli.main import main, parser
from afield.errors import UsageError
from afield.integrations.verl.settings import read_settings
from afield.settings.environment import Environment, environment_layer
from afield.settings.gateway import GatewaySettings
from afield.settings.train import TrainConfig, train_config
from afield.settings.values import SettingsLayers, converted

FILE = """\
[train]
model = "m"
steps = 1  # of three
workers = 1

[train.sandbox]
allow = ["a:1"]

[train.sandbox.limits]
memory_mb = 100
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(FILE)
    return path


def arguments(*words: object) -> argparse.Namespace:
    return parser().parse_args(["train", *map(str, words)])


def config(file: Path | None, *words: str) -> TrainConfig:
    args = arguments(*words)
    return train_config(file, train.flag_layer(args, TrainConfig, args.set or ()))


def test_command_line_wins_over_environment_over_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert config(file).steps == 1
    monkeypatch.setenv("AFIELD_TRAIN_STEPS", "2")
    assert config(file).steps == 2
    assert config(file, "--steps", "3").steps == 3
    assert config(file, "--set", "steps=4").steps == 4
    monkeypatch.setenv("AFIELD_TRAIN_STEPS", "")
    assert config(file).steps == 1


def test_tables_are_merged_key_by_key(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFIELD_TRAIN_SANDBOX__LIMITS__PIDS", "7")
    monkeypatch.setenv("AFIELD_TRAIN_SANDBOX__ALLOW", "b:2, c:3")
    sandbox = config(file, "--set", "sandbox.limits.cpus=2").sandbox
    assert (sandbox.limits.memory_mb, sandbox.limits.pids, sandbox.limits.cpus) == (100, 7, 2)
    assert sandbox.allow == ("b:2", "c:3")


@pytest.mark.parametrize(
    ("text", "env"),
    [('{"A": "1", "B": "x=y"}', {"A": "1", "B": "x=y"}), ('{ A = "1" }', {"A": "1"})],
)
def test_variable_holds_a_table_as_json_or_toml(
    file: Path, monkeypatch: pytest.MonkeyPatch, text: str, env: dict[str, str]
) -> None:
    monkeypatch.setenv("AFIELD_TRAIN_SANDBOX__ENV", text)
    assert config(file).sandbox.env == env


def test_text_is_taken_as_it_is(file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AFIELD_TRAIN_EXP_ID", "007")
    monkeypatch.setenv("AFIELD_TRAIN_TASKS", "tasks.jsonl")
    monkeypatch.setenv("AFIELD_TRAIN_SHUFFLE", "false")
    values = config(file)
    assert (values.exp_id, values.shuffle) == ("007", False)
    assert values.tasks == str(tmp_path / "tasks.jsonl")


VARIABLE = {
    "AFIELD_TRAIN_STEPS=many": "AFIELD_TRAIN_STEPS: steps = 'many' must be a whole number",
    "AFIELD_TRAIN_STEPS=0": "AFIELD_TRAIN_STEPS: steps = 0 must be at least 1",
    "AFIELD_TRAIN_STEP=1": "unknown key 'step' in AFIELD_TRAIN_STEP; did you mean 'steps'?",
    "AFIELD_TRAIN_MODE=fast": "AFIELD_TRAIN_MODE: mode = 'fast' must be one of: sync",
    "AFIELD_TRAIN_SHUFFLE=maybe": "AFIELD_TRAIN_SHUFFLE: shuffle = 'maybe' must be true or false",
    "AFIELD_TRAIN_SANDBOX=7": "AFIELD_TRAIN_SANDBOX: sandbox = 7 must be a table",
    'AFIELD_TRAIN_SANDBOX__ENV={"A": "1",': "AFIELD_TRAIN_SANDBOX__ENV is not valid JSON: Expecting property",
    "AFIELD_TRAIN_SANDBOX__ALLOW=[1": "AFIELD_TRAIN_SANDBOX__ALLOW is not valid JSON: Expecting",
    'AFIELD_TRAIN_SANDBOX={"limits": {"pids": 0}}': "AFIELD_TRAIN_SANDBOX: sandbox.limits: pids = 0 must be",
    "AFIELD_TRAIN_SANDBOX__LIMITS__PIDS=few": (
        "AFIELD_TRAIN_SANDBOX__LIMITS__PIDS: sandbox.limits.pids = 'few' must be a whole number"
    ),
    "AFIELD_TRAIN_SANDBOX__LIMITS__PID=1": (
        "unknown key 'sandbox.limits.pid' in AFIELD_TRAIN_SANDBOX__LIMITS__PID; did you mean"
    ),
}


@pytest.mark.parametrize("setting", VARIABLE)
def test_bad_value_in_a_variable_names_the_variable(
    file: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    name, _, value = setting.partition("=")
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as caught:
        config(file)
    assert str(caught.value).startswith(VARIABLE[setting])


LINES = {
    ("steps = 1", "steps = 'x'"): "run.toml:3: steps = 'x' must be a whole number",
    ("workers = 1", "workers = 0"): "run.toml:4: workers = 0 must be at least 1",
    ("workers = 1", "worker = 1"): "unknown key 'worker' in FILE:4; did you mean 'workers'?",
    ('allow = ["a:1"]', "allow = 3"): "run.toml:7: sandbox.allow = 3 must be a list",
    ('allow = ["a:1"]', 'allow = ["a:1", 5]'): "run.toml:7: sandbox.allow[1] = 5 must be text",
    ("memory_mb = 100", "memory_mb = -1"): "run.toml:10: sandbox.limits: memory_mb = -1 must be positive",
    ("memory_mb = 100", "memory = 1"): "unknown key 'sandbox.limits.memory' in FILE:10; did you",
}


@pytest.mark.parametrize("change", LINES)
def test_bad_value_in_a_file_names_the_line(file: Path, change: tuple[str, str]) -> None:
    file.write_text(FILE.replace(*change))
    with pytest.raises(UsageError) as caught:
        config(file)
    expected = LINES[change].replace("FILE", str(file))
    assert str(caught.value).removeprefix(f"{file.parent}/").startswith(expected)


FLAGS = {
    ("--steps", "0"): "--steps: steps = 0 must be at least 1",
    ("--attempt-timeout", "-1"): "--attempt-timeout: attempt_timeout_s = -1 must be positive",
    ("--mode", "fast"): "--mode: mode = 'fast' must be one of: sync",
    ("--set", "steps=x"): "--set steps: steps = 'x' must be a whole number",
    (
        "--set",
        "sandbox.limits.pids=0",
    ): "--set sandbox.limits.pids: sandbox.limits: pids = 0 must be positive",
    ("--set", "sandbox.limit=0"): "unknown key 'sandbox.limit' in --set sandbox.limit; did you mean",
}


@pytest.mark.parametrize("words", FLAGS)
def test_bad_value_on_the_command_line_names_the_flag(
    file: Path, words: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AFIELD_TRAIN_STEPS", "5")
    with pytest.raises(UsageError) as caught:
        config(file, *words)
    assert str(caught.value).startswith(FLAGS[words])


def test_train_command_names_the_variable_with_invalid_json(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("AFIELD_TRAIN_LEARN", "{not json")
    assert main(["train", "a.py:a", "--config", str(file)]) == 2
    assert "AFIELD_TRAIN_LEARN is not valid JSON" in capsys.readouterr().err


def gateway_settings(*words: str) -> GatewaySettings:
    return gateway.read_settings(parser().parse_args(["gateway", *words]), Environment.read())


def test_gateway_reads_its_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text('[gateway]\nmodel = "m"\nport = 1\nadmin_key = "of the file"\n')
    words = ("--config", str(file))
    assert (gateway_settings(*words).port, gateway_settings(*words).admin_key) == (1, "of the file")
    monkeypatch.setenv("AFIELD_GATEWAY_PORT", "2")
    monkeypatch.setenv("AFIELD_ADMIN_KEY", "of the environment")
    read = gateway_settings(*words)
    assert (read.port, read.admin_key) == (2, "of the environment")
    read = gateway_settings(*words, "--port", "3", "--admin-key", "of the flag")
    assert (read.port, read.admin_key) == (3, "of the flag")
    monkeypatch.setenv("AFIELD_GATEWAY_PORT", "70000")
    with pytest.raises(UsageError, match=r"^AFIELD_GATEWAY_PORT: port = 70000 must be from 0 to 65535"):
        gateway_settings(*words)


def test_empty_directory_of_runs_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFIELD_RUNS", "")
    assert Environment.read().runs == Path("runs")
    monkeypatch.setenv("AFIELD_RUNS", "elsewhere")
    assert Environment.read().runs == Path("elsewhere")


def test_variables_of_a_kubernetes_service_are_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "PORT": "tcp://10.0.0.1:8400",
        "PORT_8400_TCP": "tcp://10.0.0.1:8400",
        "PORT_8400_TCP_ADDR": "10.0.0.1",
        "SERVICE_HOST": "10.0.0.1",
        "SERVICE_PORT": "8400",
        "SERVICE_PORT_HTTP": "8400",
    }.items():
        monkeypatch.setenv(f"AFIELD_GATEWAY_{name}", value)
    assert environment_layer("AFIELD_GATEWAY", GatewaySettings).values == {}


def test_verl_names_variable_and_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "verl.toml"
    file.write_text('[verl]\nagent = "a:a"\nworkers = 0\n')
    with pytest.raises(UsageError, match=r"verl\.toml:3: workers = 0 must be at least 1"):
        read_settings({"file": str(file)})
    monkeypatch.setenv("AFIELD_VERL_WORKERS", "x")
    with pytest.raises(UsageError, match=r"^AFIELD_VERL_WORKERS: workers = 'x' must be a whole number"):
        read_settings({"file": str(file)})
    assert read_settings({"file": str(file), "workers": 2}).workers == 2


def test_layers_without_values_name_no_source() -> None:
    with pytest.raises(UsageError, match=r"^the settings: "):
        converted({"model": 3}, TrainConfig, SettingsLayers(()).origin)
