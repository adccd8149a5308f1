"""Notes each attempt in a file, takes its time, or waits for a file, and gives what it was told to give."""

import time
from pathlib import Path
from typing import Any

import afield


@afield.agent
def agent(task: dict[str, Any], rollout: afield.Context) -> float:
    with Path(task["marks"]).open("a") as marks:
        marks.write(f"{rollout.session_id}\n")
    time.sleep(task.get("seconds", 0.0))
    while "until" in task and not Path(task["until"]).exists():
        time.sleep(0.05)
    return task.get("reward", 1.0)
