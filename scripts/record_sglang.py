"""Record what a running SGLang server answers, for `tests/test_engine_sglang.py` to read.

    python scripts/record_sglang.py http://127.0.0.1:30000 tests/fixtures/sglang

Writes whole.json and stream.json: the request, the reply byte for byte, and what the server says it is.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

PROMPT = [11, 12, 13, 14, 15]


def ask(url: str, body: dict[str, Any] | None = None) -> tuple[str, str]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.read().decode(), answer.headers.get_content_type()


def body(prompt: list[int], stream: bool) -> dict[str, Any]:
    sampling = {"max_new_tokens": 12, "temperature": 0.0, "top_k": -1, "top_p": 1.0, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "stream": stream}


def main(url: str, into: Path) -> None:
    into.mkdir(parents=True, exist_ok=True)
    told = {route: json.loads(ask(url + route)[0]) for route in ("/v1/models", "/model_info")}
    probe = json.loads(ask(url + "/generate", body([1, 2, 3], False))[0])
    whole = json.loads(ask(url + "/generate", body(PROMPT, False))[0])
    for name in ("whole", "stream"):
        asked = body(PROMPT, name == "stream")
        reply, content_type = ask(url + "/generate", asked)
        recorded = {**told, "body": asked, "probe": probe, "reply": reply, "content_type": content_type}
        recorded["output_ids"] = whole["output_ids"]
        (into / f"{name}.json").write_text(json.dumps(recorded, indent=1) + "\n")
        print(f"{into / name}.json: {len(reply)} bytes")


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"), Path(sys.argv[2]))
