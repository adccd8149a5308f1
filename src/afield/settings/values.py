"""Files and words to values of the right kind.

An unknown key is an error that suggests the nearest known one; a value of the wrong kind is told by its
key, with what would be right.
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
from msgspec import Struct, structs

from afield.errors import UsageError

T = TypeVar("T", bound=Struct)
PATHS = ("agent", "verifier", "model", "tasks", "val_tasks", "limiter_file")
TARGETS = ("agent", "verifier")
KINDS = {  # of values, for people
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
}


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Tables of both, key by key; elsewhere `above` counts."""
    both = dict(below)
    for key, value in above.items():
        tables = isinstance(value, Mapping) and isinstance(both.get(key), Mapping)
        both[key] = merged(both[key], value) if tables else value
    return both


def assigned(words: Sequence[str]) -> dict[str, Any]:
    """`KEY=VALUE` or `TABLE.KEY=VALUE`; a value is read as TOML has it, or is text."""
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


def converted(values: Mapping[str, Any], into: type[T], source: str) -> T:
    """Values to a Struct, every one checked. What is wrong is told by its key, with what would be right."""
    check_keys(values, into, source)
    try:
        return msgspec.convert(dict(values), into)
    except msgspec.ValidationError as error:
        raise UsageError(f"{source}: {_told(str(error), values)}") from error


def check_keys(values: Mapping[str, Any], into: type[Struct], source: str, table: str = "") -> None:
    """Keys, and words of which there are only a few, in all tables."""
    known = {field.name: field for field in structs.fields(into)}
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {table + near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            raise UsageError(f"unknown key {table + key!r} in {source}; {hint}")
        inner = known[key].type
        _check_words(value, inner, f"{source}: {table}{key}")
        if isinstance(inner, type) and issubclass(inner, Struct) and isinstance(value, Mapping):
            check_keys(value, inner, source, f"{table}{key}.")


def _check_words(value: Any, kind: Any, where: str) -> None:
    """A word of which there are only a few, or a list of such words."""
    if get_origin(kind) is Literal:
        words = get_args(kind)
        if value not in words:
            raise UsageError(f"{where} = {value!r} must be one of: {', '.join(map(str, words))}")
    elif get_origin(kind) is tuple and isinstance(value, list | tuple):
        for part in value:
            _check_words(part, get_args(kind)[0], f"a part of {where}")


def _told(problem: str, values: Any) -> str:
    """What msgspec says of `$.sandbox.limits.cpus`, in the words of who wrote sandbox.limits.cpus."""
    problem, _, where = problem.partition(" - at `$")
    key = where.removeprefix(".").removesuffix("`")
    wrong = re.fullmatch(r"Expected `(.+)`, got `.+`", problem)
    if not key or not wrong:
        return f"{key}: {problem}" if key else problem
    kinds = " or ".join(KINDS.get(kind, kind) for kind in wrong[1].split(" | ") if kind != "null")
    if "[...]" in key:  # of a table with names of the user's own, where the others may be secrets
        return f"all values of {key.partition('[')[0]} must be {kinds}"
    for part in re.findall(r"[^.\[\]]+", key):
        values = values[part] if isinstance(values, Mapping) else values[int(part)]
    return f"{key} = {values!r} must be {kinds}"


def from_file(file: Path, table: str = "train") -> dict[str, Any]:
    """One table; its paths count from where the file lies."""
    values = _read_toml(file, table)
    return values | {key: located(key, values[key], file.parent) for key in PATHS if key in values}


def located(key: str, value: Any, base: Path) -> Any:
    """A path made absolute, so that a run can be resumed from anywhere."""
    if not isinstance(value, str):
        return value
    if key not in TARGETS:
        return str((base / value).absolute()) if value else value
    place, colon, name = value.rpartition(":")
    return f"{(base / place).absolute()}{colon}{name}" if place.endswith(".py") else value


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
