"""Isolated places on this machine: agents and commands in namespaces of their own."""
