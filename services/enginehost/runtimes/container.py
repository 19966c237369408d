"""An engine as a container of Docker or Podman, identified by labels."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from services.enginehost.drivers.port import Launch
from services.enginehost.http1 import Address, HttpError
from services.enginehost.runtimes.docker import Docker, NoSuchImage
from services.enginehost.runtimes.endpoint import CONTAINER_DIRECTORY, LOOPBACK, LOOPBACK_ENDPOINT, Endpoint
from services.enginehost.runtimes.model_mounts import model_mounts
from services.enginehost.runtimes.port import Activity, EngineExit
from services.enginehost.runtimes.process import oom_kills
from services.enginehost.settings import HostSettings
from shared.contracts.engine import EngineStart
from shared.contracts.models import ContainerOptions
from shared.contracts.phases import Phase
from shared.errors import EngineFailed, ThawError
from shared.processes import MARK_VARIABLE, descendants, mark_of, process_end

log = logging.getLogger(__name__)
LABEL_MARK = "thaw.mark"
LABEL_INSTANCE = "thaw.instance"
LABEL_NODE = "thaw.node"
_GPU_CAPABILITIES = [["gpu"]]
NETWORK = "thaw-engines"
"""A bridge for engines, on which they cannot reach each other and other containers cannot reach
them.
"""
_MEMORY_SHARE = 0.9
"""Share of the machine's memory: a larger engine is killed before the kernel picks a victim among
the mesh's processes.
"""
_LOG_WITHIN_S = 1.0
_KILLED = 137
"""Exit status of a process killed by SIGKILL, as a shell reports it."""
OnProgress = Callable[[Phase, float], None]


class EngineContainer:
    """A started container.

    Args:
        docker: The container runtime.
        container: Its identifier.
        pid: Its first process; 0 if it has exited already.
        address: Where its engine listens.
        log_path: File for its output.
    """

    def __init__(self, docker: Docker, container: str, pid: int, address: Address, log_path: Path) -> None:
        self._docker = docker
        self.container = container
        self._pid = pid
        self._log_path = log_path
        self._log_bytes = 0
        self._oom_before = oom_kills()
        self.address = address
        self._ended: asyncio.Future[EngineExit] = asyncio.get_running_loop().create_future()
        self._following = asyncio.create_task(self._follow(), name="container log")
        self._waiting = asyncio.create_task(self._wait(), name="container end")

    def pids(self) -> tuple[int, ...]:
        """Process ids on this machine.

        None if the engine runs elsewhere, such as in a virtual machine.
        """
        if self._ended.done() or not self._pid or not psutil.pid_exists(self._pid):
            return ()
        return tuple(sorted(descendants(self._pid)))

    def activity(self) -> Activity:
        cpu, read = 0.0, 0
        for pid in self.pids():
            with contextlib.suppress(psutil.Error, OSError):
                process = psutil.Process(pid)
                times = process.cpu_times()
                cpu += times.user + times.system
                read += process.io_counters().read_chars
        return Activity(cpu, read, self._log_bytes)

    def owns_port(self) -> bool | None:
        """True: the container engine published the port."""
        return True

    def take_over(self, log_path: Path, cgroup_procs: str | None) -> None:
        """A container is never a template."""

    def record_shared_memory(self) -> None:
        """No-op: a container's shared memory is removed with it."""

    async def wait(self) -> EngineExit:
        return await asyncio.shield(self._ended)

    async def stop(self, signal_name: str, grace_s: float) -> EngineExit:
        with contextlib.suppress(EngineFailed):
            await self._docker.kill(self.container, signal_name)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self.wait()
        try:
            await self._docker.remove(self.container)
        except EngineFailed as e:
            log.warning("failed to remove a container", extra={"container": self.container, "error": e.message})
        for task in (self._waiting, self._following):
            task.cancel()
        await asyncio.gather(self._waiting, self._following, return_exceptions=True)
        if not self._ended.done():
            self._ended.set_result(EngineExit(None))
        return self._ended.result()

    async def _wait(self) -> None:
        """Wait for Docker's report; if Docker goes away, wait for the process."""
        oom: bool | None = None
        try:
            returncode: int | None = await self._docker.wait(self.container)
            oom = bool((await self._docker.inspect(self.container))["State"].get("OOMKilled"))
            # Podman does not always report it: compare the kernel's count of OOM kills.
            oom = oom or (
                returncode == _KILLED and None not in (self._oom_before, after := oom_kills()) and after != self._oom_before
            )
        except ThawError as e:
            log.warning("the container engine does not report a container's state", extra={"error": e.message})
            returncode = None
            if self._pid:
                await process_end(self._pid)
        # The end of the log arrives on a separate connection.
        await asyncio.wait((self._following,), timeout=_LOG_WITHIN_S)
        if not self._ended.done():
            # As in a shell, a signal is reported as 128 plus its number.
            self._ended.set_result(EngineExit(128 - returncode if returncode and returncode > 128 else returncode, oom))

    async def _follow(self) -> None:
        try:
            with self._log_path.open("ab", buffering=0) as file:
                async for words in self._docker.logs(self.container):
                    self._log_bytes += len(words)
                    file.write(words)
        except (HttpError, ThawError, OSError) as e:
            log.warning("failed to copy a container's log", extra={"container": self.container, "error": str(e)})


