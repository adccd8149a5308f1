"""SDK for agent images: decorator, HTTP server, rewards, delivery of outcomes.

Needs the base install only. Agents import its names from `afield`.
"""
