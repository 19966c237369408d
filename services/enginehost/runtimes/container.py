"""An engine as a container of the node's Docker or Podman: the same life as a process's, and known by its labels to whoever cleans up."""

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
from services.enginehost.runtimes.endpoint import CONTAINER_DIRECTORY, LOOPBACK, ON_LOOPBACK, Reach
from services.enginehost.runtimes.port import Activity, Ended
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
"""A bridge of the engines' own, on which they do not reach each other, nor other containers them."""
_MEMORY_SHARE = 0.9
"""Of the machine's memory: an engine that takes more is killed before the kernel looks for a victim among the mesh's processes."""
_LOG_WITHIN_S = 1.0
_KILLED = 137
"""A shell's way to tell SIGKILL."""
Told = Callable[[Phase, float], None]


class EngineContainer:
    """A container that has been started. `pid` is 0 if it has ended meanwhile."""

    def __init__(self, docker: Docker, container: str, pid: int, address: Address, log_path: Path) -> None:
        self._docker = docker
        self.container = container
        self._pid = pid
        self._log_path = log_path
        self._said = 0
        self._oom_before = oom_kills()
        self.address = address
        self._ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._following = asyncio.create_task(self._follow(), name="container log")
        self._waiting = asyncio.create_task(self._wait(), name="container end")

    def pids(self) -> tuple[int, ...]:
        """As this machine numbers them; none where the engine runs elsewhere (a virtual machine's)."""
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
        return Activity(cpu, read, self._said)

    def owns_port(self) -> bool | None:
        """The engine published it: nobody else can have it."""
        return True

    def note_shared(self) -> None:
        """A container has shared memory of its own, which goes with it."""

    async def wait(self) -> Ended:
        return await asyncio.shield(self._ended)

    async def stop(self, signal_name: str, grace_s: float) -> Ended:
        with contextlib.suppress(EngineFailed):
            await self._docker.kill(self.container, signal_name)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self.wait()
        try:
            await self._docker.remove(self.container)
        except EngineFailed as e:
            log.warning("a container could not be removed", extra={"container": self.container, "error": e.message})
        for task in (self._waiting, self._following):
            task.cancel()
        await asyncio.gather(self._waiting, self._following, return_exceptions=True)
        if not self._ended.done():
            self._ended.set_result(Ended(None))
        return self._ended.result()

    async def _wait(self) -> None:
        """Docker's own word; if it goes away, the process's end is taken for the container's."""
        oom: bool | None = None
        try:
            returncode: int | None = await self._docker.wait(self.container)
            oom = bool((await self._docker.inspect(self.container))["State"].get("OOMKilled"))
            # Podman does not always say so: then the kernel's own count, as of a process.
            oom = oom or (
                returncode == _KILLED and None not in (self._oom_before, after := oom_kills()) and after != self._oom_before
            )
        except ThawError as e:
            log.warning("the container engine does not tell of a container", extra={"error": e.message})
            returncode = None
            if self._pid:
                await process_end(self._pid)
        with contextlib.suppress(TimeoutError):
            # Its last words come over a connection of their own.
            await asyncio.wait_for(asyncio.shield(self._following), _LOG_WITHIN_S)
        if not self._ended.done():
            # A shell's way to tell a signal: 128 and its number.
            self._ended.set_result(Ended(128 - returncode if returncode and returncode > 128 else returncode, oom))

    async def _follow(self) -> None:
        with contextlib.suppress(HttpError), self._log_path.open("ab", buffering=0) as file:
            async for words in self._docker.logs(self.container):
                self._said += len(words)
                file.write(words)


