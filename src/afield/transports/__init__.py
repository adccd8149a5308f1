"""How outcomes come back: one module per transport, all behind `seams.transport`."""
