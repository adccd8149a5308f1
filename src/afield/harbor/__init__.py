"""Harbor tasks: environments without Docker, verifier, oracle."""
