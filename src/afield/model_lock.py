"""One model is loaded at a time, by whoever loads one: engines and trainers take this lock.

transformers patches itself while it loads; two at a time would leave weights untied for good.
"""

from __future__ import annotations

from threading import Lock

ALONE = Lock()
