"""Ready configurations for veRL, which Hydra finds as `pkg://afield.integrations.verl.config`."""
