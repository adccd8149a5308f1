"""Client of a Harbor server, and the agent that uses it.

    afield train --agent harbor-server --set agent_args.url=http://HOST:PORT --tasks DIR --model MODEL

1. A run is submitted and polled with short requests; no request stays open for the episode. A server that
   does not answer is asked again for `unavailable_timeout_s`.
2. The task directory travels as a tar.gz. With `tasks`, a server keeps it by digest and gets it once.
3. The key of a run is its session id. With `keys`, a repeated submission returns the same run: a client that
   was restarted goes on polling. Without, a submission whose answer is lost is not repeated, because its run
   may have started: the attempt fails.
4. A run whose agent is cancelled, or that the client gives up, is cancelled.

docs/reference/harbor-server.md has the protocol.
"""

from __future__ import annotations

import asyncio
import io
import logging
import re
import tarfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec
from msgspec import Struct

from afield.datasets.harbor import HarborTask, read_task, task_directory
from afield.errors import InfrastructureFailure, TaskFailure, UsageError, VerifierFailure
from afield.harbor.failures import trial_failure
from afield.harbor.trial import TrialArguments, agent_config
from afield.sdk.agent import Context, agent
from afield.types import Reason
from afield.utils.backoff import Backoff

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger(__name__)
RUNS = "/api/v1/runs/async"
TASKS = "/api/v1/tasks"
CAPABILITIES = "/api/v1/capabilities"
ENDED = ("completed", "failed", "timeout", "cancelled")
REQUEST_S = 30.0
UPLOAD_S = 600.0
CANCEL_S = 15.0
"""Time limit of cancelling a run, in seconds."""
T = TypeVar("T")


