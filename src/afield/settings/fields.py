"""Settings groups: structs whose fields carry docstrings, bounds and flag hints.

One field declares one setting. From it are generated the command-line flag, its help text, the row of
docs/reference/settings.md and, for shared groups, the key of veRL's `afield` block.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

import msgspec
from msgspec import NODEFAULT, Struct, StructMeta, structs


class Bound(Struct, frozen=True, kw_only=True):
    """Bound of a number, checked whenever a struct is built."""

    above: float | None = None
    """Exclusive lower bound."""
    at_least: float | None = None
    """Inclusive lower bound."""
    at_most: float = math.inf
    """Inclusive upper bound; infinity and NaN are refused in any case."""

    def error(self, value: float) -> str:
        """The violated bound in words; empty if `value` is within bounds."""
        if self.above is not None and not (self.above < value <= self.at_most and value < math.inf):
            if self.at_most < math.inf:
                return f"must be above {self.above:g} and at most {self.at_most:g}"
            return "must be positive" if self.above == 0 else f"must be above {self.above:g}"
        if self.at_least is not None and not (self.at_least <= value <= self.at_most and value < math.inf):
            if self.at_most < math.inf:
                return f"must be from {self.at_least:g} to {self.at_most:g}"
            return "must be 0 or positive" if self.at_least == 0 else f"must be at least {self.at_least:g}"
        return ""


class Metavar(Struct, frozen=True):
    """Placeholder of a flag's value in help texts."""

    name: str
    """Placeholder in capitals, such as DIR."""


class Marker(Struct, frozen=True):
    """Property of a setting that needs no value."""

    name: Literal["path", "target", "resumable"]
    """Property: `path`, `target` or `resumable`."""


PATH = Marker("path")
"""The value is a path; relative to the configuration file that names it."""
TARGET = Marker("target")
"""The value is FILE.py:NAME or package.module:NAME; the file is relative as a path is."""
RESUMABLE = Marker("resumable")
"""The value may change when a run is resumed."""

Positive = Annotated[float, Bound(above=0)]
NotNegative = Annotated[float, Bound(at_least=0)]
Count = Annotated[int, Bound(at_least=1)]
CountOrZero = Annotated[int, Bound(at_least=0)]
Port = Annotated[int, Bound(at_least=1, at_most=65535)]
FilePath = Annotated[str, Metavar("FILE"), PATH]
Target = Annotated[str, Metavar("FILE.py:NAME"), TARGET]
Url = Annotated[str, Metavar("URL")]


class SettingsMeta(StructMeta):
    """Metaclass of settings: a class with several groups as bases gets the fields of all of them.

    A Struct cannot inherit from several structs, so the fields are copied.
    """

    def __new__(
        mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any
    ) -> SettingsMeta:
        if len(bases) > 1:
            fields = {field.name: field for group in bases for field in structs.fields(group)}
            types = {name: field.type for name, field in fields.items()}
            namespace = {
                **{name: _declared(field) for name, field in fields.items() if not field.required},
                **namespace,
                "__annotations__": types | namespace.get("__annotations__", {}),
                "groups": bases,
            }
            bases = (SettingsGroup,)
        return super().__new__(mcls, name, bases, namespace, **options)


class SettingsGroup(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, metaclass=SettingsMeta):
    """A struct of settings that checks the bounds of its fields."""

    title: ClassVar[str] = ""
    """Heading of the group in --help and docs/reference/settings.md."""
    groups: ClassVar[tuple[type[SettingsGroup], ...]] = ()
    """Settings groups whose fields this class combines; empty for a single group."""

    def __post_init__(self) -> None:
        for name, bounds in _bounds(type(self)):
            value = getattr(self, name)
            if value is None:
                continue
            for bound in bounds:
                if error := bound.error(value):
                    text = f"{value:g}" if isinstance(value, float) else value
                    raise ValueError(f"{name} = {text} {error}")


def _declared(field: structs.FieldInfo) -> Any:
    if field.default is not NODEFAULT:
        return msgspec.field(default=field.default)
    return msgspec.field(default_factory=field.default_factory)


def values_of(settings: Any, group: type[Struct]) -> dict[str, Any]:
    """The values of one group among the fields of a combined struct, by name."""
    return {name: getattr(settings, name) for name in group.__struct_fields__}


