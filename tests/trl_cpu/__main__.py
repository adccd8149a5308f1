"""`python -m trl_cpu SCRIPT ARGUMENTS`: a script that uses TRL, on a CPU."""

from __future__ import annotations

import runpy
import sys

import torch

import trl_cpu

if __name__ == "__main__":
    torch.set_num_threads(1)
    trl_cpu.install()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
