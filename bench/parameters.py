"""Random requests of every dialect with valid parameters: each is honoured, overridden or refused by name.

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

from bars import ROOT

sys.path.append(str(ROOT / "tests"))

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
        told = asyncio.run(run(Path(directory), options.count, options.seed))
    if options.json:
        print(json.dumps(told))
    else:
        print(f"{told['requests']} requests: {told['answered']} answered, {told['refused']} refused by name")
        print("\n".join(told["problems"]))
    return 1 if told["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