async def start_container(
    launch: Launch,
    options: ContainerOptions,
    arguments: tuple[str, ...],
    env: Mapping[str, str],
    start: EngineStart,
    settings: HostSettings,
    told: Told,
    reach: Reach = ON_LOOPBACK,
) -> EngineContainer:
    """Start one, and remove what an earlier host of the instance has left. An image that is not there is pulled, if that is allowed.

    Args:
        launch: What is started.
        options: The model's options for its container.
        arguments: What the image's entrypoint gets.
        env: What is added to the image's environment.
        start: The nodeagent's order.
        settings: The host's.
        told: Is told of a download.
        reach: A socket in a directory of the host's; or a port, which is published on the loopback.

    Raises:
        EngineFailed: If it does not start.
    """
    docker = Docker(settings.container_socket)
    mark = mark_of(settings.scope, start.instance_id)
    await remove_containers(docker, mark)
    if reach.socket is None or not reach.has_own_network:
        await docker.ensure_network(NETWORK)
    body = _body(launch, options, arguments, {**env, MARK_VARIABLE: mark}, start, mark, reach)
    name = f"thaw-{start.node}-{start.instance_id}-{time.monotonic_ns():x}"
    try:
        container = await docker.create(name, body)
    except NoSuchImage as e:
        if options.pull == "never":
            raise EngineFailed(f"image {options.image} is not there, and pull is never: {e}") from e
        layers: dict[str, float] = {}
        async for message in docker.pull(options.image):
            detail = message.get("progressDetail") or {}
            if detail.get("total"):
                layers[str(message.get("id"))] = detail.get("current", 0) / detail["total"]
                told(Phase.FETCH, sum(layers.values()) / len(layers))
        try:
            container = await docker.create(name, body)
        except NoSuchImage as again:
            raise EngineFailed(str(again)) from again
    try:
        await docker.start(container)
        found = await docker.inspect(container)
        address = Address(path=str(reach.socket)) if reach.socket is not None else _address(found, f"{options.port}/tcp")
        return EngineContainer(docker, container, int(found["State"]["Pid"]), address, Path(start.log_path))
    except (EngineFailed, KeyError, TypeError, ValueError) as e:
        await docker.remove(container)
        raise EngineFailed(f"the container did not start: {e}") from e


def _address(found: Mapping[str, Any], port: str) -> Address:
    """Where the container's port is to be reached. One that has ended has none any more; its end is told like any other's."""
    published = (found["NetworkSettings"]["Ports"] or {}).get(port)
    if not published and found["State"]["Running"]:
        raise EngineFailed(f"its port {port} is not published on this machine")
    return Address("127.0.0.1", int(published[0]["HostPort"]) if published else 0)


def _body(
    launch: Launch,
    options: ContainerOptions,
    arguments: tuple[str, ...],
    env: Mapping[str, str],
    start: EngineStart,
    mark: str,
    reach: Reach,
) -> dict[str, Any]:
    port = f"{options.port}/tcp"
    mounts = [m if m.count(":") == 2 else f"{m}:ro" for m in options.mounts]
    source = start.card.info.source
    if source.startswith("/"):
        mounts.append(f"{source}:{source}:ro")
    host: dict[str, Any] = {
        "Binds": mounts,
        "ShmSize": options.shm_bytes,
        "Init": True,
        # What the container writes is copied to the instance's log; the container engine's own copy is bounded here.
        "LogConfig": {"Type": "json-file", "Config": {"max-size": "16m", "max-file": "2"}},
        "CapDrop": ["ALL"],
        "CapAdd": list(options.capabilities),
        "SecurityOpt": ["no-new-privileges"],
        "PidsLimit": options.pids_limit,
        "Memory": options.memory_limit_bytes or int(_MEMORY_SHARE * psutil.virtual_memory().total),
        "NetworkMode": "none" if reach.has_own_network else NETWORK,
    }
    if reach.socket is None:
        host["PortBindings"] = {port: [{"HostIp": LOOPBACK, "HostPort": ""}]}
    else:
        mounts.append(f"{reach.socket.parent}:{CONTAINER_DIRECTORY}")
    if options.runtime is not None:
        host["Runtime"] = options.runtime
    if launch.on_cuda:
        host["DeviceRequests"] = [{"DeviceIDs": launch.gpus, "Capabilities": _GPU_CAPABILITIES}]
        # Inside there are only those devices, counted from the first.
        env = {**env, "CUDA_VISIBLE_DEVICES": ",".join(str(n) for n in range(len(launch.gpus)))}
    body: dict[str, Any] = {
        "Image": options.image,
        "Cmd": list(arguments),
        "Env": [f"{k}={v}" for k, v in env.items()],
        "Labels": {LABEL_MARK: mark, LABEL_INSTANCE: start.instance_id, LABEL_NODE: start.node},
        "StopSignal": start.card.spec.stop_signal,
        "HostConfig": host,
    }
    if reach.socket is None:
        body["ExposedPorts"] = {port: {}}
    if options.entrypoint:
        body["Entrypoint"] = list(options.entrypoint)
    if options.user is not None:
        body["User"] = options.user
    return body


async def remove_containers(docker: Docker, mark: str) -> list[str]:
    """Remove what an earlier host of the instance has left; their ids."""
    found = await docker.labelled(f"{LABEL_MARK}={mark}")
    for container in found:
        await docker.remove(container)
    return found
