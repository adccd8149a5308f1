"""Dockerfile reader: the steps that build an environment, with their lines.

`FROM` and `USER` have no effect: the base is this machine's system, and a sandbox has one user. Instructions
that describe how a container is started, such as `CMD`, have none either. Anything else that is not supported
is a UsageError with file and line.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct

from afield.errors import UsageError

IGNORED = ("CMD", "ENTRYPOINT", "EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "STOPSIGNAL", "USER")
HEREDOC = re.compile(r"<<(-?)([\"']?)([A-Za-z_][A-Za-z0-9_.]*)\2")
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:(:?[-+])([^}]*))?\})")
WORD_BREAK = " \t\n"


class Run(Struct, frozen=True, kw_only=True):
    """Step that runs a command."""

    line: int
    """Line of the instruction."""
    text: str
    """Instruction as written."""
    argv: tuple[str, ...]
    """Command line."""
    env: dict[str, str]
    """Environment variables of the command."""
    workdir: str
    """Working directory of the command."""


class Copy(Struct, frozen=True, kw_only=True):
    """Step that copies files of the build context, or inline text."""

    line: int
    """Line of the instruction."""
    text: str
    """Instruction as written."""
    sources: tuple[str, ...]
    """Patterns of paths in the build context."""
    inline: dict[str, str]
    """Text of inline files by name."""
    destination: str
    """Absolute path of the destination; a directory if it ends with a slash."""
    mode: int | None
    """File mode; None keeps that of each file."""
    unpack: bool
    """Whether local archives are unpacked, as by `ADD`."""


class MakeDirectory(Struct, frozen=True, kw_only=True):
    """Step that creates a directory."""

    line: int
    """Line of the instruction."""
    text: str
    """Instruction as written."""
    path: str
    """Absolute path."""


Step: TypeAlias = Run | Copy | MakeDirectory


class Build(Struct, frozen=True, kw_only=True):
    """Steps of a Dockerfile, and the settings of the environment they build."""

    file: Path
    """Dockerfile."""
    steps: tuple[Step, ...]
    """Steps in order."""
    workdir: str
    """Working directory at the end."""
    env: dict[str, str]
    """Environment variables set by `ENV`."""
    paths: tuple[str, ...]
    """Directories and files that the steps create."""


class _Instruction(Struct, frozen=True, kw_only=True):
    line: int
    name: str
    text: str
    flags: dict[str, str]
    heredocs: dict[str, str]


def read_dockerfile(file: Path, env: Mapping[str, str]) -> Build:
    """Read a Dockerfile; `env` are the variables of the base, such as PATH."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: cannot be read: {error}") from error
    return _Reader(file, env).read(text)


