"""One field declares one setting: flags, help, documentation and veRL's keys follow from it."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from afield.errors import UsageError
from afield.integrations.verl.settings import VerlSettings
from afield.settings.fields import SettingsGroup, settings_of
from afield.settings.gateway import GatewaySettings
from afield.settings.rollouts import Deadlines
from afield.settings.runtimes import ResourceLimits
from afield.settings.train import TrainConfig, train_config
from afield.settings.trainer import LoraOptions
from afield.settings.values import converted
from support.paths import ROOT


def structs_of(struct: type[SettingsGroup]) -> list[type[SettingsGroup]]:
    inner = [setting.plain for setting in settings_of(struct) if setting.table]
    return [struct, *(nested for table in inner for nested in structs_of(table))]


@pytest.mark.parametrize("struct", [TrainConfig, GatewaySettings, VerlSettings])
def test_every_setting_has_a_docstring_whose_first_sentence_stands_alone(struct: type[SettingsGroup]) -> None:
    for holder in structs_of(struct):
        for setting in settings_of(holder):
            assert setting.doc.endswith("."), f"{holder.__name__}.{setting.name} has no docstring"
            assert len(setting.help) > 2


def test_the_page_of_settings_is_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "settings_page.py"))
    page = (ROOT / "docs" / "reference" / "settings.md").read_text()
    assert page == script["page"](), "run .venv/bin/python scripts/settings_page.py"


NEW_FIELD = '''
    retries_eclipse: CountOrZero = 7
    """Further attempts after an eclipse. It is dark then."""
'''
REPORT = """
import contextlib, io, json, runpy, sys
from afield.cli.main import main
from afield.integrations.verl.settings import read_settings
from afield.settings.rollouts import RetrySettings
help = io.StringIO()
with contextlib.redirect_stdout(help), contextlib.suppress(SystemExit):
    main(["train", "--help"])
page = runpy.run_path(sys.argv[1])["page"]()
verl = read_settings({"retries_eclipse": 3}).retries_eclipse
try:
    read_settings({"retries_eclipse": -1})
except Exception as error:
    refused = str(error)
print(json.dumps({"help": help.getvalue(), "page": page, "verl": verl, "refused": refused}))
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Help, page and veRL's keys of a copy of the source with one field more."""
    source = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "src", source, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    file = source / "afield" / "settings" / "rollouts.py"
    last = '    """Further attempts after an infrastructure failure."""\n'
    assert last in file.read_text()
    file.write_text(file.read_text().replace(last, last + NEW_FIELD))
    page = ROOT / "scripts" / "settings_page.py"
    done = subprocess.run(
        [sys.executable, "-c", REPORT, str(page)],
        env={"PYTHONPATH": str(source), "COLUMNS": "200", "HOME": str(source)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_new_field_is_a_flag_with_the_first_sentence_as_help(report: dict[str, Any]) -> None:
    lines = " ".join(report["help"].split())
    assert "--retries-eclipse N further attempts after an eclipse (default: 7)" in lines


def test_a_new_field_is_a_row_of_the_page(report: dict[str, Any]) -> None:
    row = "| `retries_eclipse` | `7` | Further attempts after an eclipse. It is dark then. |"
    assert row in report["page"].splitlines()


def test_a_new_field_is_a_key_of_verl_with_the_same_bound(report: dict[str, Any]) -> None:
    assert report["verl"] == 3
    assert report["refused"] == "afield: retries_eclipse = -1 must be 0 or positive"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: TrainConfig(model="m", steps=0), "steps = 0 must be at least 1"),
        (lambda: TrainConfig(model="m", lr=0.0), "lr = 0 must be positive"),
        (lambda: TrainConfig(model="m", lr=float("nan")), "lr = nan must be positive"),
        (lambda: TrainConfig(model="m", kl=float("inf")), "kl = inf must be 0 or positive"),
        (lambda: TrainConfig(model="m", seed=-1), "seed = -1 must be from 0 to"),
        (lambda: structs.replace(TrainConfig(model="m"), workers=0), "workers = 0 must be at least 1"),
        (lambda: Deadlines(idle_timeout_s=0.0), "idle_timeout_s = 0 must be positive"),
        (lambda: ResourceLimits(memory_mb=0), "memory_mb = 0 must be positive"),
        (lambda: LoraOptions(rank=-1), "rank = -1 must be 0 or positive"),
        (lambda: GatewaySettings(model="m", port=70_000), "port = 70000 must be from 0 to 65535"),
    ],
)
def test_a_value_out_of_bounds_is_refused_however_it_is_built(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_a_wrong_value_is_reported_with_its_key_and_source() -> None:
    with pytest.raises(UsageError, match=r"file: steps = 'many' must be a whole number"):
        converted({"model": "m", "steps": "many"}, TrainConfig, "file")
    with pytest.raises(UsageError, match=r"unknown key 'sandbox.limit' in file; did you mean"):
        converted({"model": "m", "sandbox": {"limit": {}}}, TrainConfig, "file")


def test_attempt_timeout_has_one_default() -> None:
    defaults = {struct: structs.fields(struct) for struct in (TrainConfig, VerlSettings, Deadlines)}
    assert {f.default for fields in defaults.values() for f in fields if f.name == "attempt_timeout_s"} == {
        300.0
    }


def test_paths_of_a_file_are_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[train]\nmodel = "m"\ntasks = "t.jsonl"\nagent = "a.py:run"\n')
    config = train_config(tmp_path / "run.toml", {})
    assert (config.model, config.tasks) == (str(tmp_path / "m"), str(tmp_path / "t.jsonl"))
    assert config.agent == f"{tmp_path / 'a.py'}:run"


def test_gateway_settings_survive_json() -> None:
    settings = GatewaySettings(
        model="m", engine=("vllm=http://a", "vllm=http://b"), admin_key="k", processes=2
    )
    assert GatewaySettings.from_json(settings.to_json()) == settings
