"""Runtimes: one module or package each, all behind `interfaces.runtime`."""
