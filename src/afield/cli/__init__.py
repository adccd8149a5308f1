"""Commands of the `afield` program.

Each module registers its arguments in `add` and sets the function that runs the command.
"""
