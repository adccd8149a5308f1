"""Values of settings from files, variables and words, checked.

An unknown key is an error that suggests the nearest known one; a value of the wrong type is an error that
names its key, the right type, and its source: flag, environment variable, or line of a file.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
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


class SettingsLayer(Struct, frozen=True):
    """Values of one source: the command line, the environment, or a file."""

    values: Mapping[str, Any]
    """Values by key; tables are mappings."""
    origin: Callable[[str], str]
    """Names the source of a dotted key: `--steps`, `AFIELD_TRAIN_STEPS` or `run.toml:3`."""


class SettingsLayers(Struct, frozen=True):
    """Values of several sources; later ones win."""

    layers: tuple[SettingsLayer, ...]
    """Sources from the lowest precedence to the highest."""

    @property
    def values(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for layer in self.layers:
            values = merged(values, layer.values)
        return values

    def origin(self, key: str) -> str:
        """Source of a dotted key: the highest that has it, or a part of its table."""
        for depth in range(key.count(".") + 1, 0, -1):
            parts = key.split(".")[:depth]
            for layer in reversed(self.layers):
                if _has(layer.values, parts):
                    return layer.origin(key)
        return self.layers[-1].origin(key) if self.layers else "the settings"


def _has(values: Any, parts: Sequence[str]) -> bool:
    for part in parts:
        if not isinstance(values, Mapping) or part not in values:
            return False
        values = values[part]
    return True


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both mappings as one; `above` wins, except that tables are merged key by key."""
    both = dict(below)
    for key, value in above.items():
        tables = isinstance(value, Mapping) and isinstance(both.get(key), Mapping)
        both[key] = merged(both[key], value) if tables else value
    return both


def assigned(words: Sequence[str], flag: str = "--set") -> dict[str, Any]:
    """Values of `KEY=VALUE` and `TABLE.KEY=VALUE`; a value is TOML, or else text."""
    values: dict[str, Any] = {}
    for word in words:
        key, sign, text = word.partition("=")
        if not sign or not key:
            raise UsageError(f"{flag} {word!r} must be KEY=VALUE or TABLE.KEY=VALUE")
        value: Any = text
        with suppress(tomllib.TOMLDecodeError):
            value = tomllib.loads(f"value = {text}")["value"]
        for part in reversed(key.split(".")):
            value = {part: value}
        values = merged(values, value)
    return values


Source = str | Callable[[str], str]
"""Origin of values in errors: one name, or a function from dotted key to name."""


def converted(values: Mapping[str, Any], struct: type[T], source: Source) -> T:
    """The values as a struct, every one checked; `source` names their origin in errors."""
    check_keys(values, struct, source)
    try:
        return msgspec.convert(dict(values), struct)
    except msgspec.ValidationError as error:
        key, problem = _readable(str(error), values)
        raise UsageError(f"{_origin(source, key)}: {problem}") from error


def _origin(source: Source, key: str) -> str:
    return source if isinstance(source, str) else source(key)


def check_keys(values: Mapping[str, Any], struct: type[Struct], source: Source, table: str = "") -> None:
    """Check the keys and the choices of a table and of the tables in it."""
    settings = {setting.name: setting for setting in settings_of(struct)}
    for key, value in values.items():
        origin = _origin(source, table + key)
        if key not in settings:
            near = difflib.get_close_matches(key, settings, 1)
            hint = f"did you mean {table + near[0]!r}?" if near else f"known keys: {', '.join(settings)}"
            raise UsageError(f"unknown key {table + key!r} in {origin}; {hint}")
        setting = settings[key]
        _check_choice(value, setting.plain, f"{origin}: {table}{key}")
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


def _readable(problem: str, values: Any) -> tuple[str, str]:
    """Key, and msgspec's error about `$.sandbox.limits.cpus` with the value that the user wrote."""
    problem, _, path = problem.partition(" - at `$")
    key = path.removeprefix(".").removesuffix("`")
    wrong = re.fullmatch(r"Expected `(.+)`, got `.+`", problem)
    if not key or not wrong:
        # A check of the struct begins with the name of its field.
        field = re.match(r"\w+", problem)
        inner = ".".join(part for part in (key, field[0] if field else "") if part)
        return inner, f"{key}: {problem}" if key else problem
    types = " or ".join(TYPE_NAMES.get(name, name) for name in wrong[1].split(" | ") if name != "null")
    if "[...]" in key:  # a table with the user's own names, where other values may be secrets
        table = key.partition("[")[0]
        return table, f"all values of {table} must be {types}"
    for part in re.findall(r"[^.\[\]]+", key):
        values = values[part] if isinstance(values, Mapping) else values[int(part)]
    return key, f"{key} = {values!r} must be {types}"


def parsed(text: str, kind: Any, source: str) -> Any:
    """Value of a variable as its type needs it: text as it is, lists and tables as JSON or TOML.

    A list may also be words with commas between them.
    """
    if kind is str:
        return text
    if text[:1] in ("[", "{"):
        try:
            return json.loads(text)
        except ValueError as error:
            with suppress(tomllib.TOMLDecodeError):
                return tomllib.loads(f"value = {text}")["value"]
            raise UsageError(f"{source} is not valid JSON: {error}") from error
    if get_origin(kind) is tuple:
        return [word.strip() for word in text.split(",") if word.strip()]
    with suppress(tomllib.TOMLDecodeError):
        return tomllib.loads(f"value = {text}")["value"]
    return text


def from_file(file: Path, struct: type[Struct], table: str) -> dict[str, Any]:
    """Values of one table of a TOML file; its paths are relative to the file."""
    return dict(file_layer(file, struct, table).values)


def file_layer(file: Path, struct: type[Struct], table: str) -> SettingsLayer:
    """Table of a TOML file as a source that names lines."""
    text, values = _read_toml(file, table)

    def origin(key: str) -> str:
        return f"{file}:{line_of(text, [table, *re.split(r'[.[]', key)])}"

    return SettingsLayer(with_paths(values, struct, file.parent), origin)


def line_of(text: str, keys: list[str]) -> int:
    """Line of a key in a TOML document; that of its table, or 1, if it is not found."""
    table: list[str] = []
    best, depth = 1, 0
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if header := re.fullmatch(r"\[\[?\s*([^\]]+?)\s*\]\]?\s*(?:#.*)?", stripped):
            table = [part.strip().strip("\"'") for part in header[1].split(".")]
            path = table
        elif assignment := re.match(r"([A-Za-z0-9_.\"'\s-]+?)\s*=", stripped):
            path = [*table, *(part.strip().strip("\"'") for part in assignment[1].split("."))]
        else:
            continue
        if len(path) > depth and keys[: len(path)] == path:
            best, depth = number, len(path)
    return best


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


def _read_toml(path: Path, table: str) -> tuple[str, dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
        document = tomllib.loads(text)
    except FileNotFoundError as error:
        raise UsageError(f"there is no configuration file {path}") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    if extra := sorted(set(document) - {table}):
        raise UsageError(f"{path} has unknown top-level keys {extra}; everything goes under [{table}]")
    values = document.get(table, {})
    if not isinstance(values, dict):
        raise UsageError(f"{path}: {table} must be a table, [{table}], not {values!r}")
    return text, values
