"""A nodeagent and a loader without a scheduler: the benchmark sends their commands."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
from nats.aio.msg import Msg

from shared.contracts import subjects
from shared.contracts.base import Done
from shared.contracts.inference import InferChunk, InferReply, InferStarted
from shared.contracts.loader import Inspected, InspectModel
from shared.contracts.models import ModelCard, ModelSpec
from shared.contracts.node import InstanceState, InstanceStatus, NodeStatus, StartInstance, StopInstance
from shared.messaging import Mesh
from tests.support.engines import Engines
from tests.support.followed_node import follow_node

WITHIN_S = 120.0
_EPOCH = 1 << 32
_MIB = 1 << 20
_ENDED = (InstanceState.STOPPED, InstanceState.FAILED)
Tokens = list[int]


class BareNode:
    """The processes of one node, and the scheduler's and gateway's side of them.

    Waits end with `TimeoutError` after `WITHIN_S`, and with `SystemExit` if the instance fails.
    """

    def __init__(
        self, name: str, url: str, mesh: Mesh, home: Path, environment: Mapping[str, str], loader: str = "services.loader"
    ) -> None:
        """Describe a node; `open` starts it.

        Args:
            name: Of the node.
            url: Of NATS.
            mesh: The benchmark's connection.
            home: Its state and its log.
            environment: Its settings, besides names and places.
            loader: The module that runs as its loader.
        """
        self.name, self.url, self.mesh = name, url, mesh
        self.home, self._numbers, self._loader = home, itertools.count(1), loader
        self.engines = Engines(mesh, name, url, home)
        self.engines.patience_s = WITHIN_S
        self._environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("THAW_")},
            "THAW_NATS_URL": url,
            "THAW_HOME": str(home),
            "THAW_NODE": name,
            "THAW_LOG_LEVEL": "error",
            "THAW_SUSPEND": "off",
            **environment,
        }
        self._processes: list[subprocess.Popen[bytes]] = []
        self._status: NodeStatus | None = None
        self._changed = asyncio.Condition()
        self.loader_reported = asyncio.Event()

    async def open(self) -> None:
        """Start the processes, and wait for their first statuses."""
        await follow_node(self.mesh, self.name, self._on_status)
        await self.mesh.nc.subscribe(subjects.loader_status(self.name), cb=self._on_loader)
        self._processes = [self._spawn(module) for module in (self._loader, "services.nodeagent")]
        async with asyncio.timeout(WITHIN_S):
            await self.loader_reported.wait()
        await self.wait_until(lambda _: True)

    def _spawn(self, module: str) -> subprocess.Popen[bytes]:
        with (self.home / "log").open("ab") as log:
            return subprocess.Popen([sys.executable, "-m", module], env=self._environment, stdout=log, stderr=log)

    async def _on_status(self, status: NodeStatus) -> None:
        async with self._changed:
            self._status = status
            self._changed.notify_all()

    async def _on_loader(self, _: Msg) -> None:
        self.loader_reported.set()

    @property
    def pids(self) -> tuple[int, ...]:
        """The loader's and the nodeagent's process."""
        return tuple(process.pid for process in self._processes)

    async def wait_until(self, wanted: Callable[[NodeStatus], bool]) -> NodeStatus:
        async with asyncio.timeout(WITHIN_S), self._changed:
            await self._changed.wait_for(lambda: self._status is not None and wanted(self._status))
            assert self._status is not None
            return self._status

    async def reaches(self, instance_id: str, wanted: Callable[[InstanceStatus], bool]) -> InstanceStatus:
        """Return the instance's first status that is as wanted."""

        def find(status: NodeStatus) -> InstanceStatus | None:
            found = next((i for i in status.instances if i.instance_id == instance_id), None)
            if found is not None and found.error is not None:
                raise SystemExit(f"{self.name}: {instance_id}: {found.error.message}")
            return found if found is not None and wanted(found) else None

        found = find(await self.wait_until(lambda s: find(s) is not None))
        assert found is not None
        return found

    async def inspect(self, spec: ModelSpec) -> ModelCard:
        found = await self.mesh.request(subjects.loader_command(self.name), InspectModel(spec=spec), Inspected)
        return ModelCard(spec=spec, info=found.info, created=0)

    def next_token(self) -> int:
        return _EPOCH + next(self._numbers)

    async def start(self, card: ModelCard, device: str, kv_bytes: int, instance_id: str = "") -> InstanceStatus:
        """Start an instance that books little memory; return once it takes requests."""
        token = self.next_token()
        command = StartInstance(
            token=token,
            plan_id="p",
            instance_id=instance_id or f"i{token - _EPOCH}",
            card=card,
            device_ids=(device,),
            reserve_bytes=_MIB,
            kv_bytes=kv_bytes,
        )
        await self.mesh.request(subjects.node_command(self.name), command, Done)
        return await self.reaches(command.instance_id, lambda i: i.accepts_requests or is_ready(i))

    async def ask(self, instance_id: str, prompt: str | Tokens, tokens: int) -> tuple[float, Tokens]:
        """Return when the first token arrived, by `time.perf_counter`, and all tokens."""
        stream = await self.engines.ask(instance_id, "completion", prompt=prompt, max_tokens=tokens, temperature=0, ignore_eos=True)
        await stream.until(_has_token)
        first = time.perf_counter()
        await stream.last()
        if len(found := stream.tokens()) != tokens:
            raise SystemExit(f"{self.name}: {instance_id} ended after {len(found)} tokens: {stream.replies[-1]}")
        return first, found

    async def stop(self, instance_id: str) -> None:
        command = StopInstance(token=self.next_token(), instance_id=instance_id)
        await self.mesh.request(subjects.node_command(self.name), command, Done)
        await self.wait_until(lambda s: all(i.instance_id != instance_id or i.state in _ENDED for i in s.instances))

    def close(self) -> None:
        """End the node's processes, also the zygote and engines, which would outlive it."""
        found = [p for process in self._processes for p in (psutil.Process(process.pid), *_children(process.pid))]
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(60)
        for child in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def is_ready(status: InstanceStatus) -> bool:
    return status.state is InstanceState.READY


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _has_token(replies: list[InferReply]) -> bool:
    """True at the first token, or the end of a request without one."""
    return any(isinstance(r, InferChunk) or not isinstance(r, InferStarted) for r in replies)