async def start_container(
    launch: Launch,
    options: ContainerOptions,
    arguments: tuple[str, ...],
    env: Mapping[str, str],
    start: EngineStart,
    settings: HostSettings,
    on_progress: OnProgress,
    endpoint: Endpoint = LOOPBACK_ENDPOINT,
) -> EngineContainer:
    """Start an engine in a container.

    Args:
        launch: The engine's parameters.
        options: The model's container options.
        arguments: Arguments of the image's entrypoint.
        env: Additions to the image's environment.
        start: The nodeagent's order.
        settings: The host's settings.
        on_progress: Receives the progress of a download.
        endpoint: A socket in a directory of the host, or a port that is published on the loopback.

    Raises:
        EngineFailed: The container does not start.
    """
    docker = Docker(settings.container_socket)
    mark = mark_of(settings.scope, start.instance_id)
    await remove_containers(docker, mark)
    if endpoint.socket is None or not endpoint.has_own_network:
        await docker.ensure_network(NETWORK)
    body = await asyncio.to_thread(_body, launch, options, arguments, {**env, MARK_VARIABLE: mark}, start, mark, endpoint)
    name = f"thaw-{start.node}-{start.instance_id}-{time.monotonic_ns():x}"
    try:
        container = await docker.create(name, body)
    except NoSuchImage as e:
        if options.pull == "never":
            raise EngineFailed(f"Image {options.image} is not on this node, and pull is never: {e}") from e
        layers: dict[str, float] = {}
        async for message in docker.pull(options.image):
            detail = message.get("progressDetail") or {}
            if detail.get("total"):
                layers[str(message.get("id"))] = detail.get("current", 0) / detail["total"]
                on_progress(Phase.FETCH, sum(layers.values()) / len(layers))
        try:
            container = await docker.create(name, body)
        except NoSuchImage as again:
            raise EngineFailed(str(again)) from again
    try:
        await docker.start(container)
        found = await docker.inspect(container)
        address = Address(path=str(endpoint.socket)) if endpoint.socket is not None else _address(found, f"{options.port}/tcp")
        return EngineContainer(docker, container, int(found["State"]["Pid"]), address, Path(start.log_path))
    except (EngineFailed, KeyError, TypeError, ValueError) as e:
        await docker.remove(container)
        raise EngineFailed(f"The container did not start: {e}") from e


def _address(found: Mapping[str, Any], port: str) -> Address:
    """The published address of the container's port.

    An exited container has none; its exit is reported as for any other.
    """
    published = (found["NetworkSettings"]["Ports"] or {}).get(port)
    if not published and found["State"]["Running"]:
        raise EngineFailed(f"The container's port {port} is not published on this machine")
    return Address("127.0.0.1", int(published[0]["HostPort"]) if published else 0)


def _body(
    launch: Launch,
    options: ContainerOptions,
    arguments: tuple[str, ...],
    env: Mapping[str, str],
    start: EngineStart,
    mark: str,
    endpoint: Endpoint,
) -> dict[str, Any]:
    port = f"{options.port}/tcp"
    mounts = [m if m.count(":") == 2 else f"{m}:ro" for m in options.mounts]
    source = start.card.info.source
    if source.startswith("/"):
        mounts += model_mounts(Path(source), mounts)
    host: dict[str, Any] = {
        "Binds": mounts,
        "ShmSize": options.shm_bytes,
        "Init": True,
        # The output is copied to the instance's log; this bounds the container engine's own copy.
        "LogConfig": {"Type": "json-file", "Config": {"max-size": "16m", "max-file": "2"}},
        "CapDrop": ["ALL"],
        "CapAdd": list(options.capabilities),
        "SecurityOpt": ["no-new-privileges"],
        "PidsLimit": options.pids_limit,
        "Memory": options.memory_limit_bytes or int(_MEMORY_SHARE * psutil.virtual_memory().total),
        "NetworkMode": "none" if endpoint.has_own_network else NETWORK,
    }
    if endpoint.socket is None:
        host["PortBindings"] = {port: [{"HostIp": LOOPBACK, "HostPort": ""}]}
    else:
        mounts.append(f"{endpoint.socket.parent}:{CONTAINER_DIRECTORY}")
    if options.runtime is not None:
        host["Runtime"] = options.runtime
    if launch.on_cuda:
        host["DeviceRequests"] = [{"DeviceIDs": launch.gpus, "Capabilities": _GPU_CAPABILITIES}]
        # Inside the container only those devices exist, numbered from 0.
        env = {**env, "CUDA_VISIBLE_DEVICES": ",".join(str(n) for n in range(len(launch.gpus)))}
    body: dict[str, Any] = {
        "Image": options.image,
        "Cmd": list(arguments),
        "Env": [f"{k}={v}" for k, v in env.items()],
        "Labels": {LABEL_MARK: mark, LABEL_INSTANCE: start.instance_id, LABEL_NODE: start.node},
        "StopSignal": start.card.spec.stop_signal,
        "HostConfig": host,
    }
    if endpoint.socket is None:
        body["ExposedPorts"] = {port: {}}
    if options.entrypoint:
        body["Entrypoint"] = list(options.entrypoint)
    if options.user is not None:
        body["User"] = options.user
    return body


async def remove_containers(docker: Docker, mark: str) -> list[str]:
    """Remove containers of an earlier host of the instance; return their ids."""
    found = await docker.find_labelled(f"{LABEL_MARK}={mark}")
    for container in found:
        await docker.remove(container)
    return found
