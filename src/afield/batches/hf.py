"""Hugging Face form of batches and trees: a directory as of `Dataset.save_to_disk`.

The columns are those of the Parquet form. `datasets.load_from_disk` reads the directory; writing it needs
pyarrow alone (extra `batches`).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from afield.batches.parquet import to_table
from afield.batches.rows import Batch
from afield.batches.tree import TreeBatch

DATA = "data-00000-of-00001.arrow"


def write_hf(path: Path, batch: Batch | TreeBatch) -> None:
    """Write a batch or a tree to a new directory."""
    table = to_table(batch)
    from pyarrow import ipc

    path.mkdir()
    with ipc.new_stream(path / DATA, table.schema) as writer:
        writer.write_table(table)
    with (path / DATA).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    state = {
        "_data_files": [{"filename": DATA}],
        "_fingerprint": digest[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (path / "state.json").write_text(json.dumps(state, indent=2))
    (path / "dataset_info.json").write_text("{}")  # the features are those of the Arrow schema
