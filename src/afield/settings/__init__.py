"""Settings: one tree of structs with a docstring under each field.

Command-line flags and their help, docs/reference/settings.md and veRL's keys are generated from it.
Precedence: command line, then environment variables such as AFIELD_TRAIN_STEPS, then the file given with
--config, then the defaults of the fields. Errors name the flag, the variable, or the line of the file.

- `fields`: what a settings struct is, and how its fields are described
- `train`, `gateway`: the settings of a training run and of a gateway
- `rollouts`, `sessions`, `trainer`, `runtimes`: the groups they are made of
- `values`: files and flags to values; `environment`: the only reader of environment variables
"""
