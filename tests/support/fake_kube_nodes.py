"""What happens in a cluster by itself: Jobs get pods, pods get nodes, images become processes, and all end.

Each pod is a real local process in a pid namespace of its own, killed with all it started, and with this
process. Its memory is watched as a cgroup would: past its limit it is killed, and says OOMKilled. Time is
real; what takes minutes in a cluster can be asked for at once (`evict`, `lose_node`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from asyncio.subprocess import DEVNULL, Process
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp

from support.fake_kube_store import Json, Problem, Store, condition, stamp, with_condition
from support.ports import free_ports

PROBE_S = 0.1
MEMORY_S = 0.05
NODE = "node-1"
# As containers have it: what is started inside cannot leave, and ends with it.
ISOLATED = ("--dev-bind", "/", "/", "--proc", "/proc", "--unshare-pid", "--die-with-parent")


def isolation() -> list[str]:
    found = shutil.which("bwrap")
    if found is None:
        raise FileNotFoundError("bwrap is not installed here: apt install bubblewrap")
    return [found, *ISOLATED]


class Running:
    """A pod's process."""

    def __init__(self, process: Process, port: int, log: Path) -> None:
        self.process, self.port, self.log = process, port, log
        self.reason = ""

    def kill(self, reason: str = "") -> None:
        self.reason = self.reason or reason
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def memory_mb(self) -> float:
        return sum(_resident(pid) for pid in _tree(self.process.pid)) / 2**20


