"""Workspaces: the changes that an agent makes, as a submission that the verifier checks."""

from __future__ import annotations

import base64
import io
import os
import tarfile
from pathlib import Path

import pytest

from afield.errors import PolicyFailure, TaskFailure, VerifierFailure
from afield.harbor.verifier import read_submission
from afield.sdk import workspace
from afield.sdk.workspace import TaskEnvironment, Workspace


def row(directory: Path, *paths: Path) -> dict[str, object]:
    return {"environment": {"workdir": str(directory), "digest": "", "paths": list(map(str, paths))}}


def members(submission: dict) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(submission["files"]))) as archive:
        return {f"/{member.name}": member for member in archive}


def test_submission_has_added_changed_and_removed_files_and_nothing_else(tmp_path):
    app, other = tmp_path / "app", tmp_path / "declared"
    for folder in (app / "deep", other):
        folder.mkdir(parents=True)
    for name in ("same", "changed", "removed", "becomes_a_directory", "deep/removed"):
        (app / name).write_text("before")
    (app / "link").symlink_to("same")
    opened = Workspace.open(row(app, other))
    assert opened.directory == app
    (app / "changed").write_text("after!")
    (app / "removed").unlink()
    (app / "deep" / "removed").unlink()
    (app / "deep").rmdir()
    (app / "becomes_a_directory").unlink()
    (app / "becomes_a_directory").mkdir()
    (app / "link").unlink()
    (app / "link").symlink_to("/elsewhere")
    (app / "tool").write_bytes(b"\0\xff")
    (app / "tool").chmod(0o4755)
    os.link(app / "tool", app / "tool2")
    os.mkfifo(app / "pipe")
    (other / "new").mkdir()
    submission = opened.submission()
    found = members(submission)
    assert sorted(found) == [
        *(f"{app}/{name}" for name in ("becomes_a_directory", "changed", "link", "tool", "tool2")),
        f"{other}/new",
    ]
    assert found[f"{app}/link"].linkname == "/elsewhere"
    assert found[f"{app}/tool"].mode == 0o755
    assert found[f"{app}/tool2"].isreg()
    assert submission["removed"] == [
        f"{app}/{name}" for name in ("becomes_a_directory", "deep", "deep/removed", "removed")
    ]


def test_row_without_environment_gets_an_empty_directory():
    opened = Workspace.open({"instruction": "x"})
    assert list(opened.directory.iterdir()) == []
    (opened.directory / "answer").write_text("4")
    assert list(members(opened.submission())) == [f"{opened.directory}/answer"]


def test_missing_working_directory_names_the_remedy(tmp_path):
    with pytest.raises(
        TaskFailure, match=r"no working directory .*/absent: run the task with --runtime sandbox"
    ):
        Workspace.open(row(tmp_path / "absent"))


@pytest.mark.parametrize("limit", ["MAX_FILES", "MAX_BYTES", "MAX_ARCHIVE_BYTES"])
def test_submission_above_a_limit_is_a_policy_failure(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(workspace, limit, 1)
    opened = Workspace.open(row(tmp_path))
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(os.urandom(20_000))
    with pytest.raises(PolicyFailure, match=r"the agent changed|the files that the agent changed"):
        opened.submission()


def archive(*members: tarfile.TarInfo | str) -> dict[str, object]:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as opened:
        for member in members:
            opened.addfile(tarfile.TarInfo(member) if isinstance(member, str) else member)
    return {"files": base64.b64encode(buffer.getvalue()).decode(), "removed": []}


def special(name: str, kind: bytes, target: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.mode = kind, target, mode
    return member


APP = TaskEnvironment(workdir="/app", paths=("/etc/motd", "/var/lib/notes"))
REFUSED = {
    "parent": archive("app/../../etc/shadow"),
    "absolute": archive("/app/x"),
    "tests": archive("tests/test.sh"),
    "reward": archive("logs/verifier/reward.txt"),
    "logs as a link": archive(special("logs", tarfile.SYMTYPE, "/app")),
    "program of the system": archive("usr/local/bin/python3"),
    "file of the system": archive("etc/ld.so.preload"),
    "home": archive("work/.bashrc"),
    "device": archive(special("app/disk", tarfile.BLKTYPE)),
    "pipe": archive(special("app/pipe", tarfile.FIFOTYPE)),
    "hard link": archive(special("app/x", tarfile.LNKTYPE, "tests/test.sh")),
    "below a link": archive(special("app/t", tarfile.SYMTYPE, "/tests"), "app/t/test.sh"),
    "removed tests": {"removed": ["/tests"]},
    "removed parent": {"removed": ["/app/../usr"]},
    "removed root": {"removed": ["/"]},
    "removed number": {"removed": [1]},
    "removed text": {"removed": "/app"},
    "not base64": {"files": "%%%"},
    "not gzip": {"files": base64.b64encode(b"plain").decode()},
    "cut off": {"files": archive("app/x")["files"][:40]},
    "not text": {"files": ["app/x"]},
}


@pytest.mark.parametrize("case", REFUSED)
def test_hostile_submission_is_refused(case):
    with pytest.raises(VerifierFailure, match="the submission is refused"):
        read_submission(REFUSED[case], APP)


def test_accepted_submission_has_no_owner_and_no_special_modes():
    tool = special("app/tool", tarfile.REGTYPE, mode=0o6777)
    tool.uid, tool.uname = 0, "root"
    submission = archive(
        tool, "etc/motd", "var/lib/notes/1", "answers/2", special("app/l", tarfile.SYMTYPE, "/x")
    )
    content, removed = read_submission({**submission, "removed": ["/app/old"]}, APP)
    with tarfile.open(fileobj=io.BytesIO(content)) as checked:
        assert checked.getnames() == ["app/tool", "etc/motd", "var/lib/notes/1", "answers/2", "app/l"]
        assert checked.getmember("app/tool").mode == 0o777
    assert removed == ["/app/old"]


def test_decompression_bomb_is_refused(monkeypatch):
    monkeypatch.setattr("afield.harbor.verifier.MAX_BYTES", 1000)
    monkeypatch.setattr("afield.harbor.verifier.MAX_FILES", 1)
    member = tarfile.TarInfo("app/zeros")
    member.size = 1_000_000
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as opened:
        opened.addfile(member, io.BytesIO(bytes(member.size)))
    with pytest.raises(VerifierFailure, match="more than 1000 bytes"):
        read_submission({"files": base64.b64encode(buffer.getvalue()).decode()}, APP)
