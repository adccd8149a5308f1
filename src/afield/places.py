"""`sandbox(image)`: a fresh place to run commands in, by name of the runtime that gives it."""