class Nodes:
    """`images` maps an image to the command that it is; `{port}` in it is the port it shall listen on."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store = store
        self.folder = folder
        self.images: dict[str, list[str]] = {}
        self.env: dict[str, str] = {}
        self.labels: dict[str, str] = {"zone": "a"}
        self.cpus = 64.0
        self.quota_pods: int | None = None
        self.secrets: dict[str, dict[str, str]] = {}
        self.lost = False
        self.eviction_s = 0.3
        self.running: dict[str, Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for running in self.running.values():
            running.kill()
            await running.process.wait()

    def spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- Jobs ------------------------------------------------------------------------------------

    async def job(self, job: Json) -> None:
        """Its whole life after its creation."""
        name, spec = job["metadata"]["name"], job["spec"]
        attempt_timeout_s = spec.get("activeDeadlineSeconds")
        try:
            async with asyncio.timeout(attempt_timeout_s):
                job = self._saw(job, startTime=stamp(), active=1, ready=0)
                pod = await self._pod_for(job)
                ended = await self._pod_life(job, pod)
            if ended == "Succeeded":
                self._finish(
                    job, "Complete", "CompletionsReached", "Reached expected number of succeeded pods"
                )
            else:
                self._finish(
                    job, "Failed", "BackoffLimitExceeded", "Job has reached the specified backoff limit"
                )
        except TimeoutError:
            await self.delete_pods(job)
            self._finish(job, "Failed", "DeadlineExceeded", "Job was active longer than specified deadline")
        if (ttl_s := spec.get("ttlSecondsAfterFinished")) is not None:
            await asyncio.sleep(ttl_s)
            if (
                self.store.items["jobs"].get(name, {}).get("metadata", {}).get("uid")
                == job["metadata"]["uid"]
            ):
                self.store.delete("jobs", name)
                await self.delete_pods(job)

    def _saw(self, job: Json, **status: Any) -> Json:
        job["status"] = {**job.get("status", {}), **status}
        self.store.change("jobs", job)
        return job

    def _finish(self, job: Json, kind: str, reason: str, message: str) -> None:
        job["status"] |= {"active": 0, "ready": 0}
        with_condition(job, condition(kind, "True", reason, message))
        self.store.change("jobs", job)

    async def delete_pods(self, job: Json) -> None:
        """Asked to end, then ended, then forgotten."""
        for pod in self.store.select("pods", f"batch.kubernetes.io/job-name={job['metadata']['name']}"):
            if pod["metadata"]["ownerReferences"][0]["uid"] != job["metadata"]["uid"]:
                continue
            pod["metadata"]["deletionTimestamp"] = stamp()
            self.store.change("pods", pod)
            await self._kill(pod["metadata"]["name"])
            self.store.delete("pods", pod["metadata"]["name"])

    # --- pods ------------------------------------------------------------------------------------

    async def _pod_for(self, job: Json) -> Json:
        while self.quota_pods is not None and len(self.store.items["pods"]) >= self.quota_pods:
            name = job["metadata"]["name"]
            limit = f"requested: pods=1, limited: pods={self.quota_pods}"
            message = f'pods "{name}-x" is forbidden: exceeded quota: q, {limit}'
            involved = {"kind": "Job", "name": name, "uid": job["metadata"]["uid"]}
            event = {"metadata": {"name": f"{name}.{uuid4().hex[:8]}"}, "involvedObject": involved}
            self.store.create(
                "events", event | {"reason": "FailedCreate", "message": f"Error creating: {message}"}
            )
            await asyncio.sleep(0.5)
        template, meta = job["spec"]["template"], job["metadata"]
        pod: Json = {
            "metadata": {
                "name": f"{meta['name'][:50]}-{uuid4().hex[:5]}",
                "labels": {
                    **template["metadata"].get("labels", {}),
                    "batch.kubernetes.io/job-name": meta["name"],
                },
                "annotations": template["metadata"].get("annotations", {}),
                "ownerReferences": [{"kind": "Job", "name": meta["name"], "uid": meta["uid"]}],
            },
            "spec": template["spec"],
            "status": {"phase": "Pending"},
        }
        return self.store.create("pods", pod)

    async def _pod_life(self, job: Json, pod: Json) -> str:
        await self._schedule(pod)
        running = await self._start(pod)
        watching = asyncio.create_task(self._watch_memory(pod, running))
        probing = asyncio.create_task(self._probe(job, pod, running))
        try:
            code = await running.process.wait()
        finally:
            watching.cancel()
            probing.cancel()
            await asyncio.gather(watching, probing, return_exceptions=True)
        # What is told of it, unless somebody has told more already, or nobody is there to tell.
        while self.lost:
            await asyncio.sleep(0.05)
        told = self.store.items["pods"].get(pod["metadata"]["name"])
        if told is None or told["status"]["phase"] == "Failed":
            return "Failed"
        code = 128 - code if code < 0 else code
        reason = running.reason or ("Completed" if code == 0 else "Error")
        pod["metadata"] = told["metadata"]
        pod["status"]["phase"] = "Succeeded" if code == 0 else "Failed"
        self._container(pod, {"terminated": {"exitCode": code, "reason": reason}})
        with_condition(pod, condition("Ready", "False", "PodFailed"))
        self.store.change("pods", pod)
        return pod["status"]["phase"]

    async def _schedule(self, pod: Json) -> None:
        spec = pod["spec"]
        asked = spec["containers"][0].get("resources", {}).get("requests", {}).get("cpu", "0")
        cpus = float(asked.removesuffix("m")) / 1000 if asked.endswith("m") else float(asked)
        why = ""
        if any(self.labels.get(k) != v for k, v in spec.get("nodeSelector", {}).items()):
            why = "1 node(s) didn't match Pod's node affinity/selector"
        elif cpus > self.cpus:
            why = "1 Insufficient cpu"
        if why:
            message = f"0/1 nodes are available: {why}."
            with_condition(pod, condition("PodScheduled", "False", "Unschedulable", message))
            self.store.change("pods", pod)
            await asyncio.Event().wait()
        pod["spec"] = {**spec, "nodeName": NODE}
        with_condition(pod, condition("PodScheduled", "True"))
        self.store.change("pods", pod)

    async def _start(self, pod: Json) -> Running:
        container = pod["spec"]["containers"][0]
        image = container["image"]
        why = "" if image in self.images else f'failed to pull and unpack image "{image}": not found'
        for reason in ("ErrImagePull", "ImagePullBackOff") if why else ():
            self._container(pod, {"waiting": {"reason": reason, "message": why}})
            self.store.change("pods", pod)
            await asyncio.sleep(0.2)
        env = {e["name"]: e["value"] for e in container.get("env", [])}
        for source in container.get("envFrom", []):
            name = source["secretRef"]["name"]
            if name not in self.secrets:
                why = f'secret "{name}" not found'
                self._container(pod, {"waiting": {"reason": "CreateContainerConfigError", "message": why}})
                self.store.change("pods", pod)
            env |= self.secrets.get(name, {})
        if why:
            await asyncio.Event().wait()
        [port] = free_ports(1)
        log = self.folder / f"{pod['metadata']['name']}.log"
        command = [part.format(port=port) for part in container.get("command") or self.images[image]]
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *isolation(),
                *command,
                stdin=DEVNULL,
                stdout=output,
                stderr=output,
                env={**self.env, **env},
                start_new_session=True,
            )
        running = self.running[pod["metadata"]["name"]] = Running(process, port, log)
        pod["status"]["phase"] = "Running"
        self._container(pod, {"running": {"startedAt": stamp()}})
        with_condition(pod, condition("Ready", "False", "ContainersNotReady"))
        self.store.change("pods", pod)
        return running

    def _container(self, pod: Json, state: Json) -> None:
        name = pod["spec"]["containers"][0]["name"]
        pod["status"]["containerStatuses"] = [{"name": name, "state": state}]

    async def _probe(self, job: Json, pod: Json, running: Running) -> None:
        probe = pod["spec"]["containers"][0].get("readinessProbe")
        async with aiohttp.ClientSession() as http:
            while probe:
                url = f"http://127.0.0.1:{running.port}{probe['httpGet']['path']}"
                with contextlib.suppress(aiohttp.ClientError, OSError):
                    async with http.get(url) as response:
                        if 200 <= response.status < 400:
                            break
                await asyncio.sleep(PROBE_S)
        with_condition(pod, condition("Ready", "True"))
        self.store.change("pods", pod)
        self._saw(job, ready=1)

    async def _watch_memory(self, pod: Json, running: Running) -> None:
        limit = pod["spec"]["containers"][0].get("resources", {}).get("limits", {}).get("memory", "")
        while limit:
            if running.memory_mb() > float(limit.removesuffix("Mi")):
                running.kill("OOMKilled")
            await asyncio.sleep(MEMORY_S)

    async def _kill(self, name: str) -> None:
        if running := self.running.get(name):
            running.kill()
            await running.process.wait()

    # --- misfortunes -------------------------------------------------------------------------------

    async def evict(self, name: str) -> None:
        """By its kubelet, for want of disk."""
        pod = self.store.get("pods", name)
        pod["status"] |= {
            "phase": "Failed",
            "reason": "Evicted",
            "message": "The node was low on resource: ephemeral-storage.",
        }
        with_condition(pod, condition("DisruptionTarget", "True", "TerminationByKubelet"))
        self.store.change("pods", pod)
        await self._kill(name)

    async def lose_node(self) -> None:
        """No more word from it; after a while its pods are given up."""
        self.lost = True
        for running in self.running.values():
            running.kill()
        for pod in self.store.select("pods"):
            with_condition(pod, condition("Ready", "False", "NodeNotReady"))
            self.store.change("pods", pod)
        await asyncio.sleep(self.eviction_s)
        for pod in self.store.select("pods"):
            message = "Taint manager: deleting due to NoExecute taint"
            with_condition(pod, condition("DisruptionTarget", "True", "DeletionByTaintManager", message))
            pod["metadata"]["deletionTimestamp"] = stamp()
            self.store.change("pods", pod)

    async def delete_job(self, name: str, how: str, uid: str = "") -> Json:
        job = self.store.get("jobs", name)
        if uid and job["metadata"]["uid"] != uid:
            message = f"the UID in the precondition ({uid}) does not match the UID in record"
            raise Problem(409, "Conflict", message)
        if how == "Foreground":
            job["metadata"] |= {"deletionTimestamp": stamp(), "finalizers": ["foregroundDeletion"]}
            self.store.change("jobs", job)
            await self.delete_pods(job)
            self.store.delete("jobs", name)
            return job
        self.store.delete("jobs", name)
        if how != "Orphan":
            self.spawn(self.delete_pods(job))
        return job


def _tree(pid: int) -> list[int]:
    try:
        inside = (Path("/proc") / str(pid) / "task" / str(pid) / "children").read_text().split()
    except OSError:
        return [pid]
    return [pid, *(p for child in inside for p in _tree(int(child)))]


def _resident(pid: int) -> int:
    try:
        return int((Path("/proc") / str(pid) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0
