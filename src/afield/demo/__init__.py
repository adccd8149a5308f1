"""The demo: a small shop, agents that answer questions about it, and a small policy that learns to."""
