"""The seams: what the parts promise each other, in domain verbs.

Read these files and `types`, and you know the system. A backend is done when it passes the
contract suite of its seam in `tests/contracts`.
"""

from afield.interfaces.engine import Call, Chunk, Engine, EngineInfo, Freezing, Image, Queueing
from afield.interfaces.gateway import Gateway, Record, SessionSpec, SessionState, SessionTicket
from afield.interfaces.runtime import Capabilities, Exit, Live, Phase, Runtime
from afield.interfaces.sandbox import Ran, Sandbox
from afield.interfaces.trainer import Publisher, StepReport, Trainer
from afield.interfaces.transport import Fence, Transport, Waiting

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
