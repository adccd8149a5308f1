"""Datasets: tasks from JSONL, Parquet, Hugging Face and Harbor files."""

from __future__ import annotations

from afield.datasets.reader import read_tasks

__all__ = ["read_tasks"]
