"""`scripts/push_image.py` with an `aws` and a `docker` on PATH that are small programs of ours.

They write down how they were called and answer as the real ones do. No image is built here.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT

SCRIPT = ROOT / "scripts" / "push_image.py"
VALUES = {
    "AWS_REGION": "eu-central-1",
    "ACCOUNT_ID": "123456789012",
    "REPOSITORY": "afield/math",
    "TAG": "v1",
    "PLATFORM": "linux/arm64",
}
REGISTRY = "123456789012.dkr.ecr.eu-central-1.amazonaws.com"
AWS = """#!/bin/sh
echo "aws $*" >> "$CALLS"
case "$1 $2" in
  "sts get-caller-identity") echo "$ACCOUNT" ;;
  "ecr describe-repositories")
    [ -n "$TROUBLE" ] && { echo "$TROUBLE" >&2; exit 254; }
    [ -e "$CALLS.repository" ] && exit 0
    echo "An error occurred (RepositoryNotFoundException): no such repository" >&2; exit 254 ;;
  "ecr create-repository") touch "$CALLS.repository" ;;
  "ecr get-login-password") echo "a-password" ;;
  *) echo "aws knows no $1 $2" >&2; exit 252 ;;
esac
"""
DOCKER = """#!/bin/sh
echo "docker $*" >> "$CALLS"
[ "$1" = login ] && { read -r given; [ "$given" = a-password ] || { echo "bad password" >&2; exit 1; }; }
[ "$1" = buildx ] && [ -n "$BUILD_FAILS" ] && exit 1
exit 0
"""


class Place:
    """A folder with an agent, a .env, and the two programs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = folder / "calls"
        self.programs = folder / "bin"
        self.programs.mkdir(parents=True)
        for name, text in (("aws", AWS), ("docker", DOCKER)):
            (self.programs / name).write_text(text)
            (self.programs / name).chmod(0o755)
        self.agent = folder / "my agent"
        self.agent.mkdir()
        (self.agent / "Dockerfile").write_text("FROM scratch\n")
        self.write(VALUES)

    def write(self, values: dict[str, str]) -> None:
        lines = "".join(f"{name}={value}\n" for name, value in values.items())
        (self.folder / ".env").write_text("# a comment\n\n" + lines)

    def push(self, *options: str, account: str = "123456789012", **env: str) -> tuple[int, str, str]:
        path = f"{self.programs}:/usr/bin:/bin"
        given = {"PATH": path, "CALLS": str(self.calls), "ACCOUNT": account} | env
        command = [sys.executable, str(SCRIPT), *options, "my agent"]
        done = subprocess.run(command, cwd=self.folder, env=given, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    @property
    def called(self) -> list[str]:
        return self.calls.read_text().splitlines() if self.calls.exists() else []


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "a folder with spaces")


def test_an_image_is_built_and_pushed_into_a_repository_that_is_made(place: Place) -> None:
    code, out, err = place.push()
    assert code == 0, err
    assert [" ".join(call.split()[:3]) for call in place.called] == [
        "aws sts get-caller-identity",
        "aws ecr describe-repositories",
        "aws ecr create-repository",
        "aws ecr get-login-password",
        "docker login --username",
        "docker buildx build",
    ]
    assert all("--region eu-central-1" in call for call in place.called if call.startswith("aws")), (
        place.called
    )
    build = place.called[-1]
    assert "--platform linux/arm64" in build and "--push" in build and build.endswith("my agent")
    assert f"--build-context afield={ROOT}" in build
    assert out.splitlines()[-1] == f"pushed {REGISTRY}/afield/math:v1"
    assert "a-password" not in out + err


def test_dockerfile_and_tag_can_be_chosen(place: Place) -> None:
    (place.agent / "Dockerfile").rename(place.folder / "agent.Dockerfile")
    code, _, err = place.push()
    assert code == 2 and "--dockerfile" in err
    code, out, err = place.push("--dockerfile", "agent.Dockerfile", "--tag", "v2")
    assert code == 0, err
    assert f"--file agent.Dockerfile --tag {REGISTRY}/afield/math:v2 --push my agent" in place.called[-1]
    assert out.splitlines()[-1] == f"pushed {REGISTRY}/afield/math:v2"
    assert (
        "--tag = 'a b' must be letters" in place.push("--dockerfile", "agent.Dockerfile", "--tag", "a b")[2]
    )
    assert "there is no file nowhere" in place.push("--dockerfile", "nowhere")[2]
    place.write({name: value for name, value in VALUES.items() if name != "TAG"})
    assert place.push("--dockerfile", "agent.Dockerfile", "--tag", "v3")[0] == 0


