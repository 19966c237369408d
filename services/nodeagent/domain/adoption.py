"""Adoption of an earlier agent's instances.

Engines keep serving, dead ones are cleaned up, silent ones are ended.
"""

from __future__ import annotations

from services.nodeagent.domain import isolation, process_exit, starting, termination
from services.nodeagent.domain.events import Adopted, Assess, NatsProbed, Persist, Ping, Publish, RequestDrain, Resume
from services.nodeagent.domain.state import Instance, Process
from services.nodeagent.domain.transition import Transition
from shared.contracts.node import InstanceState
from shared.contracts.phases import Phase
from shared.errors import EngineFailed, InsufficientMemory
from shared.unit_charges import booked_weights


def on_adopted(transition: Transition, event: Adopted) -> None:
    """Adopt an instance from its record.

    1. Ended: it stays in the status for the rest of its minute.
    2. The process is gone: its teardown starts again.
    3. Alive: published as recorded, because it serves without an agent. It is asked for a report
       and ended if none arrives; an interrupted stop continues.
    4. Suspended and still frozen: it stays so.
    5. Any other suspension or resume in progress: resumed and verified, or started cold.
    """
    instance = event.instance
    if instance.ended_at is not None:  # 1
        transition.put(instance)
        transition.emit(Publish())
        return
    command = instance.command
    if instance.process is Process.QUEUED:  # the queue was lost with the earlier agent, and the instance holds nothing
        waited = InsufficientMemory(
            "The nodeagent was restarted while the instance waited for memory. Start it again", should_retry=True
        )
        process_exit.process_gone(transition, transition.put(instance), waited.body())
        return
    is_still_suspended = instance.state.parked and event.alive and (event.frozen or instance.state is InstanceState.ASLEEP)
    booked = (
        instance.suspend_state.left_bytes if is_still_suspended else max(command.reserve_bytes, instance.suspend_state.need_bytes)
    )
    if instance.booked:
        weights = booked_weights(command.card, command.kv_bytes, command.executor_bytes) if not is_still_suspended else None
        transition.set_ledger(transition.state.ledger.set_booking(instance.instance_id, command.device_ids, booked, weights))
    # Pending work died with the earlier agent: memory is verified and weights are released again.
    instance = transition.put(instance.model_copy(update={"release_at": None, "progress_at": transition.now}))
    if event.alive:
        isolation.charge_executor(transition, instance)
    if not event.alive:  # 2
        known_dead = instance.process is Process.GONE
        if not known_dead:
            isolation.count_crash(transition, instance, event.culprit, None, is_fault=event.is_fault)
        process_exit.process_gone(transition, instance, None if known_dead else event.error, event.charges)
        return
    if not instance.stop_asked and instance.state is not InstanceState.FAILED:
        if is_still_suspended:  # 4
            transition.change(instance.model_copy(update={"process": Process.ALIVE}))
            return
        p = instance.suspend_state
        if p.pause_asked or p.pausing or p.freezing or instance.state is InstanceState.RESUMING:  # 5
            _bring_back(transition, instance.model_copy(update={"process": Process.ALIVE, "drain_until": None}))
            return
    instance = instance.model_copy(  # 3
        update={"process": Process.ALIVE, "adopt_until": transition.now + transition.state.policy.adopt_s}
    )
    transition.put(instance)
    transition.emit(Persist(instance.instance_id), Publish(), Ping(instance.instance_id))
    if instance.state is InstanceState.READY and not instance.stop_asked:
        transition.emit(Assess(instance.instance_id))
    if instance.state is InstanceState.FAILED or (instance.stop_asked and instance.kill_at is not None):
        transition.put(instance.model_copy(update={"kill_at": None}))
        termination.terminate(transition, transition.state.instances[instance.instance_id])
    elif instance.stop_asked and instance.drain_until is None:
        termination.kill(transition, instance)
    elif instance.stop_asked:
        transition.emit(RequestDrain(instance.instance_id, only_if_idle=False, reason="continued after the nodeagent's restart"))


def _bring_back(transition: Transition, instance: Instance) -> None:
    """Undo a suspension of unknown progress."""
    frozen = instance.suspend_state.freezing
    update = {"state": InstanceState.RESUMING, "phase": Phase.RESTORE, "progress_at": transition.now}
    undone = {"pause_asked": False, "pausing": False, "resume_requested": False, "begun_at": transition.now}
    parked = instance.suspend_state.model_copy(update=undone)
    transition.change(instance.model_copy(update=update), suspend_state=parked)
    transition.emit(Resume(instance.instance_id, instance.suspend_state.outlook.way if frozen else None))


def on_nats_probed(transition: Transition, event: NatsProbed) -> None:
    """Ask engines that have not reported once more.

    If NATS does not answer this agent, they are not to blame, and get all of their time again.
    """
    for instance in list(transition.state.instances.values()):
        if instance.adopt_until is None or instance.process is not Process.ALIVE:
            continue
        if event.is_reachable:
            transition.emit(Ping(instance.instance_id))
        else:
            transition.put(instance.model_copy(update={"adopt_until": transition.now + transition.state.policy.adopt_s}))


def on_adoption_timeout(transition: Transition, instance: Instance) -> None:
    """End an engine that did not report to this agent in time."""
    starting.fail(
        transition,
        instance,
        EngineFailed(
            f"The engine (pid {instance.pid}) did not answer within {transition.state.policy.adopt_s:g} s after the nodeagent's restart"
        ).body(),
    )
    termination.kill(transition, transition.state.instances[instance.instance_id])
