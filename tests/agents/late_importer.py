"""Imports something only while it works, and says whether it had to."""

import sys
from pathlib import Path

import afield


@afield.agent
def agent(task: dict) -> float:
    had = task.get("had", "fractions") in sys.modules
    import fractions

    assert fractions
    if task.get("never"):
        import late_broken

        assert late_broken
    if task.get("lie"):
        for name in (".imported", "imported", ".modules"):
            Path("/tmp", name).write_text(
                "this.is.nothing\n../../etc\nidlelib.__main__\nsched\n" + "x" * 10**6
            )
    return float(had)
