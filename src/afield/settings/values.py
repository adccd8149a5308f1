"""Values of settings from TOML files, KEY=VALUE words and plain mappings, checked.

An unknown key is an error that suggests the nearest known one; a value of the wrong type is an error that
names its key and the right type.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec import Struct

from afield.errors import UsageError
from afield.settings.fields import PATH, TARGET, marked, settings_of

T = TypeVar("T", bound=Struct)
TYPE_NAMES = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
}


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both mappings as one; `above` wins, except that tables are merged key by key."""
    both = dict(below)
    for key, value in above.items():
        tables = isinstance(value, Mapping) and isinstance(both.get(key), Mapping)
        both[key] = merged(both[key], value) if tables else value
    return both


def assigned(words: Sequence[str]) -> dict[str, Any]:
    """Values of `KEY=VALUE` and `TABLE.KEY=VALUE`; a value is TOML, or else text."""
    values: dict[str, Any] = {}
    for word in words:
        key, sign, text = word.partition("=")
        if not sign or not key:
            raise UsageError(f"--set {word!r} must be KEY=VALUE or TABLE.KEY=VALUE")
        value: Any = text
        with suppress(tomllib.TOMLDecodeError):
            value = tomllib.loads(f"value = {text}")["value"]
        for part in reversed(key.split(".")):
            value = {part: value}
        values = merged(values, value)
    return values


def converted(values: Mapping[str, Any], struct: type[T], source: str) -> T:
    """The values as a struct, every one checked; `source` names their origin in errors."""
    check_keys(values, struct, source)
    try:
        return msgspec.convert(dict(values), struct)
    except msgspec.ValidationError as error:
        raise UsageError(f"{source}: {_readable(str(error), values)}") from error


def check_keys(values: Mapping[str, Any], struct: type[Struct], source: str, table: str = "") -> None:
    """Check the keys and the choices of a table and of the tables in it."""
    settings = {setting.name: setting for setting in settings_of(struct)}
    for key, value in values.items():
        if key not in settings:
            near = difflib.get_close_matches(key, settings, 1)
            hint = f"did you mean {table + near[0]!r}?" if near else f"known keys: {', '.join(settings)}"
            raise UsageError(f"unknown key {table + key!r} in {source}; {hint}")
        setting = settings[key]
        _check_choice(value, setting.plain, f"{source}: {table}{key}")
        if setting.table and isinstance(value, Mapping):
            check_keys(value, setting.plain, source, f"{table}{key}.")


def _check_choice(value: Any, kind: Any, where: str) -> None:
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        if value not in choices:
            raise UsageError(f"{where} = {value!r} must be one of: {', '.join(map(str, choices))}")
    elif get_origin(kind) is tuple and isinstance(value, list | tuple):
        for part in value:
            _check_choice(part, get_args(kind)[0], f"a part of {where}")


def _readable(problem: str, values: Any) -> str:
    """msgspec's error about `$.sandbox.limits.cpus` with the key and value that the user wrote."""
    problem, _, path = problem.partition(" - at `$")
    key = path.removeprefix(".").removesuffix("`")
    wrong = re.fullmatch(r"Expected `(.+)`, got `.+`", problem)
    if not key or not wrong:
        return f"{key}: {problem}" if key else problem
    types = " or ".join(TYPE_NAMES.get(name, name) for name in wrong[1].split(" | ") if name != "null")
    if "[...]" in key:  # a table with the user's own names, where other values may be secrets
        return f"all values of {key.partition('[')[0]} must be {types}"
    for part in re.findall(r"[^.\[\]]+", key):
        values = values[part] if isinstance(values, Mapping) else values[int(part)]
    return f"{key} = {values!r} must be {types}"


def from_file(file: Path, struct: type[Struct], table: str) -> dict[str, Any]:
    """Values of one table of a TOML file; its paths are relative to the file."""
    return with_paths(_read_toml(file, table), struct, file.parent)


def with_paths(values: Mapping[str, Any], struct: type[Struct], base: Path) -> dict[str, Any]:
    """The values with all paths made absolute, so that a run can be resumed from any directory."""
    paths = {key: str((base / values[key]).absolute()) for key in _texts(values, struct, PATH) if values[key]}
    targets = {key: absolute_target(values[key], base) for key in _texts(values, struct, TARGET)}
    return {**values, **paths, **targets}


def _texts(values: Mapping[str, Any], struct: type[Struct], marker: Any) -> list[str]:
    return [key for key in marked(struct, marker) if isinstance(values.get(key), str)]


def absolute_target(target: str, base: Path) -> str:
    """FILE.py:NAME with an absolute file; package.module:NAME as it is."""
    file, colon, name = target.rpartition(":")
    return f"{(base / file).absolute()}{colon}{name}" if file.endswith(".py") else target


def _read_toml(path: Path, table: str) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"there is no configuration file {path}") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    if extra := sorted(set(document) - {table}):
        raise UsageError(f"{path} has unknown top-level keys {extra}; everything goes under [{table}]")
    values = document.get(table, {})
    if not isinstance(values, dict):
        raise UsageError(f"{path}: {table} must be a table, [{table}], not {values!r}")
    return values
