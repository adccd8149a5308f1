"""Names in src: classes exist once, modules say in a few words what they are."""

from __future__ import annotations

import re
from collections import defaultdict

from support.paths import ROOT

SOURCES = sorted((ROOT / "src" / "afield").rglob("*.py"))
CLASS = re.compile(r"^class (\w+)", re.MULTILINE)
SUMMARY = re.compile(r'\A"""(.*)$', re.MULTILINE)
WORDS = 12


def test_each_class_name_exists_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in SOURCES:
        for name in CLASS.findall(path.read_text()):
            places[name].append(str(path.relative_to(ROOT)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_first_lines_of_modules_are_short() -> None:
    lines = {str(path.relative_to(ROOT)): SUMMARY.match(path.read_text()) for path in SOURCES}
    assert {path: line[1] for path, line in lines.items() if line and len(line[1].split()) > WORDS} == {}
