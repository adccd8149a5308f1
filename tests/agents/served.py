"""An App, a plain function and an App without an entrypoint, to be named as targets."""

import afield

app = afield.App()
empty = afield.App()


@app.rollout_entrypoint
def invoke(payload: dict) -> dict:
    return {"reward": payload["value"], "was_whole": "_rollout" in payload}


def plain(task: dict, rollout: afield.Context) -> dict:
    return {"reward": task["value"], "session": rollout.session_id, "was_whole": "_rollout" in task}
