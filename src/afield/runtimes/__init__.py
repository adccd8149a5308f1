"""Runtimes: where agents run. One module or package per runtime, all behind `interfaces.runtime`."""
