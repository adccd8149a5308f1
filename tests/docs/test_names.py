"""Names and docstrings in src: classes exist once, and modules, fields and functions are described."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

from support.paths import ROOT

SOURCES = sorted((ROOT / "src" / "afield").rglob("*.py"))
CLASS = re.compile(r"^class (\w+)", re.MULTILINE)
SUMMARY = re.compile(r'\A"""(.*)$', re.MULTILINE)
WORDS = 12
VAGUE = {"What", "Who", "Whoever", "Which", "One", "Those"}
"""First words that leave out the noun which a docstring is about."""


@cache
def modules() -> dict[str, ast.Module]:
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in SOURCES}


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for path, module in modules().items():
        yield from ((path, node) for node in ast.walk(module) if isinstance(node, ast.ClassDef))


def structs() -> set[str]:
    """Names of the struct classes, also of those that inherit from another one."""
    bases = {
        node.name: {re.split(r"\W", ast.unparse(base))[-1] for base in node.bases} for _, node in classes()
    }
    names, more = {"Struct"}, True
    while more:
        more = {name for name, above in bases.items() if name not in names and above & names}
        names |= more
    return names


def is_text(node: ast.AST | None) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def test_each_class_name_exists_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in SOURCES:
        for name in CLASS.findall(path.read_text()):
            places[name].append(str(path.relative_to(ROOT)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_first_lines_of_modules_are_short() -> None:
    lines = {str(path.relative_to(ROOT)): SUMMARY.match(path.read_text()) for path in SOURCES}
    assert {path: line[1] for path, line in lines.items() if line and len(line[1].split()) > WORDS} == {}


def test_modules_with_code_have_a_first_line() -> None:
    bare = [path for path, module in modules().items() if module.body and not ast.get_docstring(module)]
    assert bare == []


def test_fields_of_public_structs_have_docstrings() -> None:
    names, bare = structs(), []
    for path, node in classes():
        if node.name not in names or node.name.startswith("_"):
            continue
        for field, after in zip(node.body, [*node.body[1:], None], strict=True):
            if not isinstance(field, ast.AnnAssign) or "ClassVar" in ast.unparse(field.annotation):
                continue
            name = ast.unparse(field.target)
            if not name.startswith("_") and not is_text(after):
                bare.append(f"{path}: {node.name}.{name}")
    assert bare == []


def test_docstrings_begin_with_a_noun_or_verb() -> None:
    vague = [
        f"{path}:{node.lineno}: {node.value.value.splitlines()[0]}"
        for path, module in modules().items()
        for node in ast.walk(module)
        if is_text(node) and re.split(r"\W", node.value.value.lstrip(), maxsplit=1)[0] in VAGUE
    ]
    assert vague == []
