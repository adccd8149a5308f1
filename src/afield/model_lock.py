"""Lock for loading transformers models, taken by engines and trainers.

transformers patches itself while it loads; two at a time would leave weights untied for good.
"""

from __future__ import annotations

from threading import Lock

ALONE = Lock()
