"""Small agents that tests run, and the payloads they are run with."""
