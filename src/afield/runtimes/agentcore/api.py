"""AWS clients for Bedrock AgentCore, and the mapping of their errors.

1. Calls block, so they run in threads. Calls that start sessions have a pool sized for the start rate during
a cold start; all others have a small one, so that a stop never waits behind a start.
2. botocore does not retry; the caller limits the rate.
3. A server on this machine gets dummy credentials.
"""

from __future__ import annotations

import asyncio
import functools
import math
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from afield.errors import AfieldError, InfrastructureFailure, RateLimited, TaskFailure, UsageError
from afield.runtimes.invocations import WRONG_SERVER
from afield.settings.runtimes import AgentCoreOptions
from afield.types import Reason

T = TypeVar("T")
CONNECT_S = 10.0
# Time for an agent's answer beyond a cold start, in seconds; agents answer before their work.
ANSWER_S = 60.0
QUOTA_S = 5.0
COLD_START_MARGIN = 1.5  # keeps the start rate if cold starts take longer than configured
MAX_THREADS = 2000
ANSWER_BYTES = 64 * 1024
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
LOCAL_REGION = "us-west-2"
EXTRA = "the agentcore runtime needs boto3: pip install 'afield[aws]'"
CREDENTIALS = (
    "there are no AWS credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, choose a profile with"
    " AWS_PROFILE, or run where a role gives them; for a server on this machine give its endpoint_url"
)
AGENT_SAID = re.compile(r"error \((\d{3})\)|status(?: code)?:? (\d{3})", re.IGNORECASE)
ThreadPoolName = Literal["start", "other"]
_client_lock = threading.Lock()


