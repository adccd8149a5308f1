"""Integrations with other trainers: veRL and TRL."""
