"""TensorBoard tracker: event files in the run's directory."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.tensor_pb2 import TensorProto  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.types_pb2 import DT_STRING  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from afield.trackers.base import RunStatus, TrackedRun


class TensorBoard:
    """Writes event files. A resumed run adds a file and hides the steps that it repeats."""

    def start(self, run: TrackedRun, id: str) -> str:
        directory = Path(run.uri) if run.uri else run.directory / "tensorboard"
        self._writer = EventFileWriter(str(directory))
        if id:
            started = SessionLog(status=SessionLog.START)
            self._write(Event(session_log=started, step=run.step + 1))
        else:
            settings = json.dumps(dict(run.config), indent=1, default=str)
            text = TensorProto(dtype=DT_STRING, string_val=[f"```json\n{settings}\n```".encode()])
            metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
            value = Summary.Value(tag="settings/text_summary", metadata=metadata, tensor=text)
            self._write(Event(summary=Summary(value=[value]), step=0))
        return str(directory)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(Event(summary=Summary(value=values), step=step))

    def finish(self, status: RunStatus) -> None:
        self._writer.close()

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self._writer.add_event(event)
        self._writer.flush()
