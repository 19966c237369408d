"""A real nodeagent process with stub engines, real NATS and a scripted loader."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
from pydantic import SecretStr

from services.enginehost.runtimes import reaper
from shared.contracts import subjects
from shared.contracts.base import Done, Message
from shared.contracts.inference import InferRequest
from shared.contracts.loader import LOADER_COMMAND, AttachWeights, LoaderCommand, ReleaseWeights, WeightsAttached, WeightsReleased
from shared.contracts.model_info import ModelInfo
from shared.contracts.models import ModelCard, ModelSpec
from shared.contracts.node import (
    InstanceState,
    InstanceStatus,
    NodeStatus,
    ResumeInstance,
    StartInstance,
    StopInstance,
    SuspendInstance,
)
from shared.contracts.phases import Phase, PhaseSpan
from shared.messaging import Mesh, Responder
from shared.settings import CommonSettings
from shared.sizing import need_of
from tests.support.followed_node import follow_node
from tests.support.groups import remove_groups
from tests.support.patient_mesh import PatientMesh

MIB = 1024 * 1024
WITHIN_S = 60.0
_EPOCH = 1 << 32
ZYGOTE = {"THAW_ZYGOTE": "true", "THAW_ZYGOTE_MODULE": "tests.support.stub_zygote"}
"""Settings of a node whose engines a stub zygote forks."""


def card(stub: dict[str, Any] | None = None, *, name: str = "demo", init_timeout: float = 60.0) -> ModelCard:
    return ModelCard(
        spec=ModelSpec(name=name, source="/nowhere", init_timeout=init_timeout, engine_args={"stub": stub or {}}),
        info=ModelInfo(
            source="/nowhere",
            revision="r1",
            architecture="LlamaForCausalLM",
            model_type="llama",
            task="generate",
            weights_bytes=10 * MIB,
            parameters=1000,
            dtype="float32",
            context_length=128,
            kv_bytes_per_token=64,
        ),
        created=0,
    )


class Node:
    """A restartable nodeagent, and all its reports so far (`statuses`)."""

    def __init__(self, url: str, home: Path, mesh: Mesh, **settings: str) -> None:
        self.name = f"n{uuid.uuid4().hex[:8]}"
        self.home = home
        self.mesh = mesh
        self.released: list[str] = []
        self.freed_bytes = 3 * MIB
        self.statuses: list[NodeStatus] = []
        self._on_status_ = asyncio.Condition()
        self._tokens = itertools.count(1)
        self._loader: Responder | None = None
        self.environment = {
            **os.environ,
            "THAW_NATS_URL": url,
            "THAW_HOME": str(home),
            "THAW_NODE": self.name,
            "THAW_DEVICES": "cpu:0=1000MiB",
            "THAW_ZYGOTE": "false",
            "THAW_ENGINE_MODULE": "tests.support.stub_engine",
            "THAW_KILL_GRACE": "0.5",
            "THAW_LOG_FORMAT": "text",
            **settings,
        }
        self.process: subprocess.Popen[bytes] | None = None

    async def open(self) -> None:
        await follow_node(self.mesh, self.name, self._on_status)
        await self.loader_on()
        await self.start_agent()

    async def start_agent(self) -> NodeStatus:
        """Return this agent's first status: a killed agent's last messages may still arrive."""
        earlier = {s.boot_id for s in self.statuses}
        self.process = self._spawn()
        await self.until(lambda s: s.boot_id not in earlier)
        return next(s for s in self.statuses if s.boot_id not in earlier)

    def _spawn(self) -> subprocess.Popen[bytes]:
        with (self.home / "nodeagent.log").open("ab") as log:
            return subprocess.Popen([sys.executable, "-m", "services.nodeagent"], env=self.environment, stdout=log, stderr=log)

    def spawn_loader(self) -> subprocess.Popen[bytes]:
        """Start the real loader of this node, instead of the scripted one."""
        with (self.home / "loader.log").open("ab") as log:
            return subprocess.Popen([sys.executable, "-m", "services.loader"], env=self.environment, stdout=log, stderr=log)

    async def loader_on(self) -> None:
        self._loader = self.mesh.respond(subjects.loader_command(self.name), LOADER_COMMAND, self._on_loader, concurrent=True)
        await self._loader.start()
        await self.mesh.flush()

    async def loader_off(self) -> None:
        assert self._loader is not None
        await self._loader.stop()
        await self.mesh.flush()

    async def _on_loader(self, command: LoaderCommand) -> Message:
        match command:
            case ReleaseWeights():
                self.released.append(command.instance_id)
                return WeightsReleased(freed_bytes=self.freed_bytes)
            case AttachWeights():
                return WeightsAttached(weights_id="w", segment="s", directory="/", total_bytes=1, loaded_bytes=1)
            case _:
                return Done()

    async def _on_status(self, status: NodeStatus) -> None:
        async with self._on_status_:
            self.statuses.append(status)
            self._on_status_.notify_all()

    @property
    def latest(self) -> NodeStatus:
        return self.statuses[-1]

    async def until(self, wanted: Callable[[NodeStatus], bool], within: float = WITHIN_S) -> NodeStatus:
        """Wait for the first status, from the latest on, that is as wanted."""
        try:
            async with asyncio.timeout(within), self._on_status_:
                await self._on_status_.wait_for(lambda: bool(self.statuses) and wanted(self.latest))
                return self.latest
        except TimeoutError:
            log = (self.home / "nodeagent.log").read_text()[-4000:]
            latest = self.latest.model_dump_json(indent=1) if self.statuses else "no status"
            raise AssertionError(f"not within {within} s; latest status:\n{latest}\nlog:\n{log}") from None

    async def reaches(self, instance_id: str, *states: InstanceState, within: float = WITHIN_S) -> InstanceStatus:
        await self.until(lambda s: any(i.instance_id == instance_id and i.state in states for i in s.instances), within)
        return self.instance(instance_id)

    def instance(self, instance_id: str) -> InstanceStatus:
        return next(i for i in self.latest.instances if i.instance_id == instance_id)

    async def seen(self, wanted: Callable[[NodeStatus], bool]) -> None:
        """Wait until any past or future status is as wanted."""
        async with asyncio.timeout(WITHIN_S), self._on_status_:
            await self._on_status_.wait_for(lambda: any(wanted(s) for s in self.statuses))

    async def start(
        self,
        stub: dict[str, Any] | None = None,
        *,
        mib: int = 100,
        token: int | None = None,
        instance_id: str | None = None,
        park: bool = False,
        **more: Any,
    ) -> str:
        command = StartInstance(
            token=token if token is not None else _EPOCH + next(self._tokens),
            plan_id="p1",
            instance_id=instance_id or f"i{uuid.uuid4().hex[:8]}",
            card=card(stub, **more),
            device_ids=("cpu:0",),
            reserve_bytes=mib * MIB,
            kv_bytes=MIB,
            park=park,
            phases=(PhaseSpan(phase=Phase.SCHEDULE, start_ms=-5, duration_ms=5, process="scheduler"),),
        )
        await self.mesh.request(subjects.node_command(self.name), command, Done)
        return command.instance_id

    async def stop(self, instance_id: str, *, token: int | None = None, **more: Any) -> None:
        command = StopInstance(token=token if token is not None else _EPOCH + next(self._tokens), instance_id=instance_id, **more)
        await self.mesh.request(subjects.node_command(self.name), command, Done)

    def next_token(self) -> int:
        return _EPOCH + next(self._tokens)

    async def suspend(self, instance_id: str, *, token: int | None = None, **more: Any) -> None:
        command = SuspendInstance(
            token=token if token is not None else _EPOCH + next(self._tokens), instance_id=instance_id, **more
        )
        await self.mesh.request(subjects.node_command(self.name), command, Done)

    async def resume(self, instance_id: str, *, token: int | None = None, **more: Any) -> None:
        command = ResumeInstance(
            token=token if token is not None else _EPOCH + next(self._tokens), plan_id="p2", instance_id=instance_id, **more
        )
        await self.mesh.request(subjects.node_command(self.name), command, Done)

    @property
    def records(self) -> list[str]:
        return sorted(p.stem for p in (self.home / "nodes" / self.name / "agent" / "instances").glob("*.json"))

    def edit_record(self, instance_id: str, **changes: Any) -> None:
        path = self.home / "nodes" / self.name / "agent" / "instances" / f"{instance_id}.json"
        record = json.loads(path.read_text())
        record["instance"].update(changes)
        path.write_text(json.dumps(record))

    def kill_agent(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop_agent(self, within: float = WITHIN_S) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(within)

    def close(self) -> None:
        """End all processes of this node.

        The reapers of its engines' hosts end processes without a mark, such as vLLM's.
        """
        if self.process is not None and self.process.poll() is None:
            self.kill_agent()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                environment = process.environ()
                if reaper.__file__ in process.cmdline():
                    continue
                # Engines know nothing of Thaw but their mark.
                if self.name in (environment.get("THAW_NODE"), environment.get("THAW_INSTANCE", "").partition("-")[0]):
                    process.kill()
        remove_groups(f"{self.name}-")


async def start_command(node: Node, instance_id: str, card: ModelCard, *, token: int = 1) -> None:
    """Start an instance of `card` with the bytes that it needs."""
    need = need_of(card)
    command = StartInstance(
        token=_EPOCH + token,
        plan_id="p",
        instance_id=instance_id,
        card=card,
        device_ids=("cpu:0",),
        reserve_bytes=need.total,
        kv_bytes=need.kv,
    )
    await node.mesh.request(subjects.node_command(node.name), command, Done)


async def begin_request(node: Node, instance_id: str, **body: object) -> None:
    """Send a request, and wait until the engine serves or has served it.

    It does not wait for a request with a body, which ends the engine. A request that ends within
    0.1 s may never show as active.
    """
    before = node.instance(instance_id).load.completed
    request = InferRequest(
        request_id="r1", instance_id=instance_id, model="demo", endpoint="chat", body=dict(body), deadline_ms=60_000
    )
    await node.mesh.nc.publish(subjects.infer(instance_id), request.model_dump_json().encode(), reply=f"t.{instance_id}")
    if not body:
        await node.until(
            lambda s: any(i.instance_id == instance_id and i.load.active + i.load.completed > before for i in s.instances)
        )


async def gone(pid: int, within: float = WITHIN_S) -> bool:
    """Return whether the process ends within that time; a zombie has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        ended, _, _ = await asyncio.to_thread(select.select, [descriptor], [], [], within)
        return bool(ended)
    finally:
        os.close(descriptor)


@contextlib.asynccontextmanager
async def running_node(url: str, home: Path, **settings: str) -> AsyncIterator[Node]:
    mesh = PatientMesh(CommonSettings(nats_url=SecretStr(url)), "test")
    node = Node(url, home, mesh, **settings)
    await mesh.start()
    try:
        await node.open()
        yield node
    finally:
        node.close()
        await mesh.stop()