class Setting(Struct, frozen=True, kw_only=True):
    """Setting as the generators of help and documentation see it."""

    name: str
    """Name of the field, which is the key in files."""
    type: Any
    """Annotated type."""
    default: Any
    """Default value, or NODEFAULT where one has to be given."""
    doc: str
    """Docstring in one line."""

    @property
    def help(self) -> str:
        """First sentence of the docstring, as help texts have it."""
        text = self.doc.partition(". ")[0].removesuffix(".").replace("`", "")
        return text[:1].lower() + text[1:] if text.partition(" ")[0].istitle() else text

    @property
    def flag(self) -> str:
        """Name of its command-line flag: without the unit of seconds, and in the singular for a mapping."""
        name = self.name.removesuffix("s") if self.mapping else self.name.removesuffix("_s")
        return f"--{name.replace('_', '-')}"

    @property
    def mapping(self) -> bool:
        """Whether it maps names of the user's own to values, given as repeated KEY=VALUE."""
        return get_origin(self.plain) is Mapping

    @property
    def plain(self) -> Any:
        """Type without None and without annotations."""
        return _plain(self.type)

    @property
    def choices(self) -> tuple[str, ...]:
        """Words that the value may be, or that its parts may be; empty if any."""
        inner = get_args(self.plain)[0] if get_origin(self.plain) is tuple else self.plain
        return get_args(inner) if get_origin(inner) is Literal else ()

    @property
    def table(self) -> bool:
        """Whether it is a table of settings, written [train.NAME] in files."""
        return is_table(self.plain)

    @property
    def metavar(self) -> str:
        names = [mark.name for mark in annotations_of(self.type) if isinstance(mark, Metavar)]
        if names:
            return names[0]
        if self.choices:
            word = f"{{{','.join(self.choices)}}}"
            return f"{word},..." if get_origin(self.plain) is tuple else word
        if self.name.endswith("_s"):
            return "SECONDS"
        return {int: "N", float: "X", str: "NAME"}.get(self.plain, "VALUE")


def is_table(kind: Any) -> bool:
    """Whether a type is a struct of settings."""
    return isinstance(kind, type) and issubclass(kind, Struct)


def settings_of(struct: type[Struct]) -> list[Setting]:
    """All settings of a struct, with their docstrings."""
    docs = _docs(struct)
    return [
        Setting(name=field.name, type=field.type, default=_default(field), doc=docs.get(field.name, ""))
        for field in structs.fields(struct)
    ]


def sections_of(struct: type[SettingsGroup]) -> Iterator[tuple[str, list[Setting]]]:
    """The settings of a combined struct by group title, in order; its own fields come first."""
    settings = {setting.name: setting for setting in settings_of(struct)}
    grouped: dict[str, str] = {}
    combined = next(
        (base for base in struct.__mro__ if "groups" in vars(base) and vars(base)["groups"]), None
    )
    for group in combined.groups if combined else ():
        grouped |= dict.fromkeys(group.__struct_fields__, group.title)
    titles = dict.fromkeys([struct.title, *grouped.values()])
    for title in titles:
        chosen = [s for name, s in settings.items() if grouped.get(name, struct.title) == title]
        if chosen:
            yield title, chosen


def marked(struct: type[Struct], marker: Marker) -> tuple[str, ...]:
    """Names of the fields that carry a marker."""
    return tuple(f.name for f in structs.fields(struct) if marker in annotations_of(f.type))


def annotations_of(kind: Any) -> list[Any]:
    """Bounds, markers and placeholders anywhere in a type."""
    if get_origin(kind) is Annotated:
        inner, *marks = get_args(kind)
        return [*marks, *annotations_of(inner)]
    return [
        mark for part in get_args(kind) if get_origin(kind) is not Literal for mark in annotations_of(part)
    ]


def _plain(kind: Any) -> Any:
    if get_origin(kind) is Annotated:
        return _plain(get_args(kind)[0])
    if get_origin(kind) in (tuple, Literal):
        return kind
    parts = [part for part in get_args(kind) if part is not type(None)]
    return _plain(parts[0]) if type(None) in get_args(kind) and len(parts) == 1 else kind


def _default(field: structs.FieldInfo) -> Any:
    return field.default if field.default_factory is NODEFAULT else field.default_factory()


@cache
def _bounds(struct: type[Struct]) -> list[tuple[str, list[Bound]]]:
    fields = [
        (field.name, [mark for mark in annotations_of(field.type) if isinstance(mark, Bound)])
        for field in structs.fields(struct)
    ]
    return [(name, bounds) for name, bounds in fields if bounds]


@cache
def _docs(struct: type[Struct]) -> dict[str, str]:
    """Docstrings of fields: those of its bases and groups, then its own."""
    docs: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        for group in vars(base).get("groups", ()):
            docs |= _docs(group)
        if issubclass(base, Struct):
            docs |= _source_docs(base.__module__).get(base.__name__, {})
    return docs


@cache
def _source_docs(module: str) -> dict[str, dict[str, str]]:
    """Attribute docstrings of a module's classes, read from its source; empty without a source."""
    import ast  # not needed by the many processes that only use the values

    file = getattr(sys.modules[module], "__file__", None)
    if file is None or not Path(file).is_file():
        return {}
    docs: dict[str, dict[str, str]] = {}
    for node in ast.parse(Path(file).read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ClassDef):
            continue
        docs[node.name] = {
            field.target.id: " ".join(text.value.value.split())
            for field, text in pairwise(node.body)
            if isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        }
    return docs
