"""Statuses and changes of a node, in the order in which they may arrive."""

from __future__ import annotations

from typing import Any

from shared.contracts.node import DeviceStatus, InstanceState, InstanceStatus, NodeChanges, NodeStatus
from shared.node_statuses import FORGOTTEN_AFTER_S, NodeStatuses


def instance(name: str, state: InstanceState = InstanceState.LOADING) -> InstanceStatus:
    return InstanceStatus(
        instance_id=name, plan_id="p", token=1, model=name, generation=1, revision="r", device_ids=("cpu:0",), state=state
    )


def parts(seq: int, names: tuple[InstanceStatus, ...], boot: str = "b", reserved: int = 0) -> dict[str, Any]:
    device = DeviceStatus(device_id="cpu:0", kind="cpu", budget_bytes=9, reserved_bytes=reserved)
    return {"node": "n", "boot_id": boot, "seq": seq, "devices": (device,), "instances": names}


def whole(seq: int, *names: InstanceStatus, boot: str = "b") -> NodeStatus:
    return NodeStatus(**parts(seq, names, boot), labels={"zone": "a"})


def changes(seq: int, *names: InstanceStatus, boot: str = "b") -> NodeChanges:
    return NodeChanges(**parts(seq, names, boot, reserved=5))


def test_changes_replace_and_add_instances_and_keep_the_rest() -> None:
    statuses = NodeStatuses()
    statuses.on_status(whole(1, instance("a"), instance("b")), now=0.0)
    found = statuses.on_changes(changes(2, instance("b", InstanceState.READY), instance("c")))
    assert found is not None
    assert {i.instance_id: i.state for i in found.instances} == {
        "a": InstanceState.LOADING,
        "b": InstanceState.READY,
        "c": InstanceState.LOADING,
    }
    assert (found.seq, found.labels, found.devices[0].reserved_bytes) == (2, {"zone": "a"}, 5)


def test_changes_add_up_until_the_next_whole_status() -> None:
    statuses = NodeStatuses()
    statuses.on_status(whole(1), now=0.0)
    statuses.on_changes(changes(2, instance("a")))
    found = statuses.on_changes(changes(4, instance("b")))  # the third was lost
    assert found is not None
    assert [i.instance_id for i in found.instances] == ["a", "b"]
    statuses.on_status(whole(5, instance("b")), now=0.0)
    found = statuses.on_changes(changes(6))
    assert found is not None
    assert [i.instance_id for i in found.instances] == ["b"], "a whole status shows what has been forgotten"


def test_changes_without_a_status_and_overtaken_ones_are_ignored() -> None:
    statuses = NodeStatuses()
    assert statuses.on_changes(changes(1, instance("a"))) is None
    statuses.on_status(whole(3), now=0.0)
    assert statuses.on_changes(changes(2, instance("a"))) is None
    assert statuses.on_changes(changes(4, instance("a"), boot="another")) is None


def test_an_overtaken_status_does_not_undo_changes() -> None:
    statuses = NodeStatuses()
    statuses.on_status(whole(1, instance("a")), now=0.0)
    statuses.on_changes(changes(3, instance("a", InstanceState.READY)))
    statuses.on_status(whole(2, instance("a")), now=0.0)
    found = statuses.on_changes(changes(4))
    assert found is not None
    assert found.instances[0].state is InstanceState.READY
    statuses.on_status(whole(1, boot="another"), now=0.0)
    assert statuses.on_changes(changes(5)) is None, "of the earlier agent"


def test_a_node_that_was_silent_for_a_day_is_forgotten() -> None:
    """Autoscaled nodes have new names all the time: their statuses must not add up."""
    statuses = NodeStatuses()
    statuses.on_status(whole(1, instance("a")), now=0.0)
    others = (whole(1).model_copy(update={"node": "other"}), whole(2).model_copy(update={"node": "other"}))
    statuses.on_status(others[0], now=FORGOTTEN_AFTER_S)
    assert statuses.on_changes(changes(2, instance("b"))) is not None
    statuses.on_status(others[1], now=FORGOTTEN_AFTER_S + 1.0)
    assert statuses.on_changes(changes(3, instance("b"))) is None
    assert statuses.on_changes(changes(3).model_copy(update={"node": "other"})) is not None
