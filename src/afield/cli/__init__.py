"""The commands. Each module adds its arguments in `add` and does its work in one short function."""
