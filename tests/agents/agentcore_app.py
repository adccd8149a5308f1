"""A production AgentCore program that knows nothing of this project: what a container would run."""

import asyncio
import os
import subprocess
import threading
import time
import urllib.error
import urllib.request

from bedrock_agentcore.runtime import BedrockAgentCoreApp
from starlette.responses import JSONResponse

app = BedrockAgentCoreApp()
count = 0


def work(seconds: float, task: int) -> None:
    time.sleep(seconds)
    app.complete_async_task(task)


async def stream(n: int, last: str):
    for i in range(n):
        yield {"n": i}
        await asyncio.sleep(0.01)
    if last == "die":
        os._exit(3)


def reach(url: str) -> dict:
    try:
        with urllib.request.urlopen(url, timeout=3) as answer:
            return {"status": answer.status, "body": answer.read().decode()}
    except urllib.error.HTTPError as error:
        return {"status": error.code}
    except OSError as error:
        return {"error": str(error)}


TOLD = {
    "env": lambda payload, context: dict(os.environ),
    "reach": lambda payload, context: reach(payload["url"]),
    "headers": lambda payload, context: {"headers": context.request_headers or {}},
    "child": lambda payload, context: {"pid": subprocess.Popen(["sleep", "600"]).pid},
}


@app.entrypoint
def main(payload, context):
    global count
    count += 1
    if payload.get("do") in TOLD:
        return TOLD[payload["do"]](payload, context)
    match payload.get("do"):
        case "stream":
            return stream(payload["n"], payload.get("last", ""))
        case "raise":
            raise RuntimeError("the agent's own fault")
        case "die":
            os.write(2, b"going down\n")
            os._exit(3)
        case "sleep":
            time.sleep(payload["seconds"])
        case "background":
            task = app.add_async_task("work")
            threading.Thread(target=work, args=(payload["seconds"], task), daemon=True).start()
        case "refuse":
            return JSONResponse({"no": True}, status_code=payload["status"])
    return {"count": count, "session": context.session_id, "pid": os.getpid(), "payload": payload}


if __name__ == "__main__":
    app.run()
