"""Whether a start or resumption has reached its node.

The outbox sends a node's commands one at a time, and again while the node does not answer, so a
command may leave long after its decision. Until its node has answered, and a report after that
has had time to arrive, a report that lacks the instance proves nothing. The outbox answers every
command in the end: with the reply of the node, or with a refusal once its patience is over. A
command whose instance has been given up meanwhile is not sent.
"""

from __future__ import annotations

from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.state.volatile import Delivery
from services.scheduler.domain.values import replace
from shared.contracts.node import ResumeInstance, StartInstance


def mark_queued(tx: Transaction, instance_id: str) -> None:
    """Record that a start or resumption has been given to the outbox."""
    tx.put(Delivery(instance_id))


def mark_answered(tx: Transaction, instance_id: str) -> None:
    """Record that the node has answered the command, or that the outbox has stopped sending it."""
    delivery = tx.state.deliveries.get(instance_id)
    if delivery is not None:
        tx.put(replace(delivery, answered_at=tx.now))


def is_underway(tx: Transaction, instance_id: str, sent_at: float | None, grace_s: float) -> bool:
    """True if reports of the node need not show the command's effect yet.

    Args:
        tx: The decision's transaction.
        instance_id: The instance or stage that is started or resumed.
        sent_at: When the command was decided. It counts only for commands of an earlier leader.
        grace_s: Seconds from the node's answer until its reports show the effect.
    """
    delivery = tx.state.deliveries.get(instance_id)
    if delivery is not None and delivery.answered_at is None:
        return True
    since = delivery.answered_at if delivery is not None else sent_at
    return since is not None and tx.now - since <= grace_s


def is_current(state: ClusterState, command: StartInstance | ResumeInstance) -> bool:
    """True if a command that has waited is still to be sent: its instance waits for it."""
    if command.instance_id in state.later_stages:
        return True
    instance = state.instances.get(command.instance_id)
    if instance is None or instance.token != command.token:
        return False
    return isinstance(command, StartInstance) or not instance.state.parked
