"""`python -m trl_cpu [--measure FILE] SCRIPT ARGUMENTS`: a script that uses TRL, on a CPU."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch

import trl_cpu

if __name__ == "__main__":
    torch.set_num_threads(1)
    trl_cpu.install()
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "--measure":
        from trl_cpu import measure

        measure.install(Path(sys.argv[1]))
        sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
