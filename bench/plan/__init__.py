"""Planned against measured: memory of steps and engines."""
