"""A verifier whose first tries go wrong, each in another way. Which try it is, its place is told."""

import os
import time
from typing import Any


def grade(payload: dict[str, Any]) -> float:
    match payload["nth"]:
        case 1:
            raise LookupError("the grader has no answer sheet")
        case 2:
            os._exit(3)
        case 3:
            time.sleep(600)
    return 0.5 * (payload["submission"]["answer"] == "Yes.")
