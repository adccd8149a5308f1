"""Engines sample tokens: `torch` is embedded, `scripted` is for tests, `ledger` watches any of them."""
