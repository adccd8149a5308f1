"""`afield inspect-template` and cached template profiles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from afield.chat import ChatTokenizer
from afield.cli.main import main
from templates.models import write_model


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "tiny",
            [
                "end of turn       <|im_end|>",
                "appends (append)  tool, tools, tool+user",
                "truncated turns   appended to",
                "reasoning         think; rendered",
                "tools             hermes; parallel calls",
                "call ids          not shown",
                "content           never becomes control tokens",
                "date              not printed",
            ],
        ),
        (
            "forgetful",
            [
                "reasoning         think; rendered; stripped before tool+user",
                "note              the template strips",
            ],
        ),
        ("brackets", ["does not append   tool+user", "call ids          shown; nine letters or digits"]),
        (
            "headers",
            [
                "tools             llama_json; one call a turn",
                "date              printed; frozen at the start",
            ],
        ),
        (
            "channels",
            [
                "end of turn       <|return|>",
                "end of calls      <|call|>",
                "note              the template names",
            ],
        ),
        (
            "plain",
            ["tools             hermes; parallel calls", "rule              fold-tools: tools are announced"],
        ),
        (
            "moving",
            ["rule              merge-system: several", "rule              fold-system: a later system"],
        ),
        ("tiny", ["rule              developer-as-system: a developer"]),
        ("endless", ["end of turn       none", "note              the template has no token that ends"]),
    ],
)
def test_inspect_template_prints_the_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, lines: list[str]
) -> None:
    assert main(["inspect-template", str(write_model(tmp_path / name, name))]) == 0
    shown = capsys.readouterr().out.splitlines()
    for line in lines:
        assert any(row.startswith(line) for row in shown), line


def test_json_is_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path / "tagged", "tagged")
    assert main(["inspect-template", str(model), "--json"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    document = json.loads(line)
    assert document["model"] == "tagged"
    assert document["usable"] is True
    assert document["tool_format"] == "qwen_xml"
    assert document["appends"]["tool"] == "append"
    assert document["template_hash"] == ChatTokenizer.load(model).profile.template_hash


def test_template_with_unknown_tool_format_fails_with_tools(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(write_model(tmp_path / "plain", "plain"))
    assert main(["inspect-template", model, "--tools", "--strict"]) == 1
    assert "note              the template renders no tools" in capsys.readouterr().out
    assert main(["inspect-template", model, "--tools", "--strict", "--json"]) == 1
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (document["usable"], document["rules"]) == (False, ["developer-as-system"])
    assert main(["inspect-template", model, "--tools"]) == 0


def test_missing_model_directory_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect-template", "nowhere"]) == 2
    assert "nowhere is not a directory" in capsys.readouterr().err


# --- cache ---------------------------------------------------------------------------------------


def test_cached_profile_is_used(tmp_path: Path) -> None:
    model, cache = write_model(tmp_path / "tiny", "tiny"), tmp_path / "cache"
    profile = ChatTokenizer.load(model, cache=cache).profile
    [file] = cache.iterdir()
    assert ChatTokenizer.load(model, cache=cache).profile == profile
    document = json.loads(file.read_text())
    file.write_text(json.dumps({**document, "notes": ["seen"]}))
    assert ChatTokenizer.load(model, cache=cache).profile.notes == ("seen",)


@pytest.mark.parametrize("change", ["template", "arguments", "stop"])
def test_changed_input_gives_another_cached_profile(tmp_path: Path, change: str) -> None:
    model, cache = write_model(tmp_path / "tiny", "tiny"), tmp_path / "cache"
    ChatTokenizer.load(model, cache=cache)
    if change == "template":
        template = model / "chat_template.jinja"
        template.write_text(template.read_text() + " ")
    if change == "stop":
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [5]}))
    ChatTokenizer.load(model, cache=cache, arguments={"mood": "glad"} if change == "arguments" else None)
    assert len(list(cache.iterdir())) == 2


def test_unreadable_cached_profile_is_replaced(tmp_path: Path) -> None:
    model, cache = write_model(tmp_path / "tiny", "tiny"), tmp_path / "cache"
    profile = ChatTokenizer.load(model, cache=cache).profile
    [file] = cache.iterdir()
    for broken in ("{", "{}", '{"appends": 7}'):
        file.write_text(broken)
        assert ChatTokenizer.load(model, cache=cache).profile == profile
        assert json.loads(file.read_text())["template_hash"] == profile.template_hash


def test_unwritable_profile_cache_is_ignored(tmp_path: Path) -> None:
    model, blocked = write_model(tmp_path / "tiny", "tiny"), tmp_path / "file"
    blocked.write_text("not a folder")
    assert ChatTokenizer.load(model, cache=blocked).profile.tool_format == "hermes"
