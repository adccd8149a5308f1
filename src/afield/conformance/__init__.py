"""Real clients against the gateway, with the engine's ledger as the judge. Start at `suite`."""
