"""Wires a nodeagent and sees to its order of start and end.

Start: records read → devices → mesh connected → what runs is adopted and shown → commands taken.
Clean end (SIGTERM): told to the mesh → engines drain, or are ended when their time is over → weights released, memory proved →
commands no longer taken → zygote ended → records removed. If NATS is lost for good it ends at once and leaves the engines alone:
the next agent takes them over.
"""

from __future__ import annotations

import asyncio
import logging
import time

from services.nodeagent.devices.inventory import open_devices
from services.nodeagent.devices.parse import labels
from services.nodeagent.devices.port import DeviceMissing
from services.nodeagent.domain import events as e
from services.nodeagent.domain.memory import Ledger
from services.nodeagent.domain.state import NodeState, Policy, Process
from services.nodeagent.engines.direct import DirectLauncher
from services.nodeagent.engines.exits import explain_exit
from services.nodeagent.engines.launcher import Launcher, engine_environment
from services.nodeagent.engines.process import find_writer
from services.nodeagent.engines.zygote import MAX_SOCKET_PATH, ZygoteLauncher
from services.nodeagent.loop import Loop
from services.nodeagent.meter import Meter
from services.nodeagent.performer import Performer
from services.nodeagent.publisher import Publisher
from services.nodeagent.records import Record, Records
from services.nodeagent.settings import NodeagentSettings
from services.nodeagent.timelines import Timelines
from shared.contracts import subjects
from shared.contracts.base import Done
from shared.contracts.engine import EngineReport
from shared.contracts.loader import LoaderStatus
from shared.contracts.node import NODE_COMMAND, NodeCommand, StartInstance, StatusWanted
from shared.messaging import Mesh

log = logging.getLogger(__name__)
_RELEASES_WITHIN_S = 2.0


async def run(settings: NodeagentSettings, stop: asyncio.Event) -> int:
    """Exit status: 0 stopped, 1 lost NATS, 2 a setting that cannot work here."""
    agent_directory = settings.node_state / "agent"
    logs = settings.node_state / "logs"
    socket_path = agent_directory / "zygote.sock"
    if settings.zygote and len(str(socket_path).encode()) > MAX_SOCKET_PATH:
        log.error(f"THAW_HOME is too long: {socket_path} has over {MAX_SOCKET_PATH} bytes, the most a Unix socket's path may have")
        return 2
    try:
        logs.mkdir(parents=True, exist_ok=True)
        records = Records(agent_directory)
        known = list(records.load())
        adopting = any(r.instance.ended_at is None for r in known)
        devices = open_devices(settings, agent_directory / "budgets.json", adopting=adopting)
    except (DeviceMissing, OSError) as fault:
        log.error(f"cannot start: {fault}")
        return 2
    launcher: Launcher = (
        ZygoteLauncher(socket_path, logs / "zygote.log", engine_environment(settings), settings.zygote_module)
        if settings.zygote
        else DirectLauncher(settings.engine_module, agent_directory / "specs")
    )
    ledger = Ledger({d: device.info.budget_bytes for d, device in devices.items()})
    policy = Policy(kill_grace_s=settings.kill_grace, adopt_s=settings.adopt_timeout)
    mesh = Mesh(settings, f"nodeagent-{settings.node}")
    timelines = Timelines(f"nodeagent-{settings.node}")
    async with asyncio.TaskGroup() as tasks:
        loop = Loop(NodeState(ledger, policy, newest_epoch=records.epoch()), lambda effect: performer.perform(effect))
        meter = Meter(devices, lambda: loop.state, lambda: publisher.changed(urgent=False))
        publisher = Publisher(mesh, settings.node, labels(settings.labels), devices, lambda: loop.state, meter, timelines)
        performer = Performer(
            mesh,
            settings.node,
            launcher,
            records,
            timelines,
            meter,
            publisher,
            logs,
            engine_environment(settings),
            loop.post,
            lambda: loop.state,
            tasks,
        )
        background = [tasks.create_task(launcher.run(), name="launcher"), tasks.create_task(loop.run(), name="loop")]
        try:
            return await _serve(
                settings, stop, mesh, loop, meter, publisher, performer, timelines, known, launcher, background, tasks
            )
        finally:
            performer.cancel()
            for task in background:
                task.cancel()


