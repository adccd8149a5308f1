"""Weight transfer to a vLLM server (NCCL, CUDA IPC), from the trainer's process.

vLLM's trainer-side engines take any object with these four methods and move the tensors themselves.
`VllmTransfer` also pauses the server's calls meanwhile and labels the version, so that no token is sampled
from half of the weights. After a failed transfer the server stays paused, because it may hold parts of the
weights: send them again. Tell the gateway with `publish` and no path. Blocking; for one thread.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from afield.errors import Unavailable, UsageError

SHOWN = 300
RESET = "/reset_prefix_cache?reset_running_requests=true"
KEEPS = "does not give up what the old weights computed; POST /reset_prefix_cache says success false"
RESET_PAUSES_S = (0.0, 0.05, 0.1, 0.3, 0.5, 1.0, 2.0)  # transfers of blocks that are under way take a while


class _Reset(msgspec.Struct):
    success: bool = True


def was_reset(body: bytes) -> bool:
    """Whether the caches are gone: a server that could not says so with status 200."""
    try:
        return not body or msgspec.json.decode(body, type=_Reset).success
    except msgspec.MsgspecError:
        return False


class VllmTransfer:
    """`with transfer.publishing(7): sender.send_weights()`, where the sender has this as its client."""

    def __init__(self, url: str, *, timeout_s: float = 300.0) -> None:
        self.url, self._timeout_s = url.rstrip("/"), timeout_s
        self._version: int | None = None
        self._touched = False  # the server may hold parts of weights

    @contextmanager
    def publishing(self, version: int) -> Iterator[None]:
        """What is sent meanwhile is this version. It has to have been finished when this is left."""
        self._version = version
        yield
        if self._version is not None:
            raise UsageError(
                f"{self.url}: version {version} was not finished; send the weights before leaving"
            )

    # --- what vLLM's senders call ---------------------------------------------------------------------

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        if self._version is None:
            raise UsageError(f"{self.url}: say which version is sent, with `publishing`")
        self._post("/pause?mode=keep")
        try:
            self._post("/start_weight_update")
        except Unavailable:
            if not self._touched:
                self._post("/resume")
            raise
        self._touched = True

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self._post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        version = weight_version or str(self._version)
        self._post("/finish_weight_update", {"weight_version": version})
        info = msgspec.json.decode(self._ask("GET", "/weight_info"))
        if info.get("weight_version") != version:
            raise Unavailable(f"{self.url} was sent version {version} but says that it has {info}")
        # Calls in flight compute their context anew, so that no token depends on two versions' caches.
        self._reset_cache()
        self._post("/resume")
        self._version, self._touched = None, False

    def _reset_cache(self) -> None:
        for pause_s in RESET_PAUSES_S:
            time.sleep(pause_s)
            if was_reset(self._ask("POST", RESET)):
                return
        raise Unavailable(f"{self.url} {KEEPS}")

    def _post(self, path: str, body: Any = None) -> None:
        self._ask("POST", path, body)

    def _ask(self, method: str, path: str, body: Any = None) -> bytes:
        data = None if body is None else msgspec.json.encode(body)
        headers = {"content-type": "application/json"}
        asked = urllib.request.Request(self.url + path, data=data, headers=headers, method=method)
        try:
            with urllib.request.urlopen(asked, timeout=self._timeout_s) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            with error:
                message = error.read()[:SHOWN].decode(errors="replace")
            raise Unavailable(f"{self.url} answers {error.code} to {path}: {message}") from error
        except OSError as error:
            raise Unavailable(f"{self.url} cannot be asked {path}: {error}") from error
