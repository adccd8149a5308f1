"""Trainers: groups in, new weights out."""
