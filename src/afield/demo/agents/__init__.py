"""Demo agents, each written with another agent library."""
