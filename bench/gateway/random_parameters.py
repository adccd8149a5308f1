"""Random valid request parameters of every dialect: honoured, overridden or refused by name.

    python -m bench.gateway.random_parameters [--count 200] [--json]

The requests go to a gateway with a scripted engine. The last line of `--json` is {"requests", "answered",
"refused", "problems"}.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

from support.random_requests import run


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200, help="requests of each dialect")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random requests")
    parser.add_argument("--json", action="store_true", help="print the outcome as one line of JSON")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="afield-parameters-") as directory:
        result = asyncio.run(run(Path(directory), options.count, options.seed))
    if options.json:
        print(json.dumps(result))
    else:
        counts = {key: value for key, value in result.items() if key != "problems"}
        print(", ".join(f"{value} {key}" for key, value in counts.items()))
        print("\n".join(result["problems"]))
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
