"""Rollouts from any agent, anywhere. Train the agent you already have, where it already runs."""

__version__ = "0.1.0"
