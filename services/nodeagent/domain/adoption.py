"""A new agent takes over what an earlier one left: engines go on serving, dead ones are cleaned up after, silent ones are ended."""

from __future__ import annotations

from services.nodeagent.domain import ending, starting, stopping
from services.nodeagent.domain.events import Adopted, AskDrain, Persist, Ping, Publish
from services.nodeagent.domain.state import Instance, Process
from services.nodeagent.domain.turn import Turn
from shared.contracts.node import InstanceState
from shared.errors import EngineFailed


def on_adopted(turn: Turn, event: Adopted) -> None:
    """1. Ended: shown for the rest of its minute. 2. Process gone: its end is carried through (again). 3. Alive: shown as it was at
    once, since it serves without us; asked for a report, and given up if none comes; an interrupted stop goes on."""
    instance = event.instance
    if instance.ended_at is not None:  # 1
        turn.put(instance)
        turn.emit(Publish())
        return
    command = instance.command
    turn.books(turn.state.ledger.rebook(instance.instance_id, command.device_ids, command.reserve_bytes))
    # What was under way died with the earlier agent; it is proved and released anew.
    instance = turn.put(instance.model_copy(update={"release_at": None, "progress_at": turn.now}))
    if not event.alive:  # 2
        known_dead = instance.process is Process.GONE
        ending.process_gone(turn, instance, None if known_dead else event.error)
        return
    instance = instance.model_copy(  # 3
        update={"process": Process.ALIVE, "adopt_until": turn.now + turn.state.policy.adopt_s}
    )
    turn.put(instance)
    turn.emit(Persist(instance.instance_id), Publish(), Ping(instance.instance_id))
    if instance.state is InstanceState.FAILED or (instance.stop_asked and instance.kill_at is not None):
        turn.put(instance.model_copy(update={"kill_at": None}))
        stopping.terminate(turn, turn.state.instances[instance.instance_id])
    elif instance.stop_asked and instance.drain_until is None:
        stopping.kill(turn, instance)
    elif instance.stop_asked:
        turn.emit(AskDrain(instance.instance_id, only_if_idle=False, reason="continued after the nodeagent's restart"))


def on_silence(turn: Turn, instance: Instance) -> None:
    starting.fail(
        turn,
        instance,
        EngineFailed(
            f"the engine (pid {instance.pid}) did not answer within {turn.state.policy.adopt_s:g} s after the nodeagent's restart"
        ).body(),
    )
    stopping.kill(turn, turn.state.instances[instance.instance_id])