class ServerArguments(TrialArguments, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arguments of the agent, `agent_args`."""

    url: str
    """Address of the server."""
    token: str = ""
    """Bearer token of the server; empty for none."""
    poll_interval_s: float = 2.0
    """Seconds between two polls of a run."""
    unavailable_timeout_s: float = 300.0
    """Seconds for which a server that does not answer is asked again."""
    run_timeout_s: float = 3600.0
    """Seconds after which a run is cancelled."""


class RunRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Submission of one run, the `metadata` of the protocol."""

    job_id: str
    """Name under which the server lists related runs: the group."""
    task_id: str
    """Key of the run: the session id."""
    task_path: str
    """Path of the task on the client, for logs."""
    agent: dict[str, Any]
    """Harbor's AgentConfig."""
    llm_proxy_url: str
    """Base URL of the model."""
    timeout_multiplier: float = 1.0
    """Factor of the task's time limits."""
    task_digest: str = ""
    """Digest of a task that the server has; empty if the archive comes with the request."""


class RunResponse(Struct, frozen=True, kw_only=True):
    """Status or result of a run."""

    run_id: str
    """Id that the server gave to the run."""
    status: str
    """pending, running, completed, failed, timeout or cancelled."""
    rewards: dict[str, float] | None = None
    """Rewards by name; None without a verifier result."""
    error: str | None = None
    """Message of the exception that ended the trial."""
    exception_type: str = ""
    """Type of that exception; not part of the published protocol."""
    rollout_details: list[dict[str, Any]] | None = None
    """Token ids and log-probabilities that Harbor collected."""


class ServerCapabilities(Struct, frozen=True, kw_only=True):
    """Additions to the published protocol that a server has."""

    tasks: bool = False
    """Tasks are kept by digest."""
    keys: bool = False
    """The key of a run is its id; submitting it again returns the run."""
    cancel: bool = False
    """Runs can be cancelled; with `keys`, also before their submission arrives."""
    batch: bool = False
    """Several runs can be submitted in one request."""


class _Submitted(Struct, frozen=True, kw_only=True):
    run_id: str | int


class HarborServer:
    """Client of one server."""

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        poll_interval_s: float = 2.0,
        unavailable_timeout_s: float = 300.0,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"Harbor server {url!r} must be an address, such as http://10.0.0.7:8080")
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._poll_interval_s = poll_interval_s
        self._unavailable_timeout_s = unavailable_timeout_s
        self._http: aiohttp.ClientSession | None = None
        self.capabilities = ServerCapabilities()

    async def __aenter__(self) -> Self:
        try:
            import aiohttp
        except ModuleNotFoundError as error:
            raise UsageError("a Harbor server needs aiohttp: pip install 'afield[gateway]'") from error
        self._http = aiohttp.ClientSession(headers=self._headers)
        try:
            status, body = await self._request("GET", CAPABILITIES)
            if status == 200:  # other servers have the published protocol alone
                self.capabilities = self._decoded(body, CAPABILITIES, ServerCapabilities)
        except BaseException:
            await self._http.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._http is not None
        await self._http.close()

    async def submit(self, request: RunRequest, task: HarborTask) -> str:
        """Submit a run; returns its id. With `keys`, repeating is harmless, a lost submission is undone.

        Raises InfrastructureFailure if the server does not answer; without `keys` after the first request
        that may have reached it.
        """
        try:
            return await self._submit(request, task)
        except (asyncio.CancelledError, InfrastructureFailure):
            if self.capabilities.keys:
                await self.cancel(request.task_id)
            raise

    async def _submit(self, request: RunRequest, task: HarborTask) -> str:
        import aiohttp

        if self.capabilities.tasks:
            await self.upload(task)
            keyed = msgspec.structs.replace(request, task_digest=task.digest)
            body = await self._checked("POST", RUNS, data=_form(keyed, b"", aiohttp))
        else:
            archive = await asyncio.to_thread(pack_task, task.path)
            form = _form(request, archive, aiohttp)
            body = await self._checked("POST", RUNS, data=form, timeout_s=UPLOAD_S)
        return str(self._decoded(body, RUNS, _Submitted).run_id)

    async def submit_batch(self, runs: Sequence[tuple[RunRequest, HarborTask]]) -> list[str]:
        """Submit several runs; returns their ids in order. Each task is uploaded once."""
        if not (self.capabilities.batch and self.capabilities.tasks):
            return [await self.submit(request, task) for request, task in runs]
        for task in {task.digest: task for _, task in runs}.values():
            await self.upload(task)
        requests = [msgspec.structs.replace(request, task_digest=task.digest) for request, task in runs]
        body = await self._checked("POST", f"{RUNS}/batch", data=lambda: msgspec.json.encode(requests))
        return [str(run.run_id) for run in self._decoded(body, f"{RUNS}/batch", list[_Submitted])]

    async def upload(self, task: HarborTask) -> bool:
        """Send a task to a server that keeps tasks; returns False if it has it already."""
        path = f"{TASKS}/{task.digest}"
        if (await self._request("HEAD", path))[0] == 200:
            return False
        archive = await asyncio.to_thread(pack_task, task.path)
        await self._checked("PUT", path, data=lambda: archive, timeout_s=UPLOAD_S)
        return True

    async def wait(self, run_id: str, timeout_s: float = 3600.0) -> RunResponse:
        """Poll a run until it has ended, and fetch its result.

        Raises InfrastructureFailure if the server does not know the run, does not answer, or the run takes
        longer than `timeout_s`. A run whose end is not waited for is cancelled.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    run = await self._read(f"{RUNS}/{run_id}/status", run_id)
                    if run.status in ENDED:
                        return await self._read(f"{RUNS}/{run_id}/result", run_id)
                    await asyncio.sleep(self._poll_interval_s)
        except TimeoutError as error:
            await self.cancel(run_id)
            raise InfrastructureFailure(
                f"run {run_id} of {self._url} did not end within {timeout_s:g} s", Reason.TIMEOUT
            ) from error
        except (asyncio.CancelledError, InfrastructureFailure):
            await self.cancel(run_id)
            raise

    async def cancel(self, run_id: str) -> None:
        """Cancel a run, if the server can; one that has ended stays as it is.

        Takes at most CANCEL_S, and completes if the caller is cancelled. A failure is logged.
        """
        if not self.capabilities.cancel:
            return
        cancelling = asyncio.create_task(self._cancel(run_id))
        try:
            await asyncio.shield(cancelling)
        except asyncio.CancelledError:
            while not cancelling.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([cancelling])
            raise

    async def _cancel(self, run_id: str) -> None:
        try:
            async with asyncio.timeout(CANCEL_S):
                await self._request("DELETE", f"{RUNS}/{run_id}")
        except (TimeoutError, InfrastructureFailure) as error:
            log.warning("harbor server %s: run %s was not cancelled: %s", self._url, run_id, error)

    async def _read(self, path: str, run_id: str) -> RunResponse:
        status, body = await self._request("GET", path)
        if status == 404:
            raise InfrastructureFailure(f"{self._url} does not know the run {run_id}", Reason.DIED)
        _check(status, body, path)
        fields = self._decoded(body, path, dict[str, Any])
        return self._decoded(msgspec.json.encode({"run_id": run_id, **fields}), path, RunResponse)

    def _decoded(self, body: bytes, path: str, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.MsgspecError, ValueError) as error:
            raise InfrastructureFailure(
                f"{self._url}{path} does not answer as a Harbor server: {error}: {_text(body)[:200]}",
                Reason.LAUNCH,
            ) from error

    async def _checked(self, method: str, path: str, *, data: Any, timeout_s: float = REQUEST_S) -> bytes:
        status, body = await self._request(method, path, data, timeout_s)
        _check(status, body, path)
        return body

    async def _request(
        self, method: str, path: str, data: Any = None, timeout_s: float = REQUEST_S
    ) -> tuple[int, bytes]:
        """Send one request; repeats it while the server is unavailable. `data` builds its body.

        A submission to a server without `keys` is repeated only if the server cannot have started its run.
        """
        import aiohttp

        assert self._http is not None
        pause = Backoff(0.5, 10.0, jitter=True)
        limit = aiohttp.ClientTimeout(total=timeout_s)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._unavailable_timeout_s
        repeatable = method != "POST" or self.capabilities.keys
        while True:
            try:
                body = data() if data else None
                async with self._http.request(method, self._url + path, data=body, timeout=limit) as response:
                    content = await response.read()
                if response.status not in (429, 502, 503, 504):
                    return response.status, content
                problem, processed = f"HTTP {response.status}", response.status != 429
            except aiohttp.ClientConnectorError as error:  # nothing was sent
                problem, processed = f"{type(error).__name__}: {error}", False
            except (aiohttp.ClientError, TimeoutError) as error:
                problem, processed = f"{type(error).__name__}: {error}", True
            if processed and not repeatable:
                raise InfrastructureFailure(
                    f"the answer of {self._url}{path} was lost ({problem}); the server may have started the"
                    " run, and does not recognise a repeated submission (capability 'keys')",
                    Reason.LAUNCH,
                )
            if loop.time() > deadline:
                raise InfrastructureFailure(
                    f"the Harbor server at {self._url} does not answer: {problem}", Reason.LAUNCH
                )
            await pause.sleep()


def _form(request: RunRequest, archive: bytes, http: Any) -> Any:
    """Builder of a multipart body; a body can be sent once."""

    def build() -> Any:
        form = http.FormData()
        form.add_field("metadata", msgspec.json.encode(request).decode())
        if archive:
            form.add_field("task_archive", archive, filename="task.tar.gz", content_type="application/gzip")
        return form

    return build


def _check(status: int, body: bytes, path: str) -> None:
    if status >= 500:
        raise InfrastructureFailure(f"Harbor server: {path}: HTTP {status}: {_text(body)}", Reason.LAUNCH)
    if status >= 400:
        raise TaskFailure(f"the Harbor server refuses {path}: HTTP {status}: {_text(body)}", Reason.LAUNCH)


def _text(body: bytes) -> str:
    return body.decode(errors="replace")[:2000]


def pack_task(path: Path) -> bytes:
    """A task directory as tar.gz, below a folder of its name."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as archive:
        archive.add(path, arcname=path.name)
    return buffer.getvalue()


