"""Wiring of a nodeagent, and its order of start and shutdown.

Start: read records, open devices, connect to the mesh, adopt running engines, publish their status,
accept commands.

Shutdown on SIGTERM: announce it, drain engines (or end them at the deadline), release weights,
verify that memory is free, refuse commands, stop the zygote, remove records. If NATS is lost for
good the agent exits at once and leaves the engines running; the next agent adopts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from services.nodeagent.adapters.logs import LogReader
from services.nodeagent.adapters.meter import Meter
from services.nodeagent.adapters.publisher import Publisher
from services.nodeagent.adapters.records import Record, Records
from services.nodeagent.adapters.timelines import Timelines
from services.nodeagent.devices.inventory import open_devices
from services.nodeagent.devices.port import Device
from services.nodeagent.devices.weights import weights_on_gpu
from services.nodeagent.domain import events as e
from services.nodeagent.domain.late_binding import traffic_of
from services.nodeagent.domain.memory import Ledger
from services.nodeagent.domain.state import NodeState, Policy, Process
from services.nodeagent.effects import EffectPorts, EffectRunner
from services.nodeagent.engines.by_engine import LauncherByEngine
from services.nodeagent.engines.direct import DirectLauncher
from services.nodeagent.engines.executors import Executors
from services.nodeagent.engines.exits import explain_exit, keep_logs_bounded, reports_fault
from services.nodeagent.engines.launcher import Launcher, engine_environment
from services.nodeagent.engines.process import find_log_writer
from services.nodeagent.engines.spares import Spares
from services.nodeagent.engines.zygote import MAX_SOCKET_PATH, ZygoteLauncher
from services.nodeagent.loop import Loop
from services.nodeagent.settings import PROBE_EVERY_S, PROBE_WITHIN_S, NodeagentSettings
from services.nodeagent.settings_syntax import labels
from services.nodeagent.suspend.factory import Checkpoints, open_checkpoints, open_suspender, read_swap, snapshot_budget
from shared.contracts import subjects
from shared.contracts.base import Done
from shared.contracts.engine import EngineReport
from shared.contracts.engines import CAPABILITIES
from shared.contracts.loader import LoaderStatus
from shared.contracts.logs import LOG_REQUEST
from shared.contracts.node import NODE_COMMAND, NodeCommand, ResumeInstance, StartInstance, StatusWanted, SuspendInstance
from shared.errors import Conflict, DeviceMissing
from shared.health import check_status, report_health
from shared.messaging import Mesh
from shared.private import make_private
from shared.runtime import report_ready
from shared.tasks import end, wait_for_first
from shared.unit_charges import units_by_device

log = logging.getLogger(__name__)
_RELEASES_WITHIN_S = 2.0
_STOPPING_WITHIN_S = 5.0


async def run(settings: NodeagentSettings, stop: asyncio.Event) -> int:
    """Run a nodeagent. Exit status: 0 stopped, 1 lost NATS, 2 invalid settings."""
    agent_directory = settings.node_state / "agent"
    socket_path = agent_directory / "zygote.sock"
    if settings.zygote and len(str(socket_path).encode()) > MAX_SOCKET_PATH:
        log.error(f"THAW_HOME is too long: {socket_path} has over {MAX_SOCKET_PATH} bytes, the most a Unix socket's path may have")
        return 2
    with contextlib.ExitStack() as held:
        try:
            make_private(settings.node_state, 0o755)
            (settings.node_state / "logs").mkdir(parents=True, exist_ok=True)
            records = Records(agent_directory)
            held.enter_context(records.hold_lock())
            known = list(records.load())
            adopting = any(r.instance.ended_at is None for r in known)
            # In a thread: a driver may take a minute.
            devices = await asyncio.to_thread(open_devices, settings, agent_directory / "budgets.json", adopting=adopting)
            checkpoints = await asyncio.to_thread(open_checkpoints, settings, devices)
        except (Conflict, DeviceMissing, OSError) as fault:
            log.error(f"cannot start: {fault}")
            return 2
        async with asyncio.TaskGroup() as tasks:
            agent = Nodeagent(settings, records, devices, checkpoints, tasks)
            try:
                return await agent.serve(known, stop)
            finally:
                await agent.give_up()


class Nodeagent:
    """The parts of one nodeagent."""

    def __init__(
        self,
        settings: NodeagentSettings,
        records: Records,
        devices: dict[str, Device],
        checkpoints: Checkpoints | None,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self.settings = settings
        self.mesh = Mesh(settings, f"nodeagent-{settings.node}")
        self.timelines = Timelines(f"nodeagent-{settings.node}")
        self.launcher = _launcher(settings)
        ledger = Ledger({d: device.info.budget_bytes for d, device in devices.items()})
        policy = Policy(kill_grace_s=settings.kill_grace, adopt_s=settings.adopt_timeout)
        self.executors = Executors(
            self.launcher,
            self.mesh.request,
            settings.node_state / "agent" / "executors",
            settings.node_state / "logs",
            settings.node,
            engine_environment(settings),
            settings.kill_grace,
        )
        for device in self.executors.list_devices():  # of an earlier agent
            ledger = ledger.set_executor(device, CAPABILITIES["builtin"].runtime_bytes)
        self.suspender = open_suspender(settings, devices, self.mesh, checkpoints)
        state = NodeState(
            ledger,
            policy,
            newest_epoch=records.load_epoch(),
            crashes=records.load_crashes(),
            snapshot_budget=snapshot_budget(settings),
            spills=self.suspender.can_spill(),
            templates=settings.templates,
        )
        self.loop = Loop(state, lambda effect: self.effects.perform(effect))
        self.meter = Meter(
            devices,
            lambda: self.loop.state,
            lambda: self.publisher.notify_changed(urgent=False),
            lambda instance_id, used: self.loop.post(e.Measured(instance_id, used)),
        )
        self.publisher = Publisher(
            self.mesh,
            settings.node,
            labels(settings.labels),
            devices,
            lambda: self.loop.state,
            self.meter,
            self.timelines,
            lambda: (*(found := self.suspender.capabilities()), *weights_on_gpu({d.info.kind for d in devices.values()}, found)),
            read_swap,
        )
        self.effects = EffectRunner(
            EffectPorts(
                self.mesh, self.launcher, records, self.timelines, self.meter, self.publisher, self.suspender, self.executors
            ),
            settings.node,
            settings.node_state / "logs",
            engine_environment(settings),
            self.loop,
            tasks,
        )
        self.logs = LogReader(
            settings.node,
            settings.node_state / "logs",
            settings.state / "logs",
            lambda: {i.instance_id: i.command.card.name for i in self.loop.state.instances.values()},
        )
        self._tasks = tasks
        self._background: list[asyncio.Task[None]] = []

    async def serve(self, known: list[Record], stop: asyncio.Event) -> int:
        """Run the agent from start to shutdown, and return the exit status."""
        self._run("launcher", self.launcher.run())
        self._run("logs", keep_logs_bounded(self.settings.node_state / "logs", self.settings.engine_log_bytes))
        self._run("loop", self.loop.run())
        self._run("executors", self.executors.watch(self.settings.step_timeout))
        node = self.settings.node
        self.mesh.listen(subjects.loader_status(node), LoaderStatus, self._on_loader)
        self.mesh.listen(subjects.STATUS_WANTED, StatusWanted, self._on_wanted)
        self.mesh.respond(subjects.node_logs(node), LOG_REQUEST, self.logs.answer)
        if not await self.mesh.start_unless(stop):
            log.warning("stopped before NATS was reachable; engines keep running", extra={"engines": len(known)})
            await self.launcher.close()
            return 0
        for record in known:
            _adopt(record, self.loop, self.effects, self.timelines, self.executors)
        await self.loop.wait_until_idle()
        # An engine that is not adopted yet is unknown, and would be asked to drain.
        await self.mesh.listen(subjects.engine_report(node), EngineReport, self._on_report).start()
        self._run("adoption", self._probe_until_adopted())
        await self.suspender.reap_strays(frozenset(i.instance_id for i in self.loop.state.list_live()))
        commands = self.mesh.respond(subjects.node_command(node), NODE_COMMAND, self._on_command, concurrent=True)
        await commands.start()
        publishing = self._run("publisher", self.publisher.run())
        self._run("ready", self._report_ready())
        self._run("health", report_health(partial(check_status, self.mesh, subjects.node_status(node))))
        self._run("meter", self.meter.run())
        with self.mesh.on_reconnect(self.publisher.want_whole):
            await wait_for_first(self.mesh.lost, stop)
        if self.mesh.lost.is_set():
            log.error("lost NATS; exiting without stopping engines")
            return 1
        await self._end()
        await end(publishing)
        await commands.stop()
        await self.executors.close()
        await self.launcher.close()
        await self.mesh.stop()
        return 0

    async def _probe_until_adopted(self) -> None:
        """Probe the connection to NATS until all adopted engines have reported, or were ended.

        A half-open connection loses their reports, and the client notices it after more time than
        they have.
        """
        while any(i.adopt_until is not None for i in self.loop.state.instances.values()):
            self.loop.post(e.NatsProbed(await self.mesh.probe(PROBE_WITHIN_S)))
            await asyncio.sleep(PROBE_EVERY_S)

    async def _report_ready(self) -> None:
        """Ready is a node whose next engine does not wait for imports."""
        await self.launcher.until_warm()
        report_ready()

    async def give_up(self) -> None:
        """Cancel everything that runs in this process. Engines keep running."""
        await self.effects.give_up()
        await end(*self._background)

    def _run(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._tasks.create_task(work, name=name)
        self._background.append(task)
        return task

    async def _on_report(self, report: EngineReport) -> None:
        self.effects.on_report(report)

    async def _on_loader(self, status: LoaderStatus) -> None:
        self.loop.post(e.LoaderReported(self.meter.on_loader_status(status), units_by_device(status), traffic_of(status)))

    async def _on_wanted(self, _: StatusWanted) -> None:
        self.publisher.want_whole()

    async def _on_command(self, command: NodeCommand) -> Done:
        reply, answer = self.effects.expect_reply()
        if isinstance(command, StartInstance):
            if command.instance_id not in self.loop.state.instances:
                self.timelines.get_timeline(command.instance_id).record_command(command.phases, time.monotonic())
            self.loop.post(e.StartCommand(command, reply))
        elif isinstance(command, SuspendInstance):
            self.loop.post(e.SuspendCommand(command, reply))
        elif isinstance(command, ResumeInstance):
            known = self.loop.state.instances.get(command.instance_id)
            if known is not None and known.state.parked:
                self.timelines.renew(command.instance_id).record_command(command.phases, time.monotonic())
            self.loop.post(e.ResumeCommand(command, reply))
        else:
            self.loop.post(e.StopCommand(command, reply))
        try:
            return await answer
        finally:
            if command.instance_id not in self.loop.state.instances:
                self.timelines.forget(command.instance_id)

    async def _end(self) -> None:
        """Drain every engine within its deadline, and publish the final status."""
        loop, settings = self.loop, self.settings
        loop.post(e.Shutdown(settings.stop_timeout))
        await loop.wait_until(lambda s: s.stopping, _STOPPING_WITHIN_S)
        await self.publisher.publish()
        ended_within = settings.stop_timeout + 2 * settings.kill_grace
        if not await loop.wait_until(lambda s: all(i.process is Process.GONE for i in s.list_live()), ended_within):
            log.error("failed to end all engines", extra={"instances": [i.instance_id for i in loop.state.list_live()]})
        if not await loop.wait_until(lambda s: not s.list_live(), _RELEASES_WITHIN_S):
            # Their records stay, so that the next agent of this node releases the weights.
            log.warning("failed to release all weights", extra={"instances": [i.instance_id for i in loop.state.list_live()]})
        for instance in loop.state.instances.values():
            if instance.ended_at is not None:
                self.effects.perform(e.Forget(instance.instance_id))
        await self.publisher.publish()


def _launcher(settings: NodeagentSettings) -> Launcher:
    specs = settings.node_state / "agent" / "specs"
    log_path = settings.node_state / "logs" / "spares.log"
    spares = Spares(settings.spares, settings.host_module, log_path, engine_environment(settings))
    return LauncherByEngine(_builtin_launcher(settings, specs), DirectLauncher(settings.host_module, specs, "host", spares))


def _builtin_launcher(settings: NodeagentSettings, specs: Path) -> Launcher:
    if not settings.zygote:
        return DirectLauncher(settings.engine_module, specs)
    log_path = settings.node_state / "logs" / "zygote.log"
    socket_path = settings.node_state / "agent" / "zygote.sock"
    return ZygoteLauncher(socket_path, log_path, engine_environment(settings), settings.zygote_module)


def _adopt(record: Record, loop: Loop, effects: EffectRunner, timelines: Timelines, executors: Executors) -> None:
    """Adopt an instance of an earlier agent.

    It is alive only if the process of its pid has the recorded start time.
    """
    instance = record.instance
    timelines.get_timeline(instance.instance_id).restore(record.phases)
    log_path = effects.log_path(instance.instance_id)
    if instance.process is Process.FORKING:
        # The earlier agent exited after the fork and before it recorded the pid.
        instance = instance.model_copy(update={"pid": find_log_writer(log_path)})
    alive = False
    if instance.process is not Process.GONE and instance.pid is not None:
        started = effects.processes.watch(instance.instance_id, instance.pid, instance.process_start)
        alive = started is not None
        instance = instance.model_copy(update={"process_start": started if alive else instance.process_start})
    frozen = alive and effects.is_frozen(instance)
    error = explain_exit(instance.pid or 0, None, (None, None), log_path)
    log.info("adopted an instance", extra={"instance": instance.instance_id, "pid": instance.pid, "alive": alive})
    has_exited = instance.pid is not None and instance.is_shared and not alive
    culprit = executors.culprit(instance.pid) if instance.pid is not None and has_exited else ""
    is_fault = has_exited and reports_fault(log_path)
    charges = effects.read_charges(instance.instance_id, instance.pid) if not alive else None
    loop.post(e.Adopted(instance, alive, error, frozen, culprit, is_fault, charges))
