"""A new agent takes over what an earlier one left: engines go on serving, dead ones are cleaned up after, silent ones are ended."""

from __future__ import annotations

from services.nodeagent.domain import process_exit, starting, termination
from services.nodeagent.domain.events import Adopted, AskDrain, Assess, Persist, Ping, Publish, Resume
from services.nodeagent.domain.state import Instance, Process
from services.nodeagent.domain.transition import Turn
from shared.contracts.node import InstanceState
from shared.contracts.phases import Phase
from shared.errors import EngineFailed, InsufficientMemory


def on_adopted(turn: Turn, event: Adopted) -> None:
    """1. Ended: shown for the rest of its minute. 2. Process gone: its end is carried through (again). 3. Alive: shown as it was at
    once, since it serves without us; asked for a report, and given up if none comes; an interrupted stop goes on. 4. Suspended, and
    frozen still: stays so. 5. Any other suspension or resumption on its way: brought back to serving, proved, or started cold."""
    instance = event.instance
    if instance.ended_at is not None:  # 1
        turn.put(instance)
        turn.emit(Publish())
        return
    command = instance.command
    if instance.process is Process.QUEUED:  # its place in the queue went with the earlier agent, and it holds nothing
        waited = InsufficientMemory("the nodeagent was restarted while it waited for room", should_retry=True)
        process_exit.process_gone(turn, turn.put(instance), waited.body())
        return
    still = instance.state.parked and event.alive and (event.frozen or instance.state is InstanceState.ASLEEP)
    booked = instance.parking.left_bytes if still else max(command.reserve_bytes, instance.parking.need_bytes)
    if instance.booked:
        turn.books(turn.state.ledger.rebook(instance.instance_id, command.device_ids, booked))
    # What was under way died with the earlier agent; it is proved and released anew.
    instance = turn.put(instance.model_copy(update={"release_at": None, "progress_at": turn.now}))
    if not event.alive:  # 2
        known_dead = instance.process is Process.GONE
        process_exit.process_gone(turn, instance, None if known_dead else event.error)
        return
    if not instance.stop_asked and instance.state is not InstanceState.FAILED:
        if still:  # 4
            turn.change(instance.model_copy(update={"process": Process.ALIVE}))
            return
        if instance.parking.holding or instance.parking.freezing or instance.state is InstanceState.RESUMING:  # 5
            _bring_back(turn, instance.model_copy(update={"process": Process.ALIVE, "drain_until": None}))
            return
    instance = instance.model_copy(  # 3
        update={"process": Process.ALIVE, "adopt_until": turn.now + turn.state.policy.adopt_s}
    )
    turn.put(instance)
    turn.emit(Persist(instance.instance_id), Publish(), Ping(instance.instance_id))
    if instance.state is InstanceState.READY and not instance.stop_asked:
        turn.emit(Assess(instance.instance_id))
    if instance.state is InstanceState.FAILED or (instance.stop_asked and instance.kill_at is not None):
        turn.put(instance.model_copy(update={"kill_at": None}))
        termination.terminate(turn, turn.state.instances[instance.instance_id])
    elif instance.stop_asked and instance.drain_until is None:
        termination.kill(turn, instance)
    elif instance.stop_asked:
        turn.emit(AskDrain(instance.instance_id, only_if_idle=False, reason="continued after the nodeagent's restart"))


def _bring_back(turn: Turn, instance: Instance) -> None:
    """How far the earlier agent came is not known: all of it is undone, as far as it is there to be undone."""
    frozen = instance.parking.freezing
    update = {"state": InstanceState.RESUMING, "phase": Phase.RESTORE, "progress_at": turn.now}
    parked = instance.parking.model_copy(update={"holding": False, "wake_asked": False, "begun_at": turn.now})
    turn.change(instance.model_copy(update=update), parking=parked)
    turn.emit(Resume(instance.instance_id, instance.parking.outlook.way if frozen else None))


def on_silence(turn: Turn, instance: Instance) -> None:
    starting.fail(
        turn,
        instance,
        EngineFailed(
            f"the engine (pid {instance.pid}) did not answer within {turn.state.policy.adopt_s:g} s after the nodeagent's restart"
        ).body(),
    )
    termination.kill(turn, turn.state.instances[instance.instance_id])
