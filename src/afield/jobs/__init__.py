"""Jobs: a training run, an evaluation, and their metrics for experiment trackers."""
