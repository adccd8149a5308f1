"""Helpers that know nothing of rollouts: files, processes, SQLite, back-off, serving, statistics."""
