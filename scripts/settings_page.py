"""Writes docs/reference/settings.md from the settings tree: `.venv/bin/python scripts/settings_page.py`."""

# ruff: noqa: E501  (rows of tables)
from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import NODEFAULT, Struct

from afield.integrations.verl.settings import VerlSettings
from afield.settings.fields import Setting, sections_of, settings_of
from afield.settings.gateway import GatewaySettings
from afield.settings.runtimes import ResourceLimits
from afield.settings.train import RESUMABLE_KEYS, TrainConfig
from afield.settings.trainer import LoraOptions, TrainerOptions

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "settings.md"
HEAD = """\
# Settings

This page lists every setting of `afield train`, `afield demo`, `afield gateway` and the veRL integration, with its default. This page is generated from
`src/afield/settings`.

Values come from the command line, then from environment variables, then from a TOML file, then from the defaults below. An error names the flag, the variable, or
the file and line of the wrong value.

```console
$ afield train my_agent.py:agent --config train.toml --steps 50 --idle-timeout 60
```

```toml
[train]
tasks = "tasks.jsonl"          # paths are relative to this file
model = "path/to/hf-model"
mode = "async"
idle_timeout_s = 60
retries_infrastructure = 5
```

- A key is a flag with `-` for `_` and without a final `_s`: `idle_timeout_s` is `--idle-timeout`. Tables have no flags:
  use the file, or `--set TABLE.KEY=VALUE`.
- A key is an environment variable with the prefix of its command, and `__` between tables: `AFIELD_TRAIN_STEPS=50`,
  `AFIELD_TRAIN_SANDBOX__LIMITS__MEMORY_MB=512`, `AFIELD_GATEWAY_PORT=8400`, `AFIELD_RELAY_PORT=8500`. Tables and lists may be JSON:
  `AFIELD_TRAIN_SANDBOX='{{"allow": ["db:5432"]}}'`. An empty variable counts as not set.
- An unknown key is an error that names the nearest one.
- A run saves its settings in `run.json`. These may change when it is resumed: {resumable}. Any other change is refused.
- `afield demo` takes the same settings, with defaults of its own for its small model.

| flag of `train` and `demo` | meaning |
| --- | --- |
| `--config FILE` | TOML file with a `[train]` table |
| `--set KEY=VALUE` | any setting, such as `val_every=2` or `container.network=bridge`; may be repeated |
| `--run NAME` | run name; resumes it if it exists |
| `--resume [RUN]` | resume a run, by default the newest |
| `--role collect`, `--role learn` | [one half of the run](../concepts/collecting.md#two-processes); the other half runs elsewhere |
| `--json` | print [the summary](run-directory.md#summaryjson) as one line of JSON; progress goes to stderr |

| environment variable | meaning |
| --- | --- |
| `AFIELD_RUNS` | directory of runs; default: `runs` |
| `AFIELD_ADMIN_KEY` | admin key of the gateway that `gateway` names |
| `AFIELD_ENDPOINT_KEY` | API key of the endpoint of `afield eval --endpoint` |
"""
TABLES = (("learn", TrainerOptions), ("learn.lora", LoraOptions))
RUNTIMES = ("sandbox", "container", "agentcore", "kubernetes", "ray")


def page() -> str:
    resumable = ", ".join(f"`{name}`" for name in RESUMABLE_KEYS)
    return "".join([HEAD.format(resumable=resumable), *_train(), *_gateway(), *_verl()])


def _train() -> Iterator[str]:
    for title, settings in sections_of(TrainConfig):
        rows = [setting for setting in settings if not setting.table]
        if rows:
            yield f"\n## {title}\n\n{_table(rows)}"
    for name, struct in TABLES:
        yield f"\n## {struct.title}\n\nTable `[train.{name}]`, or `--set {name}.KEY=VALUE`.\n\n{_table(settings_of(struct))}"
    tables = {setting.name: setting.plain for setting in settings_of(TrainConfig)}
    for name in RUNTIMES:
        struct = tables[name]
        yield f"\n## {struct.title}\n\nTable `[train.{name}]`, or `--set {name}.KEY=VALUE`.\n\n{_table(settings_of(struct))}"
    yield f"\n## Resource limits\n\nTable `limits` of a runtime; none is no limit.\n\n{_table(settings_of(ResourceLimits))}"


def _gateway() -> Iterator[str]:
    yield "\n## Gateway command\n\nFlags of `afield gateway`, or the table `[gateway]` of a file given with `--config`.\n"
    for title, settings in sections_of(GatewaySettings):
        yield f"\n### Gateway: {title.lower()}\n\n{_table(settings)}"


def _verl() -> Iterator[str]:
    yield "\n## veRL\n\nKeys of the block `afield` in veRL's configuration, such as `+afield.agent=agent.py:agent`.\n"
    sections = dict(sections_of(VerlSettings))
    own = sections.pop(VerlSettings.title)
    shared = ", ".join(f"[{title}](#{title.lower()})" for title in sections)
    yield f"It has the keys of {shared}, and these:\n\n{_table(own)}"


def _table(settings: list[Setting]) -> str:
    rows = [f"| `{s.name}` | {_default(s.default)} | {_meaning(s)} |\n" for s in settings]
    return "".join(["| key | default | meaning |\n| --- | --- | --- |\n", *rows])


def _meaning(setting: Setting) -> str:
    choices = f" One of: {', '.join(f'`{choice}`' for choice in setting.choices)}." if setting.choices else ""
    return (setting.doc + choices).replace("|", "\\|")


def _default(value: Any) -> str:
    if value is NODEFAULT:
        return "required"
    if value is None or isinstance(value, Struct):
        return "none" if value is None else "table"
    if isinstance(value, float):
        return f"`{value!r}`" if math.isfinite(value) else f"`{value}`"
    return f"`{json.dumps(list(value) if isinstance(value, tuple) else value)}`"


if __name__ == "__main__":
    PAGE.write_text(page())
