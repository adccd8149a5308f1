"""SQS notifier: one existing queue, or a created queue per experiment.

1. Dead letters go to `dead_url`, or to the target of the queue's redrive policy; queues created here have
   one. Without either, a dead letter is logged and hidden for an hour.
2. Queues are never purged.
3. Long polls last two seconds, so that a program ends quickly.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import logging
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar

from afield.errors import Unavailable, UsageError
from afield.sdk.stores import aws_client, call_aws
from afield.transports.notifiers.base import LEASE_S, Leased

log = logging.getLogger(__name__)
T = TypeVar("T")

POLL_S = 2
BATCH = 10
MAX_BATCHES = 20
THREADS = 8
RETRY_S = 0.2
HIDDEN_S = 3600
NAME_LIMIT = 80
DEAD = "-dead"
FORTNIGHT_S = "1209600"
# The transport moves dead letters itself; this limit is for messages it never receives.
REDRIVE_AFTER = 100


class SqsNotifier:
    """Hints through the queue at `url`, or through queues named PREFIX-EXPERIMENT."""

    def __init__(
        self,
        url: str | None = None,
        *,
        queue_prefix: str | None = None,
        dead_url: str | None = None,
        endpoint: str | None = None,
        region: str | None = None,
        lease_s: float = LEASE_S,
    ) -> None:
        if (url is None) == (queue_prefix is None):
            raise UsageError("SQS needs the URL of a queue or a prefix for queue names; give one of them")
        self._url = url
        self._prefix = queue_prefix
        self._dead_url = dead_url
        self._endpoint = endpoint
        self._region = region
        self._lease_s = max(1, round(lease_s))
        self._queues: dict[str, str] = {}
        self._dead_of: dict[str, str | None] = {}
        self._lock = threading.Lock()
        self._sqs: Any = None
        self._threads: ThreadPoolExecutor | None = None

    async def __aenter__(self) -> Self:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="sqs")
        self._sqs = aws_client("sqs", endpoint=self._endpoint, region=self._region, pool=THREADS)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None
            self._sqs.close()
            self._sqs = None

    def address(self, exp_id: str) -> dict[str, Any]:
        """Return the queue's URL; creates the queue at the first call."""
        if self._sqs is None:
            raise UsageError("the transport is not open; use it inside 'async with'")
        return {"sqs_url": self._queue(exp_id)}

    async def send(self, exp_id: str, body: bytes) -> None:
        await self._call(self._send, exp_id, body)

    async def lease(self, exp_id: str, wait_s: float) -> list[Leased]:
        loop = asyncio.get_running_loop()
        end = loop.time() + wait_s
        url = await self._call(self._queue, exp_id)
        while True:
            left = end - loop.time()
            # SQS takes whole seconds, and only a poll of at least one second returns when a message arrives.
            leased_messages = await self._call(self._receive, url, exp_id, min(POLL_S, max(0, round(left))))
            left = end - loop.time()
            if leased_messages or left <= 0:
                return leased_messages
            if left < 0.5:
                await asyncio.sleep(min(left, RETRY_S))

    async def extend(self, leased: Leased, seconds: float) -> None:
        await self._call(self._set_visibility, leased, round(seconds))

    async def ack(self, leased: Sequence[Leased]) -> None:
        by_queue: dict[str, list[str]] = {}
        for lease in leased:
            url, handle = lease.receipt
            by_queue.setdefault(url, []).append(handle)
        batches = [
            (url, handles[i : i + BATCH])
            for url, handles in by_queue.items()
            for i in range(0, len(handles), BATCH)
        ]
        for url, handles in batches:
            await self._call(self._delete, url, handles)

    async def remove_queues(self, exp_id: str) -> list[str]:
        """Delete the queues created for an experiment; returns their names."""
        return await self._call(self._remove, exp_id) if self._prefix is not None else []

    async def dead(self, letter: Leased, reason: str) -> None:
        await self._call(self._move_to_dead, letter, reason)

    # --- blocking calls, in threads ------------------------------------------------------------------------

    async def _call(self, work: Callable[..., T], *args: Any) -> T:
        if self._threads is None:
            raise UsageError("the transport is not open; use it inside 'async with'")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, functools.partial(work, *args))

    def _do(self, verb: str, url: str, **fields: Any) -> Any:
        method = getattr(self._sqs, verb)
        try:
            return call_aws(lambda: method(QueueUrl=url, **fields), f"the queue {url}")
        except Unavailable as error:
            if "NonExistentQueue" in str(error) or "QueueDoesNotExist" in str(error):
                # A deleted queue is created again.
                self._queues.clear()
            raise

    def _send(self, exp_id: str, body: bytes) -> None:
        self._do("send_message", self._queue(exp_id), MessageBody=body.decode())

    def _receive(self, url: str, exp_id: str, wait_s: int) -> list[Leased]:
        """Receive all available messages in batches of ten; waits only for the first batch."""
        leased_messages: list[Leased] = []
        for n in range(MAX_BATCHES):
            response = self._do(
                "receive_message",
                url,
                MaxNumberOfMessages=BATCH,
                WaitTimeSeconds=wait_s if n == 0 else 0,
                VisibilityTimeout=self._lease_s,
                MessageSystemAttributeNames=["ApproximateReceiveCount"],
            )
            batch = response.get("Messages", [])
            leased_messages += [self._leased(url, exp_id, message) for message in batch]
            if len(batch) < BATCH:
                break
        return leased_messages

    def _leased(self, url: str, exp_id: str, message: dict[str, Any]) -> Leased:
        times = int(message.get("Attributes", {}).get("ApproximateReceiveCount", 1))
        receipt = url, message["ReceiptHandle"]
        return Leased(exp_id=exp_id, body=message["Body"].encode(), receipt=receipt, times=times)

    def _set_visibility(self, leased: Leased, seconds: int) -> None:
        url, handle = leased.receipt
        self._do("change_message_visibility", url, ReceiptHandle=handle, VisibilityTimeout=seconds)

    def _delete(self, url: str, handles: list[str]) -> None:
        entries = [{"Id": str(i), "ReceiptHandle": handle} for i, handle in enumerate(handles)]
        self._do("delete_message_batch", url, Entries=entries)

    def _move_to_dead(self, letter: Leased, reason: str) -> None:
        url, handle = letter.receipt
        dead_queue = self._dead_queue(url)
        if dead_queue is None:
            log.error("sqs: %s has no dead letter queue; give it a redrive policy, or set dead=URL", url)
            self._set_visibility(letter, HIDDEN_S)
            return
        attribute = {"DataType": "String", "StringValue": reason[:200] or "unknown"}
        body = letter.body.decode("utf-8", "replace")
        self._do("send_message", dead_queue, MessageBody=body, MessageAttributes={"reason": attribute})
        self._delete(url, [handle])

    # --- queues ----------------------------------------------------------------------------------------

    def _queue(self, exp_id: str) -> str:
        if self._url is not None:
            return self._url
        with self._lock:
            if exp_id not in self._queues:
                name = queue_name(self._prefix or "", exp_id)
                dead = self._make(name + DEAD, {"MessageRetentionPeriod": FORTNIGHT_S})
                policy = {"deadLetterTargetArn": self._arn(dead), "maxReceiveCount": REDRIVE_AFTER}
                attributes = {"MessageRetentionPeriod": FORTNIGHT_S, "RedrivePolicy": json.dumps(policy)}
                self._queues[exp_id] = self._make(name, attributes)
                self._dead_of[self._queues[exp_id]] = dead
            return self._queues[exp_id]

    def _remove(self, exp_id: str) -> list[str]:
        name = queue_name(self._prefix or "", exp_id)
        removed: list[str] = []
        for each in (name, name + DEAD):
            try:
                action = f"the queue {each!r}"
                url = call_aws(lambda each=each: self._sqs.get_queue_url(QueueName=each)["QueueUrl"], action)
            except Unavailable as error:
                if "NonExistentQueue" in str(error) or "QueueDoesNotExist" in str(error):
                    continue
                raise
            self._do("delete_queue", url)
            removed.append(each)
        with self._lock:
            self._queues.pop(exp_id, None)
        return removed

    def _make(self, name: str, attributes: dict[str, str]) -> str:
        action = f"cannot create the queue {name!r}"
        return call_aws(
            lambda: self._sqs.create_queue(QueueName=name, Attributes=attributes)["QueueUrl"], action
        )

    def _arn(self, url: str) -> str:
        return self._do("get_queue_attributes", url, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]

    def _dead_queue(self, url: str) -> str | None:
        if self._dead_url is not None:
            return self._dead_url
        if url not in self._dead_of:
            self._dead_of[url] = self._redriven(url)
        return self._dead_of[url]

    def _redriven(self, url: str) -> str | None:
        """Target queue of the queue's redrive policy."""
        try:
            response = self._do("get_queue_attributes", url, AttributeNames=["RedrivePolicy"])
            policy = json.loads(response.get("Attributes", {}).get("RedrivePolicy", "{}"))
            name = str(policy.get("deadLetterTargetArn", "")).rpartition(":")[2]
            action = f"the dead letter queue {name!r} of {url}"
            return (
                call_aws(lambda: self._sqs.get_queue_url(QueueName=name)["QueueUrl"], action)
                if name
                else None
            )
        except Unavailable as error:
            log.warning("sqs: redrive policy of %s cannot be read: %s", url, error)
            return None


def queue_name(prefix: str, exp_id: str) -> str:
    """A valid SQS queue name, of at most 80 characters; changed names end in a digest."""
    plain = f"{prefix}-{exp_id}"
    name = re.sub(r"[^A-Za-z0-9_-]", "_", plain)
    if name == plain and len(name) + len(DEAD) <= NAME_LIMIT:
        return name
    digest = hashlib.sha256(plain.encode()).hexdigest()[:8]
    return f"{name[: NAME_LIMIT - len(DEAD) - 9]}-{digest}"
