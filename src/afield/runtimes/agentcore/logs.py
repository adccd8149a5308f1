"""What a session printed, as CloudWatch keeps it: in the log group of its agent runtime and endpoint.

Streams are named by day and session; where they are not, lines that mention the session are found. Lines
arrive some seconds late. Of long logs the end is given.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from afield.errors import Unavailable
from afield.runtimes.agentcore.api import Api, Refused, Silent
from afield.runtimes.agentcore.sessions import Entry

KEPT_CHARACTERS = 64 * 1024
PAGES = 50
LONGEST_DAYS = 2  # a session lives 8 hours at most, and may see midnight


def log_group(entry: Entry) -> str:
    return f"/aws/bedrock-agentcore/runtimes/{entry.arn.rpartition('/')[2]}-{entry.qualifier}"


async def session_log(api: Api, entry: Entry) -> str:
    """Empty where there is none (yet). Raises Unavailable when CloudWatch does not let us see."""
    began = datetime.fromtimestamp(entry.since, UTC)
    days = [f"{began + timedelta(days=n):%Y/%m/%d}" for n in range(LONGEST_DAYS)]
    asked: list[dict[str, Any]] = [
        {"logStreamNamePrefix": f"{day}/[runtime-logs-{entry.name}]"} for day in days
    ]
    if not api.local:
        asked.append({"filterPattern": f'"{entry.name}"', "startTime": int((entry.since - 60) * 1000)})
    try:
        for which in asked:
            if text := await _text(api, logGroupName=log_group(entry), **which):
                return text
    except (Refused, Silent) as error:
        if isinstance(error, Refused) and error.code == "ResourceNotFoundException":
            return ""  # Nothing was ever printed there.
        remedy = "allow logs:FilterLogEvents for these credentials"
        raise Unavailable(
            f"the logs of {entry.session_id} are in {log_group(entry)}: {error}; {remedy}"
        ) from error
    return ""


async def _text(api: Api, **which: Any) -> str:
    text, more = "", {}
    for _ in range(PAGES):
        page = await api.ask("filter_log_events", **which, **more)
        text += "".join(f"{event['message'].rstrip()}\n" for event in page["events"])
        text = text[-KEPT_CHARACTERS:]
        if not page.get("nextToken"):
            break
        more = {"nextToken": page["nextToken"]}
    return text
