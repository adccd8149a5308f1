"""Dockerfile reader: steps with their lines, variables, and errors for what is not supported."""

from __future__ import annotations

from pathlib import Path

import pytest

from afield.datasets.dockerfile import Build, Copy, MakeDirectory, Run, read_dockerfile
from afield.errors import UsageError


def read(folder: Path, text: str) -> Build:
    (folder / "Dockerfile").write_text(text)
    return read_dockerfile(folder / "Dockerfile", {"PATH": "/usr/bin"})


def test_steps_have_variables_replaced_and_lines_joined(tmp_path):
    build = read(
        tmp_path,
        """# syntax=docker/dockerfile:1
ARG BASE=ubuntu
FROM ${BASE}:24.04
ENV A=1 B="two words" C='$A' D=${MISSING:-default}${A:+set}
ENV OLD value with ${A:+set}
ENV PATH=/opt/bin:$PATH
ARG COUNT=3
WORKDIR /srv
workdir work/$A
RUN echo one && \\
    # a comment

    echo two
RUN ["sh", "-c", "true"]
RUN <<EOF
first
second
EOF
RUN cat <<-'X' > file
\tindented
\tX
COPY --chown=1:1 --chmod=755 a.txt "b c.txt" ./
COPY a.txt renamed.txt
COPY <<TEXT /inline.txt
hello $A
TEXT
ADD src.tar.gz /src
VOLUME ["/data"]
LABEL x=y
CMD ["sleep"]
""",
    )
    assert build.env == {
        "A": "1",
        "B": "two words",
        "C": "$A",
        "D": "default",
        "OLD": "value with set",
        "PATH": "/opt/bin:/usr/bin",
    }
    assert build.workdir == "/srv/work/1"
    directories = [step for step in build.steps if isinstance(step, MakeDirectory)]
    assert [step.path for step in directories] == ["/srv", "/srv/work/1", "/data"]
    runs = [step for step in build.steps if isinstance(step, Run)]
    assert [(step.line, step.argv) for step in runs] == [
        (10, ("/bin/sh", "-c", "echo one &&      echo two")),
        (14, ("sh", "-c", "true")),
        (15, ("/bin/sh", "-c", "first\nsecond\n")),
        (19, ("/bin/sh", "-c", "cat <<-'X' > file\nindented\nX\n")),
    ]
    assert runs[0].env["COUNT"] == "3"
    assert runs[0].workdir == "/srv/work/1"
    copies = [step for step in build.steps if isinstance(step, Copy)]
    assert [(step.sources, step.destination, step.mode) for step in copies] == [
        (("a.txt", "b c.txt"), "/srv/work/1/", 0o755),
        (("a.txt",), "/srv/work/1/renamed.txt", None),
        ((), "/inline.txt", None),
        (("src.tar.gz",), "/src", None),
    ]
    assert copies[2].inline == {"TEXT": "hello $A\n"}
    assert copies[3].unpack
    assert build.paths == ("/srv", "/srv/work/1", "/srv/work/1/renamed.txt", "/inline.txt", "/src", "/data")


REFUSED = {
    "stages": ("FROM a AS b\nFROM c\n", ":2: builds with several stages"),
    "stage": ("FROM a\nCOPY --from=b /x /y\n", ":2: COPY --from is not supported"),
    "mount": ("FROM a\n\nRUN --mount=type=cache x\n", ":3: RUN --mount is not supported"),
    "address": ("FROM a\nADD https://example.org/x /x\n", ":2: ADD of 'https://example.org/x': there is no"),
    "context": ("FROM a\nCOPY ../tests /x\n", ":2: COPY of '../tests': it is outside"),
    "trigger": ("FROM a\nONBUILD RUN x\n", ":2: ONBUILD is not supported"),
    "typo": ("FROM a\nRUM x\n", ":2: RUM is not supported"),
    "order": ("WORKDIR /x\nFROM a\n", ":1: WORKDIR before FROM"),
    "no base": ("# nothing\n", ":1: there is no FROM"),
    "quote": ('FROM a\nENV A="x\n', ":2: ENV has an open quote"),
    "heredoc": ("FROM a\nRUN <<EOF\nx\n", ":2: the text after <<EOF has no end"),
    "mode": ("FROM a\nCOPY --chmod=u+x a /b\n", ":2: --chmod=u\\+x"),
    "words": ("FROM a\nCOPY a\n", ":2: COPY needs a source and a destination"),
    "escape": ("# escape=`\nFROM a\n", ":1: another escape character"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_instruction_that_is_not_supported_is_named_with_its_line(tmp_path, case):
    text, message = REFUSED[case]
    with pytest.raises(UsageError, match=f"Dockerfile{message}"):
        read(tmp_path, text)
