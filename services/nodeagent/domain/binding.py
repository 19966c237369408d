"""Late binding: the nodeagent decides the device of a shared instance at its start (ADR 0081).

The scheduler plans a device, and grants others of the node (`StartInstance.grant`). Only the
nodeagent knows which of them compute and load at the moment of the start. This module reads that
from its state; `late_binding.choose` has the rules.
"""

from __future__ import annotations

from dataclasses import replace

from services.nodeagent.domain.events import Prepare
from services.nodeagent.domain.late_binding import Binding, DeviceLoad, Loads, StartTimes, choose
from services.nodeagent.domain.reservations import Reservation, blocking_reservation
from services.nodeagent.domain.state import Instance, NodeState, Process
from services.nodeagent.domain.transition import Transition
from shared.contracts.node import InstanceState, StartInstance

_MAX_MODELS = 1024
"""Models whose start times are kept."""
_COMPUTING = (InstanceState.READY, InstanceState.DRAINING)


def bind(state: NodeState, command: StartInstance, reservation: Reservation) -> Binding | None:
    """Choose the device of a start: the planned device, or one of the granted ones.

    Returns:
        The binding; None: no device was granted, or none of them has room now.
    """
    if not command.grant or len(command.device_ids) != 1:
        return None
    granted = dict.fromkeys((*command.device_ids, *command.grant))
    fitting = [d for d in granted if _has_room(state, d, reservation)]
    return choose([load_of(state, d, command.card.info.revision) for d in fitting]) if fitting else None


def _has_room(state: NodeState, device_id: str, r: Reservation) -> bool:
    if blocking_reservation(state.queue, (device_id,)) is not None:
        return False
    return state.ledger.refusal((device_id,), r.nbytes, r.instance_id, r.weights) is None


def load_of(state: NodeState, device_id: str, weights_id: str) -> DeviceLoad:
    """Return what a device does now, for a start of a model with these weights."""
    traffic = state.traffic
    is_resident = weights_id in traffic.whole.get(device_id, frozenset())
    peers = [d for d, whole in traffic.whole.items() if d != device_id and weights_id in whole]
    speeds = [traffic.speeds.get((d, device_id), 0.0) for d in peers if count_running(state, d)]
    return DeviceLoad(
        device_id,
        running=count_running(state, device_id),
        is_resident=is_resident,
        peer_bytes_per_second=max(speeds, default=0.0),
        neighbour_loads=_neighbour_loads(state, device_id),
        has_executor=bool(state.ledger.executors.get(device_id)),
    )


def count_running(state: NodeState, device_id: str) -> int:
    """Return the requests that a device computes, and the starts that will compute there."""
    running = 0
    for i in _list_on(state, device_id):
        if i.state.starting:
            running += 1
        elif i.state in _COMPUTING:
            running += i.load.active + i.load.waiting
    return running


def _list_on(state: NodeState, device_id: str) -> list[Instance]:
    alive = (i for i in state.instances.values() if i.process in (Process.FORKING, Process.ALIVE) and i.error is None)
    return [i for i in alive if device_id in i.command.device_ids]


def _neighbour_loads(state: NodeState, device_id: str) -> Loads:
    """Return the worst load by the devices that share a device's bus.

    A load that belongs to no known start counts as heavy.
    """
    worst: Loads = "none"
    for neighbour in state.traffic.list_neighbours(device_id):
        starts = [i for i in _list_on(state, neighbour) if i.state.starting and not (i.binding and i.binding.is_resident)]
        if any(is_heavy(state, i.command) for i in starts) or (state.traffic.loads.get(neighbour) and not starts):
            return "heavy"
        if starts:
            worst = "light"
    return worst


def is_heavy(state: NodeState, command: StartInstance) -> bool:
    """True if loads of neighbours slow the model's starts down, or that has not been measured."""
    return state.start_times.get(_key(command), StartTimes()).is_heavy


def prepare(transition: Transition, instance: Instance) -> None:
    """Have the loader begin to load, if the nodeagent and not the scheduler chose the device."""
    if instance.command.grant:
        transition.emit(Prepare(instance.instance_id))


def record_start_time(transition: Transition, instance: Instance, took_s: float) -> None:
    """Record the time of a start that copied its weights from host memory, in a running executor.

    Other starts do not show how much loads of neighbours slow a model down, and are ignored.

    Args:
        transition: The decision.
        instance: The instance, which has just become ready.
        took_s: Seconds since the start command.
    """
    bound = instance.binding
    if bound is None or bound.rule == "peer" or bound.is_resident or not bound.has_executor or not instance.is_shared:
        return
    times = dict(transition.state.start_times)
    key = _key(instance.command)
    times[key] = times.pop(key, StartTimes()).add(took_s, beside=bound.neighbour_loads != "none")
    transition.state = replace(transition.state, start_times=dict(list(times.items())[-_MAX_MODELS:]))


def _key(command: StartInstance) -> str:
    return f"{command.card.name}@{command.card.info.revision}"
