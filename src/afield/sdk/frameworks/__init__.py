"""One-liners for agent frameworks: a model that lives at the rollout's gateway. Each needs its framework."""
