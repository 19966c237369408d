"""Performs effects: the only port through which decisions act."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from nats.errors import Error as NatsError

from services.nodeagent.adapters.meter import Meter
from services.nodeagent.adapters.publisher import Publisher
from services.nodeagent.adapters.records import Records
from services.nodeagent.adapters.timelines import Timelines
from services.nodeagent.domain import events as e
from services.nodeagent.domain.state import Instance, Process
from services.nodeagent.engines.executors import Executors
from services.nodeagent.engines.exits import explain_exit, prune_logs, reports_fault
from services.nodeagent.engines.launcher import Launcher
from services.nodeagent.engines.process import Processes
from services.nodeagent.loop import Loop
from services.nodeagent.suspend.suspender import Suspender
from services.nodeagent.suspend.unpausing import Unpausing, was_nats_away
from shared.contracts import subjects
from shared.contracts.base import Done, ErrorBody, Message, Request
from shared.contracts.engine import ChangeModel, DrainEngine, EngineReport, EngineStart, PingEngine
from shared.contracts.loader import PrepareWeights, ReleaseWeights, WeightsReleased
from shared.contracts.node import InstanceState
from shared.contracts.phases import NEW_ZYGOTE
from shared.contracts.stages import LayerRange, Stage
from shared.engines.charge_page import read_charges
from shared.engines.final_charges import FinalCharges
from shared.errors import DeadlineExceeded, EngineFailed, ThawError, Unavailable, Unreachable, from_body
from shared.messaging import Mesh
from shared.sizing import need_of
from shared.tasks import end

R = TypeVar("R", bound=Message)
log = logging.getLogger(__name__)
_EXIT_STATUS_WITHIN_S = 0.25
_KEPT_LOGS = 64
_CLEAN_AGAIN_S = 2.0
_DETACHES_WITHIN_S = 5.0
_DRAINS_WITHIN_MS = 3_000
_ASK_AGAIN_S = 0.1


@dataclass(frozen=True)
class EffectPorts:
    """The adapters that effects use."""

    mesh: Mesh
    launcher: Launcher
    records: Records
    timelines: Timelines
    meter: Meter
    publisher: Publisher
    suspender: Suspender
    executors: Executors


class EffectRunner:
    """Performs effects; slow ones run as tasks and post their outcome as an event."""

    def __init__(
        self, parts: EffectPorts, node: str, logs: Path, environment: dict[str, str], loop: Loop, tasks: asyncio.TaskGroup
    ) -> None:
        self._mesh = parts.mesh
        self._launcher = parts.launcher
        self._records = parts.records
        self._timelines = parts.timelines
        self._meter = parts.meter
        self._publisher = parts.publisher
        self._suspender = parts.suspender
        self._executors = parts.executors
        self._detaching: set[str] = set()
        self._node = node
        self._logs = logs
        self._environment = environment
        self._post = loop.post
        self._loop = loop
        self._tasks = tasks
        self._running: set[asyncio.Task[None]] = set()
        self._unpausing = Unpausing(parts.mesh, parts.suspender, lambda: loop.state)
        self._replies: dict[int, asyncio.Future[Done]] = {}
        self.processes = Processes(self._on_exited)

    def expect_reply(self) -> tuple[int, asyncio.Future[Done]]:
        """Register a command.

        Returns a number for its `Reply` effect, and the future that the reply resolves.
        """
        future: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        number = id(future)
        self._replies[number] = future
        future.add_done_callback(lambda _: self._replies.pop(number, None))
        return number, future

    def perform(self, effect: e.Effect) -> None:
        match effect:
            case e.Persist():
                instance = self._loop.state.instances[effect.instance_id]
                self._records.save(instance, self._timelines.spans(instance, origin=0.0))
            case e.PersistEpoch():
                self._records.save_epoch(effect.epoch)
            case e.PersistCrashes():
                self._records.save_crashes(effect.crashes)
            case e.Reply():
                self._reply(effect.reply, effect.error)
            case e.Publish():
                self._publisher.notify_changed(urgent=effect.urgent, is_awaited=effect.is_awaited)
            case e.Signal():
                self._signal(effect)
            case e.Fork():
                self._spawn("fork", effect.instance_id, self._fork(effect.instance_id))
            case e.Prepare():
                self._spawn("prepare", effect.instance_id, self._prepare(effect.instance_id))
            case e.Take():
                self._begin_take(effect)
            case e.Ping():
                self._spawn("ping", effect.instance_id, self._ping(effect.instance_id))
            case e.RequestDrain():
                self._spawn("drain", effect.instance_id, self._drain(effect))
            case e.PauseEngine():
                self._unpausing.end(effect.instance_id)
                self._spawn("hold", effect.instance_id, self._hold(effect))
            case e.Suspend():
                self._spawn("suspend", effect.instance_id, self._suspend(effect))
            case e.Resume():
                self._begin_resume(effect)
            case e.Spill():
                self._spawn("spill", effect.instance_id, self._spill(effect))
            case e.Assess():
                self._spawn("assess", effect.instance_id, self._assess(effect))
            case e.Measure():
                self._spawn("measure", effect.instance_id, self._measure(effect))
            case e.VerifyMemoryFreed():
                self._spawn("prove", effect.instance_id, self._prove(effect.instance_id))
            case e.Release():
                self._spawn("release", effect.instance_id, self._release(effect.instance_id))
            case e.Forget():
                self._forget(effect.instance_id)

    async def give_up(self) -> None:
        """Cancel running effects. Engines keep running."""
        await end(*self._running)
        self.processes.close()

    def log_path(self, instance_id: str) -> Path:
        return self._logs / f"{instance_id}.engine.log"

    def read_charges(self, instance_id: str, pid: int | None) -> FinalCharges | None:
        """Return what an ended engine had computed; None: it is not known."""
        return read_charges(self._records.charges_path(instance_id), pid) if pid is not None else None

    def is_frozen(self, instance: Instance) -> bool:
        """True if a suspended instance's processes are as their suspension left them."""
        return self._suspender.is_frozen(instance)

    def _spawn(self, what: str, instance_id: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._tasks.create_task(work, name=f"{what} {instance_id}")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def _reply(self, number: int, error: ErrorBody | None) -> None:
        future = self._replies.get(number)
        if future is None or future.done():  # the deadline of the command has passed
            return
        if error is None:
            future.set_result(Done())
        else:
            future.set_exception(from_body(error))

    def _engine_start(self, instance_id: str) -> EngineStart:
        command = self._loop.state.instances[instance_id].command
        stages = command.card.pipeline
        return EngineStart(
            instance_id=instance_id,
            node=self._node,
            card=command.card,
            device=command.device_ids[0],
            devices=command.device_ids,
            separate_memory=self._meter.is_separate(command.device_ids[0]),
            separate_devices=tuple(filter(self._meter.is_separate, command.device_ids)),
            kv_bytes=command.kv_bytes if command.stage is not None else command.kv_bytes // max(1, len(stages)),
            kv_floor_bytes=min(command.kv_bytes, need_of(command.card).kv_floor),
            stage=command.stage if command.stage is not None else _first_stage(stages) if stages else None,
            traceparent=command.traceparent,
            log_path=str(self.log_path(instance_id)),
            environment=self._environment,
            charges_path=str(self._records.charges_path(instance_id)),
            cgroup_procs=self._suspender.group_for(self._loop.state.instances[instance_id]),
        )

    def _begin_take(self, effect: e.Take) -> None:
        pid = self._loop.state.instances[effect.instance_id].pid
        if self.processes.hand_over(effect.template, effect.instance_id) or pid is None:
            self._spawn("take", effect.instance_id, self._take(effect))
        else:  # its exit is still being explained, as that of the template
            self._on_exited(effect.instance_id, pid)

    async def _take(self, effect: e.Take) -> None:
        """Wake a template's engine and have its host become the instance.

        The host reports the outcome under the new id.
        """
        instances = self._loop.state.instances
        instance, template = instances[effect.instance_id], instances[effect.template]
        self._timelines.get_timeline(effect.instance_id).forking("template")
        request = ChangeModel(start=self._engine_start(effect.instance_id))
        try:
            await self._suspender.hand_over(template, instance)
            await self._ask(subjects.engine_control(effect.template), request, Done)
        except ThawError as error:
            log.error(
                "failed to take a template's engine; starting it cold",
                extra={"instance": effect.instance_id, "error": error.message},
            )
            self._post(e.TakeFailed(effect.instance_id, error.body()))
            return
        log.info("took a template's engine", extra={"instance": effect.instance_id, "template": effect.template})

    async def _fork(self, instance_id: str) -> None:
        command = self._loop.state.instances[instance_id].command
        start = self._engine_start(instance_id)
        try:
            pid = await self._launch(start, is_shared=self._loop.state.instances[instance_id].is_shared)
        except ThawError as error:
            log.error("failed to start an engine", extra={"instance": instance_id, "error": error.message})
            self._post(e.ForkFailed(instance_id, error.body()))
            return
        started = self.processes.watch(instance_id, pid)
        self._suspender.on_started(self._loop.state.instances[instance_id], pid)
        log.info("engine started", extra={"instance": instance_id, "pid": pid, "model": command.card.name})
        self._post(e.EngineForked(instance_id, pid, started or 0))
        if started is None:
            self._on_exited(instance_id, pid)

    async def _launch(self, start: EngineStart, *, is_shared: bool) -> int:
        """Start the instance's process, or attach it to its device's executor."""
        timeline = self._timelines.get_timeline(start.instance_id)
        if not is_shared:
            timeline.forking(self._launcher.name_for(start))
            return await self._launcher.launch(start)
        if self._executors.is_running(start.device):
            timeline.attaching()
        else:
            timeline.forking(NEW_ZYGOTE)  # the next instance does not pay for the executor's start
        pid = await self._executors.attach(start)
        timeline.end_attach()
        return pid

    def _on_exited(self, instance_id: str, pid: int) -> None:
        self._spawn("exit", instance_id, self._explain(instance_id, pid))

    async def _explain(self, instance_id: str, pid: int) -> None:
        status = await self._launcher.exit_status(pid, _EXIT_STATUS_WITHIN_S)
        with contextlib.suppress(EngineFailed):  # the proof that its memory is free repeats it
            await self._suspender.on_ended(instance_id)
        error = explain_exit(pid, status, self._meter.oom_window(), self.log_path(instance_id))
        culprit = self._executors.culprit(pid)
        is_stuck = self._executors.is_stuck(pid)
        is_fault = self._executors.is_silent(pid) or (bool(culprit) and reports_fault(self.log_path(instance_id)))
        if is_stuck:
            stuck = f"The executor (pid {pid}) was ended: a step of {culprit} did not end within THAW_STEP_TIMEOUT"
            error = EngineFailed(stuck).body()
        elif culprit:
            error = error.model_copy(update={"message": f"{error.message}\nIts executor was computing for {culprit}"})
        log.info("engine exited", extra={"instance": instance_id, "pid": pid, "status": status, "culprit": culprit})
        charges = self.read_charges(instance_id, pid)
        self._post(e.EngineExited(instance_id, pid, status, error, culprit, is_stuck, is_fault, charges))

    async def _detach(self, instance_id: str, pid: int) -> None:
        """Detach a shared instance; end its executor if that does not answer.

        If the instance's memory is still mapped, or NATS may be unreachable, nothing is posted, and
        the decision to end the instance is repeated after the grace period.
        """
        if instance_id in self._detaching:
            return
        self._detaching.add(instance_id)
        reconnections = self._mesh.reconnections
        try:
            detached = await self._executors.detach(instance_id, pid, _DETACHES_WITHIN_S)
        except (Unreachable, DeadlineExceeded) as silent:
            fields = {"instance": instance_id, "pid": pid, "error": silent.message}
            is_away = was_nats_away(self._mesh, reconnections)
            if is_away or not self._executors.note_silent(pid, _DETACHES_WITHIN_S):
                log.warning("failed to detach an instance; asking its executor again", extra={**fields, "is_nats_away": is_away})
                return  # the executor serves other models, and may not be to blame
            log.error("the executor does not answer; ending it", extra=fields)
            self.processes.send(instance_id, "kill")
        except (ThawError, NatsError) as fault:
            log.error("failed to detach an instance", extra={"instance": instance_id, "pid": pid, "error": str(fault)})
        else:
            self.processes.unwatch(instance_id)
            log.info("detached an instance", extra={"instance": instance_id, "pid": pid, "freed_bytes": detached.freed_bytes})
            ended = EngineFailed("The executor has detached the instance, which had ended").body()
            charges = self.read_charges(instance_id, pid)
            self._post(e.EngineExited(instance_id, pid, 0, ended, charges=charges, is_detached=True))
        finally:
            self._detaching.discard(instance_id)

    async def _ask(self, subject: str, request: Request, reply: type[R]) -> R:
        """Send a request as `Mesh.request` does; a missing connection raises `Unavailable`."""
        try:
            return await self._mesh.request(subject, request, reply)
        except NatsError as fault:
            raise Unavailable(f"NATS is unreachable: {fault}") from fault

    async def _ping(self, instance_id: str) -> None:
        try:
            report = await self._ask(subjects.engine_control(instance_id), PingEngine(deadline_ms=2_000), EngineReport)
        except ThawError as error:
            log.debug("an engine does not answer a ping yet", extra={"instance": instance_id, "error": error.message})
            return
        self.on_report(report)

    def on_report(self, report: EngineReport) -> None:
        """Handle a status report of an engine."""
        instance = self._loop.state.instances.get(report.instance_id)
        if instance is None and report.state in ("stopped", "failed") and self._executors.hosts(report.pid):
            self._spawn("detach", report.instance_id, self._detach(report.instance_id, report.pid))
        if instance is not None and instance.state.starting and instance.state is not InstanceState.RESUMING:
            self._timelines.get_timeline(report.instance_id).record_report(report, instance.command.traceparent)
        self._post(e.EngineReported(report))

    async def _drain(self, effect: e.RequestDrain) -> None:
        """Ask an engine to drain.

        A running engine that cannot be reached may be reconnecting to NATS, and is asked again.
        """
        error: ErrorBody | None = None
        request = DrainEngine(only_if_idle=effect.only_if_idle, reason=effect.reason, deadline_ms=_DRAINS_WITHIN_MS)
        until = time.monotonic() + _DRAINS_WITHIN_MS / 1000
        while True:
            try:
                await self._ask(subjects.engine_control(effect.instance_id), request, Done)
            except Unreachable as away:
                if self._is_draining(effect.instance_id) and time.monotonic() < until:
                    await asyncio.sleep(_ASK_AGAIN_S)
                    continue
                error = away.body()
            except ThawError as refused:
                error = refused.body()
            self._post(e.DrainAnswered(effect.instance_id, effect.only_if_idle, error))
            return

    def _is_draining(self, instance_id: str) -> bool:
        """True if the instance was asked to stop, and its process has had no signal yet."""
        instance = self._loop.state.instances.get(instance_id)
        if instance is None or instance.process is not Process.ALIVE:
            return False
        return instance.stop_asked and instance.kill_at is None

    def _signal(self, effect: e.Signal) -> None:
        instance = self._loop.state.instances[effect.instance_id]
        if instance.is_shared and instance.pid is not None:
            self._spawn("detach", effect.instance_id, self._detach(effect.instance_id, instance.pid))
            return
        self.processes.send(effect.instance_id, effect.signal)
        if effect.signal == "kill":
            self._suspender.cgroups.kill(effect.instance_id)

    async def _hold(self, effect: e.PauseEngine) -> None:
        error: ErrorBody | None = None
        try:
            await self._suspender.hold(effect.instance_id)
        except ThawError as refused:
            error = refused.body()
        self._post(e.PauseAnswered(effect.instance_id, effect.only_if_idle, error))

    async def _suspend(self, effect: e.Suspend) -> None:
        instance = self._loop.state.instances[effect.instance_id]
        try:
            taken = await self._suspender.suspend(instance, effect.way)
        except ThawError as error:
            log.warning(
                "failed to suspend an instance", extra={"instance": effect.instance_id, "way": effect.way, "error": error.message}
            )
            self._post(e.SuspendFailed(effect.instance_id, error.body()))
            return
        self._post(e.Suspended(effect.instance_id, taken.freed_bytes, taken.left_bytes, taken.used_bytes, taken.snapshot_bytes))
        await self._meter.measure_and_publish(instance)

    async def _spill(self, effect: e.Spill) -> None:
        try:
            freed = await self._suspender.spill(self._loop.state.instances[effect.instance_id], effect.way)
        except ThawError as error:
            log.warning("failed to spill a snapshot to swap", extra={"instance": effect.instance_id, "error": error.message})
            self._post(e.Spilled(effect.instance_id, error=error.body()))
            return
        log.info("spilled a snapshot to swap", extra={"instance": effect.instance_id, "bytes": freed})
        self._post(e.Spilled(effect.instance_id, freed))

    def _begin_resume(self, effect: e.Resume) -> None:
        self._unpausing.end(effect.instance_id)
        task = self._spawn("resume", effect.instance_id, self._resume(effect))
        if effect.way is None:
            self._unpausing.keep(effect.instance_id, task)

    async def _resume(self, effect: e.Resume) -> None:
        instance = self._loop.state.instances[effect.instance_id]
        timeline = self._timelines.get_timeline(effect.instance_id)
        timeline.restoring(effect.way or "held")
        try:
            used = await (
                self._suspender.resume(instance, effect.way) if effect.way is not None else self._unpausing.unpause(instance)
            )
        except ThawError as error:
            log.error(
                "failed to resume an instance",
                extra={"instance": effect.instance_id, "way": effect.way, "error": error.message},
            )
            self._post(e.ResumeFailed(effect.instance_id, error.body()))
            return
        finally:
            timeline.record_restored(instance.command.traceparent)
        self._post(e.Resumed(effect.instance_id, used))

    async def _assess(self, effect: e.Assess) -> None:
        await asyncio.sleep(effect.after_s)
        instance = self._loop.state.instances.get(effect.instance_id)
        if instance is not None and (not effect.after_s or instance.state is InstanceState.READY):
            outlook, used = await self._suspender.assess(instance)
            self._post(e.Assessed(effect.instance_id, outlook, used))

    async def _measure(self, effect: e.Measure) -> None:
        instance = self._loop.state.instances[effect.instance_id]
        await asyncio.sleep(effect.after_s)
        await self._meter.measure_and_publish(self._loop.state.instances.get(effect.instance_id, instance))

    async def _prove(self, instance_id: str) -> None:
        instance = self._loop.state.instances[instance_id]
        while True:
            try:
                # An earlier agent may have died before it cleaned up after this engine.
                await self._suspender.on_ended(instance_id, is_hosted=instance.command.card.spec.engine != "builtin")
                await self._launcher.clean_up(instance_id, instance.command.card)
                freed = await self._meter.wait_memory_freed(instance)
            except ThawError as fault:
                log.error("failed to clean up after an engine; retrying", extra={"instance": instance_id, "error": fault.message})
                await asyncio.sleep(_CLEAN_AGAIN_S)
                continue
            except TimeoutError as late:
                log.error("memory of an exited engine is not free yet", extra={"instance": instance_id, "error": str(late)})
                continue
            self._post(e.MemoryFreed(instance_id, freed))
            return

    async def _prepare(self, instance_id: str) -> None:
        """Have the loader begin. The engine attaches the weights anyway, and reports failures."""
        command = self._loop.state.instances[instance_id].command
        request = PrepareWeights(
            token=command.token,
            instance_id=instance_id,
            card=command.card,
            traceparent=command.traceparent,
            device=command.device_ids[0],
        )
        try:
            await self._ask(subjects.loader_command(self._node), request, Done)
        except ThawError as error:
            log.warning("failed to prepare weights", extra={"instance": instance_id, "error": error.message})

    async def _release(self, instance_id: str) -> None:
        request = ReleaseWeights(instance_id=instance_id, deadline_ms=5_000)
        try:
            before = await self._meter.loader_holds(instance_id)
            released = await self._ask(subjects.loader_command(self._node), request, WeightsReleased)
        except ThawError as error:
            log.warning("failed to release weights; retrying", extra={"instance": instance_id, "error": error.message})
            self._post(e.ReleaseFailed(instance_id, error.body()))
            return
        freed = released.freed_bytes
        if released.device_bytes:
            if await self._meter.wait_memory_returned(instance_id, before, released.device_bytes):
                freed += released.device_bytes
            else:
                log.warning("GPU memory that the loader freed still shows as used", extra={"instance": instance_id})
        self._post(e.WeightsReleased(instance_id, freed))

    def _forget(self, instance_id: str) -> None:
        self._records.forget(instance_id)
        self._timelines.forget(instance_id)
        self._meter.forget(instance_id)
        prune_logs(self._logs, _KEPT_LOGS, frozenset(self._loop.state.instances))


def _first_stage(stages: tuple[LayerRange, ...]) -> Stage:
    """Return the first stage of a new group; its process starts the others."""
    group, secret = secrets.token_hex(16), secrets.token_urlsafe(32)
    return Stage(group_id=group, index=0, count=len(stages), layers=stages[0], secret=secret)
