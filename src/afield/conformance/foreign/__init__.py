"""Test suites of other projects, run against the gateway with a rule-based model."""
