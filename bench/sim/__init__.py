"""The parts of `bench/collect.py`: what is simulated, how it is run, what is checked."""
