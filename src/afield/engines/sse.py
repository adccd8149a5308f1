"""Server-sent events out of bytes that may be cut anywhere.

`feed` takes what one network read gave and returns the data of every event it completed, so that a
reader who is behind handles many at once. Comments and other fields are dropped. It never decodes:
a character cut in two is whole again before anyone looks at it.
"""

from __future__ import annotations

from afield.errors import Unavailable

LONGEST = 64 << 20


class Events:
    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        data = self._rest + data
        held = b""
        if b"\r" in data:
            # A carriage return at the end may be half of a line end.
            if data.endswith(b"\r"):
                data, held = data[:-1], b"\r"
            data = data.replace(b"\r\n", b"\n")
        *blocks, rest = data.split(b"\n\n")
        self._rest = rest + held
        if len(self._rest) > LONGEST:
            raise Unavailable(f"an event of more than {LONGEST >> 20} MiB; this is not an event stream")
        return [found for block in blocks if (found := _data(block))]

    @property
    def unfinished(self) -> bool:
        return bool(self._rest.strip())


def _data(block: bytes) -> bytes:
    if block.startswith(b"data: ") and b"\n" not in block:
        return block[6:]
    lines = (line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:"))
    return b"\n".join(lines)
