"""afield inside stock TRL: a rollout worker and a weight transfer for its asynchronous GRPO."""
