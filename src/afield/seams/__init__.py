"""The seams: what the parts promise each other, in domain verbs.

Read these files and `types`, and you know the system. A backend is done when it passes the
contract suite of its seam in `tests/contracts`.
"""

from afield.seams.engine import Call, Chunk, Engine, EngineInfo, Freezing, Image, Queueing
from afield.seams.gateway import Gateway, Record, SessionSpec, SessionState, SessionTicket
from afield.seams.runtime import Capabilities, Exit, Live, Phase, Runtime
from afield.seams.sandbox import Ran, Sandbox
from afield.seams.trainer import Publisher, StepReport, Trainer
from afield.seams.transport import Fence, Transport, Waiting

__all__ = [
    "Call",
    "Capabilities",
    "Chunk",
    "Engine",
    "EngineInfo",
    "Exit",
    "Fence",
    "Freezing",
    "Gateway",
    "Image",
    "Live",
    "Phase",
    "Publisher",
    "Queueing",
    "Ran",
    "Record",
    "Runtime",
    "Sandbox",
    "SessionSpec",
    "SessionState",
    "SessionTicket",
    "StepReport",
    "Trainer",
    "Transport",
    "Waiting",
]
