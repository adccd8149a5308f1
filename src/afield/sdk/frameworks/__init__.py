"""Models of agent frameworks at a rollout's gateway; each needs its framework installed."""
