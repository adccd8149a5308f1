"""The SDK that goes into an agent's image: the decorator, the HTTP contract, the delivery of outcomes.

It needs the base install only. Agents import its names from `afield`.
"""
