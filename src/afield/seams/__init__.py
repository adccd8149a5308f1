"""The five seams: what the parts promise each other, in domain verbs.

Read these five files and `types`, and you know the system. A backend is done when it passes the
contract suite of its seam in `tests/contracts`.
"""

from afield.seams.engine import Call, Chunk, Engine, EngineInfo, Freezing, Image
from afield.seams.gateway import Gateway, Record, SessionSpec, SessionState, SessionTicket
from afield.seams.runtime import Exit, Runtime
from afield.seams.trainer import StepReport, Trainer
from afield.seams.transport import Fence, Transport, Waiting

__all__ = [
    "Call",
    "Chunk",
    "Engine",
    "EngineInfo",
    "Exit",
    "Fence",
    "Freezing",
    "Gateway",
    "Image",
    "Record",
    "Runtime",
    "SessionSpec",
    "SessionState",
    "SessionTicket",
    "StepReport",
    "Trainer",
    "Transport",
    "Waiting",
]
