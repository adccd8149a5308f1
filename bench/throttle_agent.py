"""The least an agent can do: it asks no model, and gives its reward."""

import afield


@afield.agent
def run(task: dict) -> float:
    return 1.0
