"""The acting agent, in a program that takes its time to start."""

import time

from acting import act

time.sleep(3)
__all__ = ["act"]