async def _serve(
    settings: NodeagentSettings,
    stop: asyncio.Event,
    mesh: Mesh,
    loop: Loop,
    meter: Meter,
    publisher: Publisher,
    performer: Performer,
    timelines: Timelines,
    known: list[Record],
    launcher: Launcher,
    background: list[asyncio.Task[None]],
    tasks: asyncio.TaskGroup,
) -> int:
    async def on_report(report: EngineReport) -> None:
        performer.heard(report)

    async def on_loader(status: LoaderStatus) -> None:
        loop.post(e.LoaderHeard(meter.loader_said(status)))

    async def on_wanted(_: StatusWanted) -> None:
        publisher.changed(urgent=True)

    async def on_command(command: NodeCommand) -> Done:
        reply, answer = performer.expect_reply()
        if isinstance(command, StartInstance):
            if command.instance_id not in loop.state.instances:
                timelines.of(command.instance_id).received(command.phases, time.monotonic())
            loop.post(e.StartCommand(command, reply))
        else:
            loop.post(e.StopCommand(command, reply))
        try:
            return await answer
        finally:
            if command.instance_id not in loop.state.instances:
                timelines.forget(command.instance_id)

    listeners = [
        mesh.listen(subjects.engine_report(settings.node), EngineReport, on_report),
        mesh.listen(subjects.loader_status(settings.node), LoaderStatus, on_loader),
        mesh.listen(subjects.STATUS_WANTED, StatusWanted, on_wanted),
    ]
    await mesh.start()
    for record in known:
        _adopt(record, loop, performer, timelines)
    await loop.until(lambda state: len(state.instances) >= len(known), 5.0)
    commands = mesh.respond(subjects.node_command(settings.node), NODE_COMMAND, on_command, concurrent=True)
    await commands.start()
    background.append(tasks.create_task(publisher.run(), name="publisher"))
    background.append(tasks.create_task(meter.run(), name="meter"))
    lost, stopped = asyncio.create_task(mesh.lost.wait()), asyncio.create_task(stop.wait())
    await asyncio.wait((lost, stopped), return_when=asyncio.FIRST_COMPLETED)
    for waiter in (lost, stopped):
        waiter.cancel()
    if mesh.lost.is_set():
        log.error("NATS is lost; ending without touching the engines")
        return 1
    await _end(settings, loop, performer, publisher)
    await commands.stop()
    for listener in listeners:
        await listener.stop()
    await launcher.close()
    await mesh.stop()
    return 0


def _adopt(record: Record, loop: Loop, performer: Performer, timelines: Timelines) -> None:
    """Take over an instance of an earlier agent: alive only if the process of that pid is the one that was started then."""
    instance = record.instance
    timelines.of(instance.instance_id).restore(record.phases)
    log_path = performer.log_path(instance.instance_id)
    if instance.process is Process.FORKING:
        # The earlier agent ended between the fork and its note of it.
        instance = instance.model_copy(update={"pid": find_writer(log_path)})
    alive = False
    if instance.process is not Process.GONE and instance.pid is not None:
        started = performer.processes.watch(instance.instance_id, instance.pid, instance.process_start)
        alive = started is not None
        instance = instance.model_copy(update={"process_start": started if alive else instance.process_start})
    error = explain_exit(instance.pid or 0, None, (None, None), log_path)
    log.info("instance found", extra={"instance": instance.instance_id, "pid": instance.pid, "alive": alive})
    loop.post(e.Adopted(instance, alive, error))


async def _end(settings: NodeagentSettings, loop: Loop, performer: Performer, publisher: Publisher) -> None:
    loop.post(e.Shutdown(settings.stop_timeout))
    processes_within = settings.stop_timeout + 2 * settings.kill_grace
    await loop.until(lambda s: s.stopping, 1.0)
    await publisher.publish()
    if not await loop.until(lambda s: all(i.process is Process.GONE for i in s.live()), processes_within):
        log.error("engines are left that could not be ended", extra={"instances": [i.instance_id for i in loop.state.live()]})
    if not await loop.until(lambda s: not s.live(), _RELEASES_WITHIN_S):
        # Their records stay: the next agent of this node releases them.
        log.warning("the loader did not release all weights", extra={"instances": [i.instance_id for i in loop.state.live()]})
    live = {i.instance_id for i in loop.state.live()}
    for instance_id in loop.state.instances:
        if instance_id not in live:
            performer.perform(e.Forget(instance_id))
    await publisher.publish()
