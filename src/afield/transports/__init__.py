"""Transports: outcome stores and queues of hints behind `interfaces.transport`."""
