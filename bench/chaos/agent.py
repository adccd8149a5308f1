"""Agent of the chaos benchmark: a conversation of random length with pauses.

The model's answers decide the length; pauses and reward come from the rollout's seed. Failed model calls are
retried for a minute. Start and end of each session are written to a file, so that the audit knows which
sessions a killed process was running.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import afield
from bench.chaos.engine_script import ENOUGH, question

NOTES = "CHAOS_NOTES"  # environment variable with the path of the file
RETRY_FOR_S = 60.0


class TruncatedAnswer(Exception):
    """A stream ended before its last event."""


@afield.agent
def run(task: dict[str, Any], rollout: afield.Context) -> dict[str, Any]:
    rng = random.Random(rollout.seed)
    note("began", rollout.session_id)
    messages: list[dict[str, str]] = []
    turns = 0
    while not messages or not messages[-1]["content"].startswith(ENOUGH):
        turns += 1
        messages.append({"role": "user", "content": question(turns)})
        messages.append({"role": "assistant", "content": answer(rollout, messages, stream=turns % 2 == 0)})
        time.sleep(rng.expovariate(1 / task["work_s"]))
    note("ended", rollout.session_id, turns=turns)
    return {"reward": rng.random(), "metrics": {"turns": turns}}


def note(event: str, session_id: str, **more: Any) -> None:
    line = json.dumps({"what": event, "session": session_id, "at": time.time(), **more}) + "\n"
    path = Path(os.environ[NOTES])
    with path.open("ab", buffering=0) as file:
        file.write(line.encode())


def answer(rollout: afield.Context, messages: list[dict[str, str]], *, stream: bool) -> str:
    end = time.monotonic() + RETRY_FOR_S
    tries = 0
    while True:
        try:
            return ask(rollout, messages, stream, tries)
        except (OSError, http.client.HTTPException, TruncatedAnswer) as error:
            if isinstance(error, urllib.error.HTTPError) and error.code < 500:
                raise
            if time.monotonic() > end:
                raise
        tries += 1
        time.sleep(min(0.1 * tries, 1.0))


def ask(rollout: afield.Context, messages: list[dict[str, str]], stream: bool, tries: int) -> str:
    body = json.dumps({"model": rollout.model_id, "messages": messages, "stream": stream}).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {rollout.api_key}"}
    headers["x-stainless-retry-count"] = str(tries)
    request = urllib.request.Request(f"{rollout.openai_base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        if stream:
            return streamed(response)
        return json.load(response)["choices"][0]["message"]["content"]


def streamed(response: http.client.HTTPResponse) -> str:
    text = ""
    for line in response:
        data = line.decode().strip().removeprefix("data: ")
        if data == "[DONE]":
            return text
        if data.startswith("{"):
            event = json.loads(data)
            if "error" in event:
                raise TruncatedAnswer(data)
            text += event["choices"][0]["delta"].get("content") or ""
    raise TruncatedAnswer("the stream ended early")
