"""Training rows and their JSONL, Parquet, TensorDict and tree forms.

`rows` has the types; `groups` converts groups to rows and back; `rewards` weighs rewards. No module imports
torch, tensordict or pyarrow before a function needs it.
"""
