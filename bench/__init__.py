"""Benchmarks and acceptance checks, one folder per part; run with `python -m bench.PART.NAME`."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""Root of the repository."""

# Machines with a GPU may have torch but no installed afield; tests/support has servers and simulators.
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
