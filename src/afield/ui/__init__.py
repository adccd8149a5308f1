"""Browser view of runs: `afield ui`."""
