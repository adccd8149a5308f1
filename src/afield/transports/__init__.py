"""Transports: outcome stores and hint queues that implement `interfaces.transport`."""
