"""Neutral batches: what was collected, in forms that any trainer can read, and back.

`sample` has the nouns (`Sample`, `Record`, `Batch`) and `from_groups`; `groups` goes back to groups; `tree`
is the same tokens as a table of nodes; `jsonl`, `parquet` and `tensors` are formats; `rewards` says what
counts. Nothing here imports torch, tensordict or pyarrow before a function needs it.
"""
