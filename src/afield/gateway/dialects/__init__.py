"""Dialects: each is a view of the same items that `calls` emits, streaming or folded."""
