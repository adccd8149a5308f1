"""Planning of runs: memory of trainer and engine, and settings that fit."""
