"""Imports something only while it works, and says whether it had to."""

import sys
from pathlib import Path

import afield


@afield.agent
def agent(task: dict) -> float:
    had = "fractions" in sys.modules
    import fractions

    assert fractions
    if task.get("lie"):
        told = Path("/tmp/.imported")
        told.write_text("this.is.nothing\n../../etc\nidlelib.__main__\nsched\n" + "x" * 10**6)
        told.chmod(0o400)
    return float(had)
