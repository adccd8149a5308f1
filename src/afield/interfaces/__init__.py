"""Interfaces between components: engine, gateway, runtime, sandbox, transport, trainer.

A new backend implements one of these protocols and passes its contract suite in `tests/contracts`.
"""

from afield.interfaces.engine import Chunk, Engine, EngineInfo, GenerateRequest, Image, Pausable, Queueing
from afield.interfaces.gateway import (
    Gateway,
    GatewayEndpoint,
    GatewayLauncher,
    SessionCredentials,
    SessionRecord,
    SessionSpec,
    SessionState,
)
from afield.interfaces.runtime import Capabilities, Exit, Phase, Runtime, SessionStatus, TaskPreparer
from afield.interfaces.sandbox import ExecResult, Sandbox
from afield.interfaces.trainer import AsyncSaver, BackgroundPublisher, Publisher, StepReport, Trainer
from afield.interfaces.transport import Fence, PendingAttempt, Transport

__all__ = [
    "AsyncSaver",
    "BackgroundPublisher",
    "Capabilities",
    "Chunk",
    "Engine",
    "EngineInfo",
    "ExecResult",
    "Exit",
    "Fence",
    "Gateway",
    "GatewayEndpoint",
    "GatewayLauncher",
    "GenerateRequest",
    "Image",
    "Pausable",
    "PendingAttempt",
    "Phase",
    "Publisher",
    "Queueing",
    "Runtime",
    "Sandbox",
    "SessionCredentials",
    "SessionRecord",
    "SessionSpec",
    "SessionState",
    "SessionStatus",
    "StepReport",
    "TaskPreparer",
    "Trainer",
    "Transport",
]
