"""Weight transfer from a trainer to a vLLM server (NCCL, CUDA IPC).

1. vLLM's trainer-side engines move the tensors; they call the four protocol methods of `VllmTransfer`.
2. `VllmTransfer` pauses generation during the transfer and labels the version, so that no token is sampled
   from half of the weights.
3. After a failed transfer the server stays paused, because it may hold parts of the weights: send them again.
4. Publish the version to the gateway afterwards, with `publish` and no path.

Blocking and not thread-safe.
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
KEEPS = "keeps its prefix cache of the old weights: POST /reset_prefix_cache fails; start it again"
RESET_PAUSES_S = (0.0, 0.05, 0.1, 0.3, 0.5, 1.0, 2.0)  # the reset fails while block transfers are running


class _Reset(msgspec.Struct):
    success: bool = True


def was_reset(body: bytes) -> bool:
    """Whether the caches were reset; vLLM reports failure in the body, with status 200."""
    try:
        return not body or msgspec.json.decode(body, type=_Reset).success
    except msgspec.MsgspecError:
        return False


class VllmTransfer:
    """Client of vLLM's weight sender: `with transfer.publishing(7): sender.send_weights()`."""

    def __init__(self, url: str, *, timeout_s: float = 300.0) -> None:
        self.url, self._timeout_s = url.rstrip("/"), timeout_s
        self._version: int | None = None
        self._touched = False  # whether the server may hold parts of new weights

    @contextmanager
    def publishing(self, version: int) -> Iterator[None]:
        """Label the weights sent inside the block; raises UsageError if the transfer is not finished."""
        self._version = version
        yield
        if self._version is not None:
            raise UsageError(
                f"{self.url}: version {version} was not sent; send it inside `with transfer.publishing(...)`"
            )

    # --- protocol of vLLM's weight senders ----------------------------------------------------------

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Pause generation and start an update; resumes on failure unless earlier parts were sent."""
        if self._version is None:
            raise UsageError(
                f"{self.url}: the version of the weights is unknown; send them inside"
                " `with transfer.publishing(version)`"
            )
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
        """Finish the update, check the version label, reset the caches and resume generation."""
        version = weight_version or str(self._version)
        self._post("/finish_weight_update", {"weight_version": version})
        info = msgspec.json.decode(self._ask("GET", "/weight_info"))
        if info.get("weight_version") != version:
            raise Unavailable(f"{self.url} was sent version {version} but says that it has {info}")
        # Running calls recompute their context, so that no token depends on the caches of two versions.
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
        request = urllib.request.Request(self.url + path, data=data, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            with error:
                message = error.read()[:SHOWN].decode(errors="replace")
            raise Unavailable(f"{self.url} answers {error.code} to {path}: {message}") from error
        except OSError as error:
            raise Unavailable(f"{self.url} does not answer {path}: {error}") from error