# --- agent ---------------------------------------------------------------------------------------


@agent
async def run(task: dict[str, Any], rollout: Context) -> dict[str, Any]:
    """Have a Harbor server run the trial, and return its rewards."""
    try:
        args = msgspec.convert(dict(rollout.args), ServerArguments)
        server = HarborServer(
            args.url,
            token=args.token,
            poll_interval_s=args.poll_interval_s,
            unavailable_timeout_s=args.unavailable_timeout_s,
        )
        root = Path(args.tasks) if args.tasks else None
        harbor_task = read_task(task_directory(task, root=root, template=args.template))
    except msgspec.ValidationError as error:
        raise TaskFailure(f"agent_args: {error}", Reason.LAUNCH) from error
    except UsageError as error:
        raise TaskFailure(str(error), Reason.LAUNCH) from error
    request = RunRequest(
        job_id=rollout.group_id,
        task_id=rollout.session_id,
        task_path=str(harbor_task.path),
        agent=agent_config(args, rollout),
        llm_proxy_url=rollout.openai_base_url,
    )
    async with server:
        run_id = await server.submit(request, harbor_task)
        return read_response(await server.wait(run_id, args.run_timeout_s))


def read_response(response: RunResponse) -> dict[str, Any]:
    """Rewards of a run; raises the failure of one that has none. A failure never becomes a reward."""
    rewards = response.rewards
    if response.status in ("completed", "timeout") and rewards:
        if "reward" not in rewards and len(rewards) > 1:
            message = f"none of the rewards {sorted(rewards)} is named 'reward'"
            raise VerifierFailure(f"{message}; tests/test.sh must write one with this name", Reason.REWARD)
        reward = rewards.get("reward", next(iter(rewards.values())))
        return {"reward": reward, "metrics": rewards, "stop_reason": response.exception_type}
    message = response.error or f"the run ended as {response.status} without rewards"
    named = re.match(r"(?:\w+\.)*([A-Z]\w+): ", message)
    if response.status == "timeout":
        raise trial_failure("AgentTimeoutError", message)
    if response.status == "cancelled":
        raise trial_failure("CancelledError", message)
    raise trial_failure(response.exception_type or (named[1] if named else "TrialError"), message)
