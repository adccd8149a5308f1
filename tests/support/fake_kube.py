"""A Kubernetes API server for tests: real HTTP, in this process, with nodes that run real processes.

Faithful on: 401, 403 and access reviews; 409 for duplicates; label selectors; lists in pages; versions,
watches with bookmarks that go on where they were, 410 after a compaction; Status bodies; quotas; background
and foreground deletion; deadlines and TTL; pod logs and the pod proxy. It knows one namespace, Jobs and
their pods, and nothing of storage, networks or other controllers.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from support.fake_kube_nodes import Nodes
from support.fake_kube_store import Json, Problem, Store, check_job

NAMESPACE = "agents"
TOKEN = "not-a-secret"
BOOKMARK_S = 0.2
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FakeKube:
    """`tls` is a certificate that signed itself, and its key, in PEM files."""

    def __init__(self, folder: Path, tls: tuple[Path, Path] | None = None) -> None:
        self.tls = tls
        self.store = Store()
        self.nodes = Nodes(self.store, folder)
        self.folder = folder
        self.url = ""
        self.denied: set[tuple[str, str]] = set()  # (verb, resource)
        self.quota_jobs: int | None = None
        self.named: dict[str, set[str]] = {
            "serviceaccounts": {"default"},
            "secrets": set(),
            "runtimeclasses": set(),
        }
        self.refuse: list[tuple[str, int]] = []  # (method, status): each for one request to come
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.bodies: list[Json] = []
        self.down = False
        self.expired_pages = 0  # how many requests for a further page come too late
        self._watches: dict[int, web.Request] = {}

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kubeconfig"

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[FakeKube]:
        self.folder.mkdir(parents=True, exist_ok=True)
        app = web.Application(middlewares=[self._guarded], client_max_size=2**27)
        jobs, core = "/apis/batch/v1/namespaces/{ns}/jobs", "/api/v1/namespaces/{ns}"
        app.add_routes(
            [
                web.get("/version", self._version),
                web.post("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", self._review),
                web.get(jobs, self._jobs),
                web.post(jobs, self._create_job),
                web.get(f"{jobs}/{{name}}", self._job),
                web.delete(f"{jobs}/{{name}}", self._delete_job),
                web.get(core, self._namespace),
                web.get(f"{core}/pods", self._pods),
                web.get(f"{core}/events", self._events),
                web.get(f"{core}/pods/{{name}}/log", self._log),
                web.route("*", f"{core}/pods/{{name}}:{{port}}/proxy/{{tail:.*}}", self._proxy),
                web.get(f"{core}/{{kind:serviceaccounts|secrets}}/{{name}}", self._named),
                web.get("/apis/node.k8s.io/v1/{kind:runtimeclasses}/{name}", self._named),
            ]
        )
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        self._http = aiohttp.ClientSession()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=self._secured()).start()
            scheme = "https" if self.tls else "http"
            self.url = f"{scheme}://127.0.0.1:{runner.addresses[0][1]}"
            self.kubeconfig.write_text(json.dumps(self._config()))
            yield self
        finally:
            await self.nodes.close()
            self.drop_watches()
            await self._http.close()
            await runner.cleanup()

    def drop_watches(self) -> None:
        """As when a connection is cut: no last word."""
        for request in list(self._watches.values()):
            if request.transport is not None:
                request.transport.abort()
        self._watches.clear()
        self.store.wake()

    @property
    def watches(self) -> int:
        return len(self._watches)

    def pod_of(self, session_id: str) -> str:
        [pod] = [
            name
            for name, pod in self.store.items["pods"].items()
            if pod["metadata"]["annotations"].get("afield.session") == session_id
        ]
        return pod

    def _secured(self) -> ssl.SSLContext | None:
        if self.tls is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*self.tls)
        return context

    def _config(self) -> Json:
        context = {"cluster": "fake", "user": "tester"}
        trusted: Json = {}
        if self.tls is not None:
            trusted["certificate-authority-data"] = base64.b64encode(self.tls[0].read_bytes()).decode()
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": {"server": self.url, **trusted}}],
            "users": [{"name": "tester", "user": {"token": TOKEN}}],
            "contexts": [{"name": "fake", "context": context}],
        }

    # --- who may what ------------------------------------------------------------------------------

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.requests.append((request.method, request.path, dict(request.query)))
        if self.down and request.transport is not None:
            request.transport.abort()
            return web.Response()
        try:
            if request.headers.get("Authorization") != f"Bearer {TOKEN}":
                raise Problem(401, "Unauthorized", "Unauthorized")
            for refused in self.refuse:
                if refused[0] == request.method:
                    self.refuse.remove(refused)
                    raise Problem(refused[1], "", "told to refuse")
            if request.match_info.get("ns", NAMESPACE) != NAMESPACE and "jobs" in request.path:
                raise Problem(404, "NotFound", f'namespaces "{request.match_info["ns"]}" not found')
            return await handler(request)
        except Problem as problem:
            headers = {"Retry-After": "1"} if problem.code == 429 else {}
            return web.json_response(status_of(problem), status=problem.code, headers=headers)

    def _allow(self, verb: str, resource: str) -> None:
        if (verb, resource) in self.denied:
            message = f'{resource} is forbidden: User "tester" cannot {verb} resource "{resource}"'
            raise Problem(403, "Forbidden", message)

    async def _review(self, request: web.Request) -> web.Response:
        asked = (await request.json())["spec"]["resourceAttributes"]
        resource = "/".join(part for part in (asked["resource"], asked.get("subresource")) if part)
        allowed = (asked["verb"], resource) not in self.denied
        return web.json_response(
            {"kind": "SelfSubjectAccessReview", "status": {"allowed": allowed}}, status=201
        )

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"major": "1", "minor": "34"})

    async def _namespace(self, request: web.Request) -> web.Response:
        if request.match_info["ns"] != NAMESPACE:
            raise Problem(404, "NotFound", f'namespaces "{request.match_info["ns"]}" not found')
        return web.json_response({"kind": "Namespace", "metadata": {"name": NAMESPACE}})

    async def _named(self, request: web.Request) -> web.Response:
        kind, name = request.match_info["kind"], request.match_info["name"]
        self._allow("get", kind)
        if name not in self.named[kind]:
            raise Problem(404, "NotFound", f'{kind} "{name}" not found')
        return web.json_response({"kind": "PartialObjectMetadata", "metadata": {"name": name}})

    # --- Jobs ----------------------------------------------------------------------------------------

    async def _create_job(self, request: web.Request) -> web.Response:
        self._allow("create", "jobs")
        job = await request.json()
        check_job(job)
        name = job["metadata"]["name"]
        if self.quota_jobs is not None and len(self.store.items["jobs"]) >= self.quota_jobs:
            limit = f"limited: count/jobs.batch={self.quota_jobs}"
            raise Problem(403, "Forbidden", f'jobs.batch "{name}" is forbidden: exceeded quota: q, {limit}')
        if request.query.get("dryRun") == "All":
            return web.json_response(job, status=201)
        made = self.make_job(job)
        self.bodies.append(job)
        return web.json_response(made, status=201)

    def make_job(self, job: Json) -> Json:
        made = self.store.create("jobs", job)
        self.nodes.spawn(self.nodes.job(dict(made)))
        return made

    async def _job(self, request: web.Request) -> web.Response:
        self._allow("get", "jobs")
        return web.json_response(self.store.get("jobs", request.match_info["name"]))

    async def _delete_job(self, request: web.Request) -> web.Response:
        self._allow("delete", "jobs")
        options: Json = await request.json() if request.can_read_body else {}
        # Without a word, the old default for Jobs leaves their pods behind.
        how = options.get("propagationPolicy", "Orphan")
        uid = options.get("preconditions", {}).get("uid", "")
        job = await self.nodes.delete_job(request.match_info["name"], how, uid)
        return web.json_response(
            {"kind": "Status", "status": "Success", "details": {"name": job["metadata"]["name"]}}
        )

    async def _jobs(self, request: web.Request) -> web.StreamResponse:
        return await self._list_or_watch(request, "jobs")

    async def _pods(self, request: web.Request) -> web.StreamResponse:
        return await self._list_or_watch(request, "pods")

    async def _events(self, request: web.Request) -> web.StreamResponse:
        return await self._list_or_watch(request, "events")

    # --- lists and watches -----------------------------------------------------------------------------

    async def _list_or_watch(self, request: web.Request, kind: str) -> web.StreamResponse:
        if request.query.get("watch") in ("1", "true"):
            self._allow("watch", kind)
            return await self._watch(request, kind)
        self._allow("list", kind)
        query = request.query
        found = self.store.select(kind, query.get("labelSelector", ""), query.get("fieldSelector", ""))
        if "continue" in query and self.expired_pages:
            self.expired_pages -= 1
            raise Problem(410, "Expired", "The provided continue parameter is too old")
        start, limit = int(query.get("continue", "0")), int(query.get("limit", "0"))
        page = found[start : start + limit] if limit else found
        meta = {"resourceVersion": str(self.store.version)}
        if limit and start + limit < len(found):
            meta["continue"] = str(start + limit)
        return web.json_response({"kind": "List", "metadata": meta, "items": page})

    async def _watch(self, request: web.Request, kind: str) -> web.StreamResponse:
        query, labels = request.query, request.query.get("labelSelector", "")
        at = int(query.get("resourceVersion", self.store.version))
        bookmarks = query.get("allowWatchBookmarks") == "true"
        loop = asyncio.get_running_loop()
        end = loop.time() + float(query.get("timeoutSeconds", "1800"))
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        self._watches[id(request)] = request
        try:
            while loop.time() < end and id(request) in self._watches:
                # Taken together: what changes while we write comes in the next round.
                changes, upto = self.store.after(at, kind, labels), self.store.version
                for change in changes:
                    await response.write(line(change.how, change.item))
                if bookmarks and at < upto:
                    meta = {"resourceVersion": str(upto)}
                    await response.write(line("BOOKMARK", {"kind": kind, "metadata": meta}))
                at = upto
                await self.store.news(min(BOOKMARK_S, max(0.0, end - loop.time())))
        except Problem as problem:
            await response.write(line("ERROR", status_of(problem)))
        except ConnectionResetError:
            pass
        finally:
            self._watches.pop(id(request), None)
        return response

    # --- pods --------------------------------------------------------------------------------------------

    async def _log(self, request: web.Request) -> web.Response:
        self._allow("get", "pods/log")
        name = request.match_info["name"]
        self.store.get("pods", name)
        running = self.nodes.running.get(name)
        if running is None:
            raise Problem(400, "BadRequest", f'container "agent" in pod "{name}" is waiting to start')
        if self.nodes.lost:
            raise Problem(
                500, "InternalError", 'Get "https://10.0.0.1:10250/containerLogs": dial tcp: timeout'
            )
        lines = running.log.read_text(errors="replace").splitlines(keepends=True)
        return web.Response(text="".join(lines[-int(request.query.get("tailLines", len(lines) or 1)) :]))

    async def _proxy(self, request: web.Request) -> web.Response:
        verb = {"GET": "get", "POST": "create", "DELETE": "delete"}[request.method]
        self._allow(verb, "pods/proxy")
        name = request.match_info["name"]
        self.store.get("pods", name)
        running = self.nodes.running.get(name)
        try:
            if running is None or self.nodes.lost:
                raise ConnectionError("dial tcp 10.0.0.2:8080: connect: no route to host")
            url = f"http://127.0.0.1:{running.port}/{request.match_info['tail']}"
            dropped = ("Host", "Authorization", "Content-Length", "Transfer-Encoding")
            headers = {k: v for k, v in request.headers.items() if k not in dropped}
            async with self._http.request(
                request.method, url, data=await request.read(), headers=headers
            ) as answer:
                kind = answer.headers.get("Content-Type", "application/octet-stream")
                return web.Response(
                    status=answer.status, body=await answer.read(), headers={"Content-Type": kind}
                )
        except (aiohttp.ClientError, OSError) as error:
            message = f"error trying to reach service: {error}"
            raise Problem(503, "ServiceUnavailable", message) from error


def line(how: str, item: Any) -> bytes:
    return json.dumps({"type": how, "object": item}).encode() + b"\n"


def status_of(problem: Problem) -> Json:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": problem.message,
        "reason": problem.reason,
        "code": problem.code,
    }
