"""Experiment trackers: metrics of runs to TensorBoard, W&B, MLflow and trackio."""
