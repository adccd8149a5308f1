"""The agent of bench/chaos.py: it talks with the model until that has enough, and works a little in between.

How long it takes is the model's to say, and drawn as a model's words are drawn; its own work and its
reward are drawn from the rollout's seed. A model that does not answer is asked again for a minute, as a
client with retries does. What it began and ended is written to a file of its process, so that the bench
knows what died with one.
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

from chaos_script import ENOUGH, question

import afield

NOTES = "CHAOS_NOTES"  # names the file, in the environment
PATIENCE_S = 60.0


class Cut(Exception):
    """The answer did not come to its end."""


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


def note(what: str, session_id: str, **more: Any) -> None:
    line = json.dumps({"what": what, "session": session_id, "at": time.time(), **more}) + "\n"
    path = Path(os.environ[NOTES])
    with path.open("ab", buffering=0) as file:
        file.write(line.encode())


def answer(rollout: afield.Context, messages: list[dict[str, str]], *, stream: bool) -> str:
    end = time.monotonic() + PATIENCE_S
    tries = 0
    while True:
        try:
            return ask(rollout, messages, stream, tries)
        except (OSError, http.client.HTTPException, Cut) as error:
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
                raise Cut(data)
            text += event["choices"][0]["delta"].get("content") or ""
    raise Cut("the stream ended early")
