"""The acting agent, in a program that takes its time to start."""

import time

from acting import act

time.sleep(1)
__all__ = ["act"]
