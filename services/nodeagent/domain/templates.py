"""Templates: suspended engines that become an instance of another model of their template key.

The suspended instance ends, and its process belongs to the new one. No memory is freed in between:
one decision replaces the old booking by the new one in the ledger.
"""

from __future__ import annotations

from services.nodeagent.domain import binding, termination
from services.nodeagent.domain.events import Fork, Take, TakeFailed
from services.nodeagent.domain.memory import Ledger
from services.nodeagent.domain.state import Instance, NodeState, Process
from services.nodeagent.domain.transition import Transition
from shared.contracts.node import InstanceState, StartInstance
from shared.contracts.phases import Phase
from shared.template_key import template_key


def find_offered(state: NodeState) -> dict[str, str]:
    """Return the template keys of the suspended instances that other models may take, by instance.

    The node offers the latest suspended instance of each key, at most `THAW_TEMPLATES` in all.
    """
    found: dict[str, str] = {}
    parked = [i for i in state.instances.values() if _is_available(state, i)]
    for i in sorted(parked, key=lambda i: i.suspend_state.suspended.at if i.suspend_state.suspended else 0.0, reverse=True):
        key = template_key(i.command.card)
        if len(found) < state.templates and key and key not in found.values():
            found[i.instance_id] = key
    return found


def template_of(state: NodeState, command: StartInstance) -> Instance | None:
    """Return the suspended instance whose engine the command takes; None: it is not available."""
    template = state.instances.get(command.template or "")
    if template is None or not _is_available(state, template):
        return None
    old = template.command
    same = (old.device_ids, old.kv_bytes) == (command.device_ids, command.kv_bytes)
    key = template_key(command.card)
    return template if same and key and key == template_key(old.card) else None


def _is_available(state: NodeState, i: Instance) -> bool:
    waits = any(r.instance_id == i.instance_id for r in state.queue)
    return i.state.parked and i.process is Process.ALIVE and not i.stop_asked and not waits


def ledger_without_template(state: NodeState, command: StartInstance) -> Ledger:
    """Return the ledger without the booking of the command's template."""
    template = template_of(state, command)
    return state.ledger if template is None else state.ledger.remove_booking(template.instance_id)


def begin(transition: Transition, instance: Instance) -> None:
    """Start an instance with booked memory: take its template's engine, or fork a process."""
    template = template_of(transition.state, instance.command)
    if template is None:
        transition.change(instance, process=Process.FORKING)
        binding.prepare(transition, instance)
        transition.emit(Fork(instance.instance_id))
        return
    transition.set_ledger(transition.state.ledger.remove_booking(template.instance_id))
    kept = template.suspend_state.model_copy(update={"snapshot_bytes": 0, "freezing": False, "pausing": False})
    transition.change(
        template,
        process=Process.GONE,
        state=InstanceState.STOPPED,
        weights_freed=0,
        memory_freed=0,
        ended_at=transition.now,
        drain_until=None,
        kill_at=None,
        suspend_state=kept,
    )
    transition.change(
        instance,
        process=Process.ALIVE,
        pid=template.pid,
        process_start=template.process_start,
        engine_pids=template.engine_pids,
        sleep_levels=template.sleep_levels,
        taken_from=template.instance_id,
        phase=Phase.RESTORE,
    )
    transition.emit(Take(instance.instance_id, template.instance_id))


def on_take_failed(transition: Transition, event: TakeFailed) -> None:
    """End the process. One cold start follows under the same id (`resuming.restart`)."""
    instance = transition.find(event.instance_id)
    if instance is None or instance.process is not Process.ALIVE or instance.stop_asked or not instance.state.starting:
        return
    termination.kill(transition, transition.park(instance, fell_back=event.error))
