"""afield inside stock veRL: a manager for its agent loop, and a rollout backend."""
