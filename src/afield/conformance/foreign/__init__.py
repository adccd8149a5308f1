"""Test suites of other projects, run against the gateway in front of a model that follows rules."""
