"""Where another trainer drives: afield inside veRL and TRL, through their own doors."""