class AgentCoreRefused(AfieldError):
    """The service answered with an error."""

    def __init__(self, message: str, status: int, code: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


class AgentCoreNoAnswer(AfieldError):
    """There is no answer or an unreadable one; it is unknown whether the call arrived."""


class AgentCoreApi:
    """boto3 clients, created at first use; call `close` when done.

    `read_s` is the read timeout in seconds; None derives it from the cold start time.
    """

    def __init__(self, options: AgentCoreOptions, *, read_s: float | None = None) -> None:
        self._options = options
        self._read_s = read_s or COLD_START_MARGIN * options.cold_start_s + ANSWER_S
        starts = math.ceil(COLD_START_MARGIN * options.rate * max(1.0, options.cold_start_s))
        sizes = {"start": min(MAX_THREADS, starts), "other": max(4, math.ceil(2 * options.stop_rate))}
        self._connections = sum(sizes.values())
        self._clients: dict[str, Any] = {}
        self._threads = {pool: ThreadPoolExecutor(n, f"agentcore-{pool}") for pool, n in sizes.items()}

    @property
    def local(self) -> bool:
        """Whether the service is a server on this machine."""
        return urlsplit(self._options.endpoint_url).hostname in LOOPBACK

    def close(self) -> None:
        for executor in self._threads.values():
            executor.shutdown(wait=False, cancel_futures=True)

    async def check(self) -> None:
        """Create the clients; raises UsageError if that fails, e.g. without credentials."""
        await self.threaded("other", lambda: (self.data, self.control))

    async def ask(
        self, operation: str, *, pool: ThreadPoolName = "other", **arguments: Any
    ) -> dict[str, Any]:
        """Make one call; raises AgentCoreRefused, AgentCoreNoAnswer or UsageError."""
        service = "control" if operation in CONTROL else "logs" if operation in LOGS else "data"
        return await self.threaded(
            pool,
            lambda: translate_errors(
                operation, lambda: getattr(getattr(self, service), operation)(**arguments)
            ),
        )

    async def invoke(self, **arguments: Any) -> bytes:
        """Start a session with a payload; returns up to ANSWER_BYTES bytes of the agent's answer."""
        return await self.threaded(
            "start", lambda: translate_errors("invoke_agent_runtime", lambda: self._invoke(arguments))
        )

    def _invoke(self, arguments: dict[str, Any]) -> bytes:
        with self.data.invoke_agent_runtime(**arguments)["response"] as answer:
            return answer.read(ANSWER_BYTES)

    async def threaded(self, pool: ThreadPoolName, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads[pool], work)

    # boto3 clients have no static types; threads share one client per service.

    @property
    def data(self) -> Any:
        return self._once("bedrock-agentcore")

    @property
    def control(self) -> Any:
        return self._once("bedrock-agentcore-control")

    @property
    def logs(self) -> Any:
        return self._once("logs")

    def _once(self, service: str) -> Any:
        with _client_lock:
            if service not in self._clients:
                self._clients[service] = self._client(service)
            return self._clients[service]

    def _client(self, service: str) -> Any:
        try:
            from botocore.config import Config
            from botocore.exceptions import BotoCoreError
        except ImportError as error:
            raise UsageError(EXTRA) from error
        config = Config(
            connect_timeout=CONNECT_S,
            read_timeout=self._read_s,
            retries={"mode": "standard", "total_max_attempts": 1},
            max_pool_connections=self._connections,
            tcp_keepalive=True,
        )
        try:
            session = _session(self._region(), local=self.local)
            if session.get_credentials() is None:
                raise UsageError(CREDENTIALS)
            return session.client(service, endpoint_url=self._options.endpoint_url or None, config=config)
        except ImportError as error:
            raise UsageError(EXTRA) from error
        except (BotoCoreError, ValueError) as error:
            raise UsageError(f"no {service} client: {error}; set region, or AWS_REGION") from error

    def _region(self) -> str:
        region = self._options.region or (self._options.arn.split(":") + [""] * 4)[3]
        return region or (LOCAL_REGION if self.local else "")


@functools.cache
def _session(region: str, *, local: bool) -> Any:
    """boto3 session of all clients: it caches service models, which load slowly."""
    import boto3

    keys = {"aws_access_key_id": "local", "aws_secret_access_key": "local"} if local else {}
    return boto3.Session(region_name=region or None, **keys)


CONTROL = frozenset(
    {
        "create_agent_runtime",
        "get_agent_runtime",
        "get_agent_runtime_endpoint",
        "list_agent_runtimes",
        "update_agent_runtime",
    }
)
LOGS = frozenset({"filter_log_events"})


def translate_errors(what: str, call: Callable[[], T]) -> T:
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, ParamValidationError

    try:
        return call()
    except ClientError as error:
        raise _refused(what, error.response) from error
    except NoCredentialsError as error:
        raise UsageError(CREDENTIALS) from error
    except ParamValidationError as error:
        raise AgentCoreRefused(f"{what}: {error}", 400, "ValidationException", None) from error
    except (BotoCoreError, OSError) as error:
        raise AgentCoreNoAnswer(f"{what}: {type(error).__name__}: {error}") from error


def _refused(what: str, response: Any) -> AgentCoreRefused:
    meta, details = response.get("ResponseMetadata", {}), response.get("Error", {})
    status, code = int(meta.get("HTTPStatusCode", 0)), str(details.get("Code", ""))
    message = f"{what} was answered {status} {code}: {details.get('Message', '')}"
    return AgentCoreRefused(
        message, status, code, _seconds(meta.get("HTTPHeaders", {}).get("retry-after", ""))
    )


def _seconds(text: str) -> float | None:
    try:
        return max(0.0, float(text))
    except ValueError:
        return None


def launch_error(error: AgentCoreRefused | AgentCoreNoAnswer, session_id: str, arn: str) -> AfieldError:
    """Map the error of a launch or stop to a failure or rate limit, with a remedy."""
    message = f"{session_id}: {error}"
    if isinstance(error, AgentCoreNoAnswer):
        return InfrastructureFailure(f"{message}; whether the session began is not known", Reason.LAUNCH)
    match error.status:
        case 429:
            return RateLimited(message, error.retry_after_s)
        case 402:
            # A quota frees up only when sessions end, which takes longer than a rate limit.
            return RateLimited(f"{message}; set sessions to the quota", error.retry_after_s or QUOTA_S)
        case 409:
            return RateLimited(message, error.retry_after_s)
        case 424:
            return _agent_error(message, str(error))
        case 400:
            return TaskFailure(message, Reason.LAUNCH)
        case 401 | 403:
            remedy = "allow bedrock-agentcore:InvokeAgentRuntime and StopRuntimeSession for these credentials"
            return InfrastructureFailure(f"{message}; {remedy}", Reason.LAUNCH)
        case 404:
            remedy = "is arn right, is the runtime READY, and does it have the endpoint of this qualifier?"
            return InfrastructureFailure(f"{message}; {arn}: {remedy}", Reason.LAUNCH)
    return InfrastructureFailure(message, Reason.LAUNCH)


def _agent_error(message: str, reply: str) -> AfieldError:
    """Map the status of the agent's own server, which the service reports as text."""
    match = AGENT_SAID.search(reply)
    status = int(match[1] or match[2]) if match else 0
    if status in (429, 503):
        return RateLimited(message)
    kind = TaskFailure if 400 <= status < 500 and status not in WRONG_SERVER else InfrastructureFailure
    return kind(message, Reason.LAUNCH)
