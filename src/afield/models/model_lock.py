"""Lock for loading transformers models, shared by engines and trainers.

transformers patches itself while it loads a model; concurrent loads can leave tied weights untied.
"""

from __future__ import annotations

from threading import Lock

ALONE = Lock()