class _Reader:
    def __init__(self, file: Path, env: Mapping[str, str]) -> None:
        self._file = file
        self._base = dict(env)
        self._env: dict[str, str] = {}
        self._args: dict[str, str] = {}
        self._workdir = "/"
        self._shell = ["/bin/sh", "-c"]
        self._steps: list[Step] = []
        self._stages = 0

    def read(self, text: str) -> Build:
        for instruction in _instructions(self._file, text):
            self._add(instruction)
        if not self._stages:
            raise self._error(1, "there is no FROM")
        file_steps = [step for step in self._steps if not isinstance(step, Run)]
        paths = (step.destination if isinstance(step, Copy) else step.path for step in file_steps)
        return Build(
            file=self._file,
            steps=tuple(self._steps),
            workdir=self._workdir,
            env=self._env,
            paths=tuple(dict.fromkeys(path.rstrip("/") or "/" for path in paths)),
        )

    def _add(self, one: _Instruction) -> None:
        if one.name in IGNORED:
            return
        if not self._stages and one.name not in ("FROM", "ARG"):
            raise self._error(one.line, f"{one.name} before FROM")
        instructions: dict[str, Callable[[_Instruction], None]] = {
            "FROM": self._from,
            "ARG": lambda one: self._args.update(self._assignments(one, values_needed=False)),
            "ENV": lambda one: self._env.update(self._assignments(one, values_needed=True)),
            "WORKDIR": self._change_workdir,
            "VOLUME": self._volume,
            "SHELL": self._change_shell,
            "RUN": self._run,
            "COPY": self._copy,
            "ADD": self._copy,
        }
        if one.name not in instructions:
            raise self._error(one.line, f"{one.name} is not supported")
        instructions[one.name](one)

    def _from(self, one: _Instruction) -> None:
        self._stages += 1
        if self._stages > 1:
            raise self._error(one.line, "builds with several stages are not supported")

    def _change_workdir(self, one: _Instruction) -> None:
        self._workdir = self._path(one, " ".join(self._words(one)))
        self._steps.append(MakeDirectory(line=one.line, text=_excerpt(one), path=self._workdir))

    def _volume(self, one: _Instruction) -> None:
        for path in _json_list(one.text) or self._words(one):
            self._steps.append(MakeDirectory(line=one.line, text=_excerpt(one), path=self._path(one, path)))

    def _change_shell(self, one: _Instruction) -> None:
        self._shell = _json_list(one.text)
        if not self._shell:
            raise self._error(one.line, "SHELL takes a JSON list of words")

    def _run(self, one: _Instruction) -> None:
        if one.flags:
            raise self._error(one.line, f"RUN --{next(iter(one.flags))} is not supported")
        argv = _json_list(one.text)
        if not argv:
            script = one.text
            if one.heredocs and HEREDOC.fullmatch(one.text.strip()):
                script = next(iter(one.heredocs.values()))
            elif one.heredocs:
                bodies = (f"{body}{name}\n" for name, body in one.heredocs.items())
                script = f"{one.text}\n{''.join(bodies)}"
            argv = [*self._shell, script]
        env = {**self._args, **self._env}
        self._steps.append(
            Run(line=one.line, text=_excerpt(one), argv=tuple(argv), env=env, workdir=self._workdir)
        )

    def _copy(self, one: _Instruction) -> None:
        if unknown := one.flags.keys() - {"chown", "chmod", "link"}:
            raise self._error(one.line, f"{one.name} --{min(unknown)} is not supported")
        words = _json_list(one.text) or self._words(one)
        if len(words) < 2:
            raise self._error(one.line, f"{one.name} needs a source and a destination")
        *sources, destination = words
        for source in sources:
            if re.match(r"[a-z+]+://|git@", source):
                raise self._error(one.line, f"{one.name} of {source!r}: there is no network")
            if ".." in source.split("/"):
                raise self._error(one.line, f"{one.name} of {source!r}: it is outside the build context")
        path = self._path(one, destination)
        if destination.endswith(("/", "/.", "/..")) or destination in (".", "..") or len(sources) > 1:
            path = f"{path.rstrip('/')}/"
        mode = one.flags.get("chmod")
        if mode is not None and not re.fullmatch(r"0?[0-7]{3}", mode):
            raise self._error(one.line, f"--chmod={mode}: give three octal digits")
        self._steps.append(
            Copy(
                line=one.line,
                text=_excerpt(one),
                sources=tuple(source for source in sources if not source.startswith("<<")),
                inline=one.heredocs,
                destination=path,
                mode=None if mode is None else int(mode, 8),
                unpack=one.name == "ADD",
            )
        )

    def _path(self, one: _Instruction, path: str) -> str:
        if not path:
            raise self._error(one.line, f"{one.name} needs a path")
        return posixpath.normpath(posixpath.join(self._workdir, path)).replace("//", "/")

    def _assignments(self, one: _Instruction, *, values_needed: bool) -> Iterator[tuple[str, str]]:
        first, _, rest = one.text.partition(" ")
        if "=" not in first and rest and values_needed:  # ENV NAME VALUE
            yield first, self._expand(one, rest.strip())
            return
        for word in self._words(one):
            name, equals, value = word.partition("=")
            if not equals and values_needed:
                raise self._error(one.line, f"{one.name} {word}: write NAME=VALUE")
            if equals:
                yield name, value

    def _words(self, one: _Instruction) -> list[str]:
        """Words of an instruction, without quotes and with variables replaced."""
        words: list[str] = []
        word, quote, open_word, i, text = "", "", False, 0, one.text
        while i < len(text):
            char = text[i]
            if char == "\\" and quote != "'" and i + 1 < len(text):
                word, open_word, i = word + text[i + 1], True, i + 2
            elif char in "\"'" and quote in ("", char):
                quote, open_word, i = ("" if quote else char), True, i + 1
            elif char == "$" and quote != "'" and (match := VARIABLE.match(text, i)):
                word, open_word, i = word + self._value(match), True, match.end()
            elif char in WORD_BREAK and not quote:
                if open_word:
                    words.append(word)
                word, open_word, i = "", False, i + 1
            else:
                word, open_word, i = word + char, True, i + 1
        if quote:
            raise self._error(one.line, f"{one.name} has an open quote {quote}")
        return [*words, word] if open_word else words

    def _expand(self, one: _Instruction, text: str) -> str:
        return VARIABLE.sub(self._value, text)

    def _value(self, match: re.Match[str]) -> str:
        name, operator, other = match[1] or match[2], match[3] or "", match[4] or ""
        value = {**self._base, **self._args, **self._env}.get(name)
        present = value is not None if not operator.startswith(":") else bool(value)
        if operator.endswith("-"):
            return value or "" if present else other
        if operator.endswith("+"):
            return other if present else ""
        return value or ""

    def _error(self, line: int, problem: str) -> UsageError:
        return UsageError(f"{self._file}:{line}: {problem}; use an image of the environment and a container")


