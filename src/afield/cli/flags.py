"""Command-line flags generated from settings, and a parser with one-line errors."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_origin

from msgspec import NODEFAULT

from afield.settings.fields import Setting, SettingsGroup, sections_of, settings_of
from afield.settings.values import SettingsLayer, assigned, merged, with_paths


class CommandParser(argparse.ArgumentParser):
    """An argument parser that reports errors in one line, with the nearest flag or choice.

    Flags cannot be abbreviated: `--step` is an error, not `--steps`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = [str(choice) for choice in action.choices or ()]
        near = difflib.get_close_matches(str(value), choices, n=1)
        if near and near[0] != str(value):
            raise argparse.ArgumentError(action, f"unknown {value!r}; did you mean {near[0]}?")
        super()._check_value(action, value)

    def refuse(self, extra: list[str]) -> NoReturn:
        words = ", ".join(extra)
        wrong = next((word.split("=")[0] for word in extra if word.startswith("-")), "")
        near = difflib.get_close_matches(wrong, self._option_string_actions, n=1)
        self.error(f"unknown argument {words}" + (f"; did you mean {near[0]}?" if near else ""))

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\nsee {self.prog} --help\n")


def add_flags(
    command: argparse.ArgumentParser,
    struct: type[SettingsGroup],
    *,
    without: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Add one flag for each setting that is not a table; `defaults` replace those of the fields."""
    for title, settings in sections_of(struct):
        chosen = [setting for setting in settings if not setting.table and setting.name not in without]
        if chosen:
            group = command.add_argument_group(title.lower())
            for setting in chosen:
                own = setting.name in (defaults or {})
                text = setting.help.partition("; default")[0] if own else setting.help
                _add_flag(group, setting, text, (defaults or {}).get(setting.name, setting.default))


def add_config_arguments(command: argparse.ArgumentParser, example: str = "") -> None:
    """Add --config and --set of the commands that read a [train] table."""
    command.add_argument("--config", type=Path, metavar="FILE", help="TOML file with a [train] table")
    command.add_argument(
        "--set",
        action="append",
        metavar="KEY=VALUE",
        help=f"set any key of the [train] table{example and ', ' + example}; may be repeated",
    )


def flag_values(args: argparse.Namespace, struct: type[SettingsGroup]) -> dict[str, Any]:
    """Settings from the command line."""
    values = ((setting, getattr(args, setting.name, None)) for setting in settings_of(struct))
    return {
        setting.name: assigned(value, setting.flag) if setting.mapping else value
        for setting, value in values
        if value is not None
    }


def flag_layer(
    args: argparse.Namespace, struct: type[SettingsGroup], words: Sequence[str] = ()
) -> SettingsLayer:
    """The command line as a source of settings: flags, and the KEY=VALUE words of --set.

    Paths are relative to the working directory.
    """
    more = assigned(words)
    flags = {setting.name: setting.flag for setting in settings_of(struct)}

    def origin(key: str) -> str:
        name = key.partition(".")[0].partition("[")[0]
        return f"--set {key}" if name in more else flags.get(name, "the command line")

    return SettingsLayer(with_paths(merged(flag_values(args, struct), more), struct, Path()), origin)


def _add_flag(group: Any, setting: Setting, text: str, default: Any) -> None:
    common: dict[str, Any] = {"dest": setting.name, "default": None}
    if setting.plain is bool:
        switch = "store_true" if not default else argparse.BooleanOptionalAction
        group.add_argument(setting.flag, action=switch, help=text, **common)
        return
    common |= {
        "metavar": setting.metavar,
        "help": (text + _shown_default(default)).replace("%", "%%"),
    }
    if setting.mapping:
        group.add_argument(setting.flag, action="append", **common | {"help": f"{text}; may be repeated"})
    elif get_origin(setting.plain) is tuple:
        how = {"type": _words} if setting.choices else {"action": "append"}
        group.add_argument(setting.flag, **how, **common)
    else:
        kind = setting.plain if setting.plain in (int, float) else str
        group.add_argument(setting.flag, type=kind, **common)


def _shown_default(default: Any) -> str:
    if default in (None, "", (), NODEFAULT):
        return ""
    if isinstance(default, tuple):
        default = ",".join(default)
    return f" (default: {default:g})" if isinstance(default, float) else f" (default: {default})"


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
