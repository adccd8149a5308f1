"""Agents of the demo, each written with a third-party library the way its user would write it."""
