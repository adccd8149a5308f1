"""Training rows and their file and tensor forms: JSONL, Parquet, TensorDict and tree.

`rows` has the types; `groups` converts groups to rows and back; `rewards` weighs rewards. No module imports
torch, tensordict or pyarrow before a function needs it.
"""
