"""Conformance suite: real clients against the gateway, checked against recorded engine calls."""
