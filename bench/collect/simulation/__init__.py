"""Simulated agents, gateway, engine and trainer around the real collector."""
