"""Images of the local server: names that stand for local programs.

1. `NAME=app.py` runs a file unchanged; it serves port 8080, as `BedrockAgentCoreApp().run()` does.
2. `NAME=file.py:agent` serves a function with afield's SDK.
3. `NAME=command words` runs any command.

A container URI selects the image that is named like the whole URI, its repository with tag, or its
repository.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from msgspec import Struct

from afield.agentcore_local.errors import invalid
from afield.agentcore_local.requests import ECR, Artifact, CodeConfiguration
from afield.errors import UsageError

TARGET = re.compile(r"^[\w./-]+:[A-Za-z_]\w*$")


class AgentImage(Struct, frozen=True, kw_only=True):
    """Program behind an image name: exactly one of `target`, `script` and `argv`."""

    target: str = ""
    """`file.py:name` or `package.module:name`, served with afield's SDK; empty for none."""
    script: str = ""
    """Absolute path of a Python file that runs as `__main__`; empty for none."""
    argv: tuple[str, ...] = ()
    """Command line; empty for none."""

    def __str__(self) -> str:
        return self.target or self.script or shlex.join(self.argv)


def parse(spec: str) -> tuple[str, AgentImage]:
    """Parse NAME=PROGRAM; raises UsageError if it is invalid or the file does not exist."""
    name, equals, program = spec.partition("=")
    if not equals or not name or not program.strip():
        raise UsageError(f"--image {spec!r} must be NAME=app.py, NAME=file.py:agent or NAME=command ...")
    return name, _image(spec, program.strip())


def _image(spec: str, program: str) -> AgentImage:
    if TARGET.match(program):
        host, _, name = program.rpartition(":")
        if not host.endswith(".py"):
            return AgentImage(target=program)
        return AgentImage(target=f"{_file(spec, host)}:{name}")
    try:
        words = shlex.split(program)
    except ValueError as error:
        raise UsageError(f"--image {spec!r} is not a command line: {error}") from error
    if len(words) == 1 and words[0].endswith(".py"):
        return AgentImage(script=_file(spec, words[0]))
    return AgentImage(argv=tuple(words))


def _file(spec: str, path: str) -> str:
    if not Path(path).is_file():
        raise UsageError(f"--image {spec!r}: there is no file {path}")
    return str(Path(path).resolve())


def parse_all(specs: Iterable[str]) -> dict[str, AgentImage]:
    images: dict[str, AgentImage] = {}
    for spec in specs:
        name, image = parse(spec)
        if images.setdefault(name, image) != image:
            raise UsageError(f"--image {name} is given twice with different programs; keep one")
    return images


def image_of(artifact: Artifact, images: Mapping[str, AgentImage], code_root: Path | None) -> AgentImage:
    """Image of an artifact; raises the ValidationException if the image or file does not exist."""
    if artifact.code_configuration is not None:
        return _code(artifact.code_configuration, code_root)
    assert artifact.container_configuration is not None
    uri = artifact.container_configuration.container_uri
    field = "agentRuntimeArtifact.containerConfiguration.containerUri"
    match = ECR.match(uri)
    if match is None and uri not in images:
        raise invalid(
            field, f"{uri!r} is neither an ECR image URI nor a --image of this server: {_names(images)}"
        )
    repository, tag = (match[5], match[6] or "latest") if match else (uri, "")
    for name in (uri, f"{repository}:{tag}", repository):
        if name in images:
            return images[name]
    raise invalid(field, f"the image {uri!r} does not exist here; this server has: {_names(images)}")


def _names(images: Mapping[str, AgentImage]) -> str:
    return ", ".join(sorted(images)) or "none (give --image)"


def _code(code: CodeConfiguration, root: Path | None) -> AgentImage:
    field = "agentRuntimeArtifact.codeConfiguration"
    if root is None:
        raise invalid(
            field, "this server was started without --code-root, the folder that stands for the code"
        )
    if code.runtime.startswith("NODE"):
        raise invalid(f"{field}.runtime", f"this local server does not model {code.runtime}")
    *wrapper, last = code.entry_point
    path = (root / last).resolve()
    if not path.is_relative_to(root.resolve()) or not path.is_file():
        raise invalid(f"{field}.entryPoint", f"there is no file {last!r} in the --code-root")
    if wrapper:  # such as ["opentelemetry-instrument", "main.py"]
        return AgentImage(argv=(wrapper[0], sys.executable, str(path)))
    return AgentImage(script=str(path))
