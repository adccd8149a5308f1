"""What the model of bench/chaos.py says: as many words as its last question asks for."""

from __future__ import annotations

import json
from pathlib import Path

MAX_TURNS = 8
MAX_WORDS = 16
CHUNK = 4


def question(turn: int, words: int) -> str:
    return f"Question {turn}: say {words} words."


def write_script(path: Path, delay_s: float) -> Path:
    """The last question of a prompt is found first, because rows are tried in order."""
    rows = [
        {
            "match": question(turn, words),
            "text": " ".join(["word"] * words),
            "chunks": [CHUNK],
            "delay_s": delay_s,
        }
        for turn in range(MAX_TURNS, 0, -1)
        for words in range(1, MAX_WORDS + 1)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
