"""The verifier: runs the tests on a fresh copy with the patch, in a place of its own. Its reward counts."""

import json
import subprocess
import sys
from typing import Any

from repository import Repository

import afield

# Prints its numbers last, so that code that ends the process early has proved nothing.
RUN_TESTS = """
import json, sys, unittest
tests = unittest.defaultTestLoader.loadTestsFromNames(sys.argv[1:])
result = unittest.TextTestRunner(verbosity=0).run(tests)
good = result.testsRun - len(result.failures) - len(result.errors) - len(result.skipped)
print("\\n" + json.dumps([good, result.testsRun]))
"""


@afield.agent
def grade(task: dict[str, Any]) -> dict[str, Any]:
    """The share of the task's tests that pass."""
    tests = {name: text for name, text in task["files"].items() if name.startswith("test_")}
    with Repository(task["files"]) as repository:
        try:
            repository.apply(task["submission"].get("patch", ""))
        except ValueError as error:
            return {"reward": 0.0, "metrics": {"applies": 0.0}, "told": str(error)}
        repository.write(tests)  # whatever the agent made of them
        passed, ran = run_tests(repository, [name.removesuffix(".py") for name in tests])
        expected = sum(text.count("def test_") for text in tests.values())
        return {"reward": passed / expected if ran == expected else 0.0, "metrics": {"applies": 1.0}}


def run_tests(repository: Repository, modules: list[str]) -> tuple[int, int]:
    try:
        done = repository.run(sys.executable, "-c", RUN_TESTS, *modules)
        passed, ran = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError, TypeError):
        return 0, 0
    return int(passed), int(ran)
