"""Script of the scripted engine: conversations of 1 to 8 turns, uniformly distributed."""

from __future__ import annotations

import json
from pathlib import Path

MAX_TURNS = 8
MAX_WORDS = 16
CHUNK = 4
ENOUGH, MORE = "Enough", "More"


def question(turn: int) -> str:
    return f"Question {turn}: what now?"


def answers(turn: int) -> list[str]:
    """Possible answers at this turn; one in (turns left) ends the conversation."""
    return [
        " ".join([ENOUGH if left == turn else MORE, *["word"] * words])
        for left in range(turn, MAX_TURNS + 1)
        for words in range(MAX_WORDS)
    ]


def write_script(path: Path, delay_s: float) -> Path:
    """Write the script; later questions come first because the engine takes the first matching row."""
    rows = [
        {"match": question(turn), "one_of": answers(turn), "chunks": [CHUNK], "delay_s": delay_s}
        for turn in range(MAX_TURNS, 0, -1)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