def _instructions(file: Path, text: str) -> Iterator[_Instruction]:
    lines = iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            if re.match(r"#\s*escape\s*=\s*[^\\\s]", line.strip()):
                raise UsageError(f"{file}:{number}: another escape character than \\ is not supported")
            continue
        name, _, rest = _joined(line, lines).partition(" ")
        name, rest, flags = name.upper(), rest.strip(), {}
        while match := re.match(r"--([a-z-]+)(?:=(\S+))?\s*", rest):
            flags[match[1]], rest = match[2] or "", rest[match.end() :]
        heredocs: dict[str, str] = {}
        if name in ("RUN", "COPY", "ADD"):
            for dash, _, end in HEREDOC.findall(rest):
                body = _heredoc(lines, end, tabs=not dash)
                if body is None:
                    raise UsageError(f"{file}:{number}: the text after <<{end} has no end")
                heredocs[end] = body
        yield _Instruction(line=number, name=name, text=rest, flags=flags, heredocs=heredocs)


def _joined(line: str, lines: Iterator[tuple[int, str]]) -> str:
    """Instruction of a line and those that continue it, without comments and empty lines between them."""
    parts = [line.strip()]
    while parts[-1].endswith("\\"):
        parts[-1] = parts[-1].removesuffix("\\")
        following = (text.rstrip() for _, text in lines)
        parts.append(next((t for t in following if t.strip() and not t.lstrip().startswith("#")), ""))
    return " ".join(parts).strip()


def _heredoc(lines: Iterator[tuple[int, str]], end: str, *, tabs: bool) -> str | None:
    """Text up to the line `end`, without leading tabs unless `tabs`; None if there is no such line."""
    body: list[str] = []
    for _, line in lines:
        text = line if tabs else line.lstrip("\t")
        if text == end:
            return "".join(body)
        body.append(f"{text}\n")
    return None


def _json_list(text: str) -> list[str]:
    """Words of the exec form; empty if the text is not one."""
    if not text.startswith("["):
        return []
    try:
        words = json.loads(text)
    except ValueError:
        return []
    return words if isinstance(words, list) and all(isinstance(word, str) for word in words) else []


def _excerpt(one: _Instruction) -> str:
    text = f"{one.name} {one.text}"
    return text if len(text) <= 80 else f"{text[:77]}..."
