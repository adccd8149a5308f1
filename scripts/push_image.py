"""Builds an agent's image and pushes it to ECR, for AgentCore or any other place that runs containers.

    cp .env.example .env            # and fill it in
    python scripts/push_image.py --dry-run examples/strands-math
    python scripts/push_image.py examples/strands-math

Refuses to push into an account that is not the one in the file. Running it again is harmless. It needs the
aws command, and docker with buildx; a dry run needs neither and runs nothing.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NAME = r"[a-z0-9]+(?:[._-][a-z0-9]+)*"
PLATFORMS = ("linux/arm64", "linux/amd64")
SHAPES = {
    "AWS_REGION": (r"[a-z]{2,3}(-[a-z]+)+-\d+", "a region, such as us-west-2"),
    "ACCOUNT_ID": (r"\d{12}", "the twelve digits of an AWS account"),
    "REPOSITORY": (rf"(?=.{{2,256}}$){NAME}(/{NAME})*", "lower case letters, digits and ._-/"),
    "TAG": (r"\w[\w.-]{0,127}", "letters, digits and ._-, at most 128"),
    "PLATFORM": (rf"({'|'.join(PLATFORMS)})(,({'|'.join(PLATFORMS)}))*", " or ".join(PLATFORMS)),
}
DEFAULTS = {"PLATFORM": PLATFORMS[0]}


class Refused(Exception):
    """Something is wrong, said in one line."""


@dataclass(frozen=True)
class Target:
    region: str
    account: str
    repository: str
    tag: str
    platform: str

    @property
    def registry(self) -> str:
        china = ".cn" if self.region.startswith("cn-") else ""
        return f"{self.account}.dkr.ecr.{self.region}.amazonaws.com{china}"

    @property
    def uri(self) -> str:
        return f"{self.registry}/{self.repository}:{self.tag}"


def read(file: Path, tag: str | None = None) -> Target:
    """The values of a .env file, every one checked; `tag` replaces its TAG. Nothing in it is executed."""
    if not file.is_file():
        raise Refused(f"there is no {file}: copy .env.example to it and fill it in, or give one with --env")
    values = dict(DEFAULTS)
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not (line := line.strip().removeprefix("export ")) or line.startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals or name.strip() not in SHAPES:
            raise Refused(f"{file}, line {number}: expected NAME=VALUE with one of {', '.join(SHAPES)}")
        values[name.strip()] = value.strip().strip("\"'")
    if tag is not None:
        values["TAG"] = tag
    if missing := [name for name in SHAPES if not values.get(name)]:
        raise Refused(f"{file} does not say {', '.join(missing)}; .env.example shows how")
    for name, (shape, rule) in SHAPES.items():
        if not re.fullmatch(shape, values[name], re.ASCII):
            where = "--tag" if name == "TAG" and tag is not None else f"{file}: {name}"
            raise Refused(f"{where} = {values[name]!r} must be {rule}")
    return Target(*(values[name] for name in SHAPES))


class Runner:
    """Runs commands, or only prints them."""

    def __init__(self, dry: bool) -> None:
        self.dry = dry

    def __call__(
        self, *command: str, stdin: str | None = None, before: str | None = "", may_fail: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """A command whose output is read. `before` is shown before it; with None nothing is."""
        if before is not None:
            self.show(*command, before=before)
        if self.dry:
            return subprocess.CompletedProcess(command, 0, "", "")
        done = self._run(command, input=stdin, capture_output=True, text=True)
        if done.returncode and not may_fail:
            raise Refused(f"{shlex.join(command)} failed: {done.stderr.strip()}")
        return done

    def openly(self, *command: str) -> None:
        """A command whose output is for the user."""
        self.show(*command)
        if not self.dry and self._run(command).returncode:
            raise Refused(f"{shlex.join(command[:3])} failed; see above")

    def show(self, *command: str, before: str = "", note: str = "") -> None:
        print(f"$ {before}{shlex.join(command)}{note}", flush=True)

    def _run(self, command: tuple[str, ...], **how: Any) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(command, **how)
        except FileNotFoundError as error:
            raise Refused(f"{command[0]} is not installed, or not on PATH") from error


def check_identity(run: Runner, target: Target) -> None:
    query = ("aws", "sts", "get-caller-identity", "--query", "Account", "--output", "text")
    account = run(*query, "--region", target.region).stdout.strip()
    if not run.dry and account != target.account:
        raise Refused(
            f"these credentials belong to account {account!r}, not to ACCOUNT_ID {target.account};"
            " choose others with AWS_PROFILE, or correct the file"
        )


def ensure_repository(run: Runner, target: Target) -> None:
    where = ("--region", target.region)
    query = ("aws", "ecr", "describe-repositories", "--repository-names", target.repository, *where)
    make = ("aws", "ecr", "create-repository", "--repository-name", target.repository, *where)
    description = run(*query, may_fail=True)
    if run.dry:
        run.show(*make, note="  # if it is not there")
    elif description.returncode and "RepositoryNotFoundException" in description.stderr:
        run(*make)
    elif description.returncode:
        raise Refused(f"{shlex.join(query)} failed: {description.stderr.strip()}")


def push(run: Runner, target: Target, folder: Path, dockerfile: Path) -> None:
    check_identity(run, target)
    ensure_repository(run, target)
    query = ("aws", "ecr", "get-login-password", "--region", target.region)
    password = run(*query, before=None).stdout
    login = ("docker", "login", "--username", "AWS", "--password-stdin", target.registry)
    run(*login, stdin=password, before=f"{shlex.join(query)} | ")
    run.openly(
        *("docker", "buildx", "build", "--platform", target.platform, "--build-context", f"afield={ROOT}"),
        # AgentCore wants an image, not an index with attestations.
        *("--provenance=false", "--file", str(dockerfile), "--tag", target.uri, "--push", str(folder)),
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="build context of the agent's image")
    parser.add_argument(
        "--dockerfile", type=Path, metavar="FILE", help="default: Dockerfile in the build context"
    )
    parser.add_argument("--tag", metavar="TAG", help="tag of the image; default: TAG in the .env file")
    parser.add_argument("--env", type=Path, default=Path(".env"), metavar="FILE", help="default: .env")
    parser.add_argument("--dry-run", action="store_true", help="print every command and run none")
    arguments = parser.parse_args()
    try:
        target = read(arguments.env, arguments.tag)
        dockerfile = arguments.dockerfile or arguments.folder / "Dockerfile"
        if arguments.dockerfile and not dockerfile.is_file():
            raise Refused(f"there is no file {dockerfile}")
        if not dockerfile.is_file():
            raise Refused(
                f"there is no Dockerfile in {arguments.folder}; name another file with --dockerfile"
            )
        push(Runner(arguments.dry_run), target, arguments.folder, dockerfile)
    except Refused as error:
        print(f"push_image: {error}", file=sys.stderr)
        return 2
    print(f"{'would push' if arguments.dry_run else 'pushed'} {target.uri}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