def test_pushing_again_makes_no_second_repository(place: Place) -> None:
    assert place.push()[0] == place.push()[0] == 0
    assert sum("create-repository" in call for call in place.called) == 1


def test_a_dry_run_prints_every_command_and_runs_none(place: Place) -> None:
    code, out, err = place.push("--dry-run")
    assert (code, err, place.called) == (0, "", [])
    dry = [shlex.split(line.removeprefix("$ "), comments=True) for line in out.splitlines()[:-1]]
    assert out.splitlines()[-1] == f"would push {REGISTRY}/afield/math:v1"
    assert place.push()[0] == 0
    # A pipe is one line of the dry run and two calls.
    real = [call.split() for call in place.called if "get-login-password" not in call]
    login = dry[3]
    dry[3] = login[login.index("|") + 1 :]
    assert [" ".join(words) for words in dry] == [" ".join(words) for words in real]


def test_a_dry_run_needs_no_programs(place: Place) -> None:
    for program in place.programs.iterdir():
        program.unlink()
    assert place.push("--dry-run")[0] == 0


@pytest.mark.parametrize("account", ["999999999999", ""])
def test_another_account_is_refused_before_anything_is_made(place: Place, account: str) -> None:
    code, _, err = place.push(account=account)
    assert code == 2
    assert f"belong to account {account!r}, not to ACCOUNT_ID 123456789012" in err
    assert len(place.called) == 1


@pytest.mark.parametrize("name", ["AWS_REGION", "ACCOUNT_ID", "REPOSITORY", "TAG"])
@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_a_missing_value_is_named(place: Place, name: str, options: tuple[str, ...]) -> None:
    place.write({key: value for key, value in VALUES.items() if key != name})
    code, _, err = place.push(*options)
    assert (code, place.called) == (2, [])
    assert f"does not say {name}" in err


def test_the_platform_is_optional(place: Place) -> None:
    place.write({key: value for key, value in VALUES.items() if key != "PLATFORM"})
    assert "--platform linux/arm64" in place.push("--dry-run")[1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AWS_REGION", "nowhere"),
        ("ACCOUNT_ID", "1234"),
        ("REPOSITORY", "Upper"),
        ("REPOSITORY", "$(touch broken)"),
        ("TAG", "v 1"),
        ("PLATFORM", "windows/amd64"),
    ],
)
def test_a_wrong_value_is_shown_with_what_it_should_be(place: Place, name: str, value: str) -> None:
    place.write(VALUES | {name: value})
    code, _, err = place.push()
    assert (code, place.called) == (2, [])
    assert f"{name} = {value!r} must be" in err
    assert not (place.folder / "broken").exists()


def test_other_lines_are_refused(place: Place) -> None:
    with (place.folder / ".env").open("a") as file:
        file.write("AWS_SECRET_ACCESS_KEY=no\n")
    code, _, err = place.push("--dry-run")
    assert code == 2 and "line 8: expected NAME=VALUE with one of AWS_REGION" in err


def test_a_failure_is_reported_and_stops_the_rest(place: Place) -> None:
    code, _, err = place.push(TROUBLE="An error occurred (AccessDeniedException)")
    assert code == 2 and "AccessDeniedException" in err
    assert not any("create-repository" in call or "docker" in call for call in place.called)
    code, out, err = place.push(BUILD_FAILS="yes")
    assert code == 2 and "docker buildx build failed" in err and "pushed" not in out


def test_missing_files_are_named(place: Place) -> None:
    (place.programs / "aws").unlink()
    path = {"PATH": str(place.programs)}
    assert "aws is not installed, or not on PATH" in place.push(**path)[2]
    (place.agent / "Dockerfile").unlink()
    assert "there is no Dockerfile in my agent" in place.push()[2]
    (place.folder / ".env").unlink()
    assert "copy .env.example" in place.push()[2]


def test_the_example_of_an_env_file_is_complete() -> None:
    command = [sys.executable, SCRIPT, "--dry-run", "--env", ROOT / ".env.example", "examples/strands-math"]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
