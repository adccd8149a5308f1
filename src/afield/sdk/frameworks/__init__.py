"""Models of agent frameworks at a rollout's gateway."""
