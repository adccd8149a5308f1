"""Virtualenvs of agents, made without a network."""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
import venv
from pathlib import Path

from support.paths import ROOT

BASE_INSTALL = ("msgspec", "uvicorn", "click", "h11")


def make_virtualenv(folder: Path, *, afield: bool = True) -> Path:
    """Python of a new virtualenv with the module `only_here` and, unless False, afield's base install."""
    venv.create(folder, symlinks=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    (site / "only_here.py").write_text("REWARD = 0.25\n")
    if afield:
        (site / "afield.pth").write_text(f"{ROOT / 'src'}\n")
        for name in BASE_INSTALL:
            found = importlib.util.find_spec(name)
            assert found and found.submodule_search_locations
            shutil.copytree(found.submodule_search_locations[0], site / name)
    return folder / "bin" / "python"
