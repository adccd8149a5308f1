"""Records of a run: index, token account, turn facts, training record."""
