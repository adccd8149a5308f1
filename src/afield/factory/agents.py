"""What reading alone can tell is wrong with how an agent or a verifier is named.

Nothing of the user's is run here: an agent is imported only where it will run, and modules are looked for
there. What cannot be told by reading, such as a name that appears at run time, is left to the places that
try it.
"""

from __future__ import annotations

import difflib
import symtable
import tokenize
from pathlib import Path

from afield.errors import UsageError

# With one of these in a file, names may be there that nobody wrote down.
BY_THE_WAY = ("import *", "globals(", "exec(", "setattr(", "__getattr__", "__dict__", "global ")


def check_target(what: str, target: str) -> None:
    place, _, name = target.rpartition(":")
    if not target:
        raise UsageError(f"{what} is missing: give path/to/file.py:name or package.module:name")
    if not place or not name:
        raise UsageError(f"{what} {target!r} must be path/to/file.py:name or package.module:name")
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise UsageError(f"there is no file {place}")
        _check_source(what, place, name)


def _check_source(what: str, place: str, name: str) -> None:
    """Whether a file is Python, and has the name."""
    try:
        with tokenize.open(place) as file:
            source = file.read()
        table = symtable.symtable(source, place, "exec")
    except (SyntaxError, ValueError, OSError) as error:
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        said = error.msg if isinstance(error, SyntaxError) else str(error)
        raise UsageError(f"the {what}'s file {place}{where} cannot be read as Python: {said}") from error
    has = {one.get_name() for one in table.get_symbols() if one.is_assigned() or one.is_imported()}
    if name in has or any(word in source for word in BY_THE_WAY):
        return
    functions = sorted(child.get_name() for child in table.get_children() if child.get_name() in has)
    near = difflib.get_close_matches(name, sorted(has), 1)
    hint = f"did you mean {near[0]!r}?" if near else f"it has: {', '.join(functions) or 'nothing to run'}"
    raise UsageError(f"{place} has no {name!r}, the {what}; {hint}")
