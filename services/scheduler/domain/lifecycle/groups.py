"""Groups of stages on several nodes: one instance, with processes on other nodes (ADR 0064).

The first stage is the group's `Instance`; what is decided about the instance is decided about the
group. A `LaterStage` only holds memory, and follows:

1. It is promised its memory with the instance, in the same decision, or neither is.
2. It is started with the instance: once the devices of all stages have the memory. If a victim does
   not leave, the promises of all stages are given up, and the model is placed again.
3. It is stopped once the instance is gone.
4. If it ends, or its node does not start it, a starting instance is stopped and its model is placed
   again. A ready instance notices by itself that a stage is gone, and fails.
5. A start whose leader died before it had sent the starts of all stages is stopped as in 4.
"""

from __future__ import annotations

from services.scheduler.domain.effects import SendStop
from services.scheduler.domain.lifecycle.deliveries import is_underway
from services.scheduler.domain.lifecycle.failures import on_start_stalled
from services.scheduler.domain.lifecycle.scale_down import scale_down
from services.scheduler.domain.lifecycle.transitions import learn_stage, stop_instance
from services.scheduler.domain.state.booking import device_key
from services.scheduler.domain.state.entities import Instance
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.state.volatile import Cooldown, Delivery, LaterStage
from services.scheduler.domain.values import replace
from shared.contracts.base import ErrorBody
from shared.contracts.node import InstanceState, InstanceStatus, NodeStatus, StopInstance
from shared.errors import EngineFailed, InsufficientMemory

_ENDED = (InstanceState.FAILED, InstanceState.STOPPED)


def apply_stage_statuses(tx: Transaction, status: NodeStatus) -> None:
    """Update the later stages of a node from its status.

    1. One that ended is removed. 2. One that is unknown belongs to an instance that still runs (a
    new leader does not know it yet), or is stopped. 3. One that is omitted is gone.
    """
    reported = set()
    for s in status.instances:
        if not s.is_later_stage:
            continue
        reported.add(s.instance_id)
        stage = tx.state.later_stages.get(s.instance_id)
        if s.state in _ENDED:  # 1
            if stage is not None:
                _end(tx, stage, s.error)
        elif stage is None:  # 2
            tx.put(_adopt(tx, status.node, s))
        else:
            is_ready = s.state is InstanceState.READY
            if is_ready and not stage.is_ready:
                learn_stage(tx, stage.first, stage.index, s)
            tx.put(replace(stage, reported=True, is_ready=stage.is_ready or is_ready))
    for stage in [x for x in tx.state.later_stages.values() if x.node == status.node and x.stage_id not in reported]:  # 3
        fresh = stage.sent_at is None or is_underway(tx, stage.stage_id, stage.sent_at, tx.policy.absence_grace_s)
        if not fresh and status.seq >= 2:
            _end(tx, stage, None)
    for i in [x for x in tx.state.on_node(status.node) if x.stages > 1]:
        _check_complete(tx, i)


def _check_complete(tx: Transaction, first: Instance) -> None:
    """End a start that waits for stages that no node has: the last leader did not send them all."""
    if first.sent_at is None or first.ready_at is not None or first.leaving != "no":
        return
    known_s = tx.now - max(first.sent_at, tx.state.recovered_at)
    stages = 1 + len(tx.state.stages_of.get(first.instance_id, ()))
    if stages < first.stages and known_s > tx.policy.node_lost_after_s + tx.policy.absence_grace_s:
        text = f"Only {stages} of the {first.stages} stages of {first.label} were started"
        on_start_stalled(tx, first, EngineFailed(text).body())


def on_stage_refused(tx: Transaction, stage: LaterStage, error: ErrorBody) -> None:
    """A node did not start a stage: the group is stopped, and its model is placed again."""
    _drop(tx, stage)
    tx.put(Cooldown(device_key(stage.node, stage.device_id), tx.now + tx.policy.refusal_cooldown_s))
    first = tx.state.instances.get(stage.first)
    if first is None or first.leaving != "no":
        return
    if error.code == InsufficientMemory.code:  # no failure of the model
        stop_instance(tx, first, "drain", f"{stage.node} had no room for stage {stage.index}")
    else:
        on_start_stalled(tx, first, error, device_key(stage.node, stage.device_id))


def settle_groups(tx: Transaction) -> None:
    """Let later stages follow their instances, at the end of each decision."""
    for stage in list(tx.state.later_stages.values()):
        first = tx.state.instances.get(stage.first)
        presence = tx.state.presence.get(stage.node)
        is_silent = presence is not None and not presence.alive
        if first is None and (stage.sent_at is None or is_silent):  # a node that is back reports it
            _drop(tx, stage)
        elif first is None:
            _stop(tx, stage)
        elif first.leaving == "no":
            _check_node(tx, stage, first, is_silent=is_silent)


def _check_node(tx: Transaction, stage: LaterStage, first: Instance, *, is_silent: bool) -> None:
    node = tx.state.nodes.get(stage.node)
    if node is not None and node.drain_since is not None:
        scale_down(tx, [first])  # its requests move as those of an instance there (migration/orders.py)
    elif is_silent and first.ready_at is None:
        _end(tx, stage, EngineFailed(f"Node {stage.node}, which starts stage {stage.index}, is silent").body())


def _stop(tx: Transaction, stage: LaterStage) -> None:
    if stage.stop_at is not None and tx.now - stage.stop_at <= tx.policy.stop_retry_s:
        return
    tx.put(replace(stage, stop_at=tx.now))
    timeout_ms = int(tx.policy.drain_timeout_s * 1e3)
    reason = f"the first stage {stage.first} is gone"
    command = StopInstance(token=tx.next_token(), instance_id=stage.stage_id, drain_timeout_ms=timeout_ms, reason=reason)
    tx.emit(SendStop(stage.node, command))


def _end(tx: Transaction, stage: LaterStage, error: ErrorBody | None) -> None:
    """Remove a stage. Without it the start of its group cannot succeed."""
    _drop(tx, stage)
    first = tx.state.instances.get(stage.first)
    if first is not None and first.is_claim:  # nothing was started
        stop_instance(tx, first, "drain", f"{stage.node}, which was to start stage {stage.index}, is gone")
    elif first is not None and first.ready_at is None and first.leaving == "no":
        lost = EngineFailed(f"Stage {stage.index} of {first.label} on {stage.node} has ended").body()
        on_start_stalled(tx, first, error or lost, device_key(stage.node, stage.device_id))


def _drop(tx: Transaction, stage: LaterStage) -> None:
    tx.drop(LaterStage, stage.stage_id)
    tx.drop(Delivery, stage.stage_id)


def _adopt(tx: Transaction, node: str, s: InstanceStatus) -> LaterStage:
    assert s.group is not None
    return LaterStage(
        stage_id=s.instance_id,
        first=s.group.first,
        model=s.model,
        node=node,
        device_id=s.device_ids[0],
        index=s.group.index,
        count=s.group.count,
        reserve_bytes=s.memory.reserved,
        kv_bytes=s.memory.kv,
        sent_at=tx.now,
        reported=True,
    )
