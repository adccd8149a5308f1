"""What several tests and benchmarks use."""
