"""Diagnosis of a run: staged, ranked findings with evidence.

1. `evidence` reads a run once: one small record per rollout, the lines of its steps, its settings.
2. One module per stage has a function per class of problem.
3. `registry` has the table of all classes and `diagnose`, which ranks what they find.
"""
