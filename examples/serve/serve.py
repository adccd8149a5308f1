"""A trained policy in production: its weights behind a gateway, the same agent in front, one question.

python serve.py ../langgraph-tools/runs/train-.../weights/v16 "How much is the teal lamp?"
"""

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

AGENT = Path(__file__).parent.parent / "langgraph-tools"
SHOP = {"prices": {"red mug": 13, "teal lamp": 38}, "stock": {"red mug": 41, "teal lamp": 27}}


@contextlib.contextmanager
def started(*command: str, **options: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-m", *command], text=True, **options)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def post(url: str, body: dict, key: str = "") -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    request.add_header("Authorization", f"Bearer {key}")
    return json.load(urllib.request.urlopen(request, timeout=60))


def reached(url: str) -> bool:
    with contextlib.suppress(OSError):
        return urllib.request.urlopen(url, timeout=5).status == 200
    return False


def main(weights: str, question: str, port: str = "8080") -> None:
    gateway = ("afield", "gateway", "--model", weights, "--port", "0", "--json")
    with started(*gateway, stdout=subprocess.PIPE) as serving:
        up = json.loads(serving.stdout.readline())
        # One session for all this agent is asked; one for each conversation keeps them apart.
        session = post(f"{up['url']}/sessions", {"sampling": {"temperature": 0}}, up["admin_key"])
        model = {"OPENAI_BASE_URL": f"{session['base_url']}/v1", "OPENAI_API_KEY": session["api_key"]}
        app = ("uvicorn", "app:app", "--port", port, "--log-level", "warning")
        with started(*app, cwd=AGENT, env=os.environ | model) as agent:
            while agent.poll() is None and not reached(f"http://127.0.0.1:{port}/ping"):
                time.sleep(0.2)
            print(post(f"http://127.0.0.1:{port}/invocations", {"question": question, **SHOP})["answer"])


if __name__ == "__main__":
    main(*sys.argv[1:])
