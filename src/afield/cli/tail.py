"""`afield tail`: print rollouts of a run as they end."""

from __future__ import annotations

import argparse
import time
from typing import Any

from afield.cli.runs import open_run
from afield.cli.show import COLUMNS, brief
from afield.cli.tables import print_table

POLL_S = 0.5


def add(commands: Any) -> None:
    command = commands.add_parser(
        "tail",
        help="print rollouts as they end",
        description="Print the last rollouts of a run, then each one that ends, until the run stops.",
    )
    command.add_argument(
        "name", nargs="?", default="latest", metavar="RUN", help="run id, path, or latest (default: latest)"
    )
    command.add_argument(
        "-n", "--number", type=int, default=10, metavar="N", help="rollouts to print at first (default: 10)"
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    run_path = open_run(args.name)
    with run_path.index as index:
        index.refresh()
        (newest,) = index.query("SELECT coalesce(max(seq), 0) AS seq FROM rollouts")
        seen = newest["seq"]  # before the rows are read: a rollout may end in between
        rows = index.rollouts("seq <= ?", seen, order="seq DESC", limit=max(0, args.number))[::-1]
        print_table(map(brief, rows), COLUMNS, as_json=args.json)
        while True:
            running = run_path.status == "running"
            rows = index.rollouts("seq > ?", seen)
            print_table(map(brief, rows), COLUMNS, as_json=args.json, header=False)
            seen = rows[-1].seq if rows else seen
            if not running:
                return 0
            time.sleep(POLL_S)
