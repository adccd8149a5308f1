"""Neutral batches: what was collected, in forms that any trainer can read, and back."""
