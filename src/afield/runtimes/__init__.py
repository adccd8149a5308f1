"""Where agents run: one module per runtime, all behind `seams.runtime`."""
