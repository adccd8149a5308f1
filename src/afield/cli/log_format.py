"""Log formats of long-running commands: text lines or JSON lines.

Both formats redact keys that a message quotes.
"""

from __future__ import annotations

import json
import logging
import re

_KEY = re.compile(r"(af[hk]-[A-Za-z0-9._-]+)~[a-z0-9.-]*~[0-9a-f]*~[0-9a-f]+|(?i:bearer)\s+\S+")
_SESSION = re.compile(r"\bsession ([A-Za-z0-9._-]+)|/s/([A-Za-z0-9._-]+)")


def start_logging(format: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if format == "json" else Lines())
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def without_keys(text: str) -> str:
    """Redact session keys, header keys and bearer tokens."""
    return _KEY.sub(lambda match: f"{match[1]}~..." if match[1] else "Bearer ...", text)


class Lines(logging.Formatter):
    """Text lines without keys."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return without_keys(super().format(record))


class JsonLines(logging.Formatter):
    """JSON lines without keys, with the session id that a message names."""

    def format(self, record: logging.LogRecord) -> str:
        message = without_keys(record.getMessage())
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
        }
        if match := _SESSION.search(message):
            line["session"] = match[1] or match[2]
        if record.exc_info:
            line["traceback"] = without_keys(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False)
