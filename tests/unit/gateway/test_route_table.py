"""Routes by model, from whole statuses and from changes."""

from __future__ import annotations

from services.gateway.domain.route_table import RouteTable
from shared.contracts.node import NODE_LOST_AFTER_S, InstanceState, InstanceStatus
from tests.unit.gateway.recorded_effects import instance, status


def of(name: str, model: str, state: InstanceState = InstanceState.READY) -> InstanceStatus:
    return instance(name).model_copy(update={"model": model, "state": state})


def names(table: RouteTable, model: str) -> list[str]:
    return sorted(r.status.instance_id for r in table.iter_routes(model))


def test_changes_leave_other_instances_as_they_are() -> None:
    table = RouteTable()
    table.on_status(status(of("a", "m"), of("b", "other")), 0.0)
    merged = status(of("a", "m", InstanceState.DRAINING), of("b", "other", InstanceState.DRAINING), of("c", "m"))
    assert table.on_status(merged, 1.0, frozenset({"a", "c"})) == {"m"}
    assert names(table, "m") == ["a", "c"]
    assert [r.status.state for r in table.iter_routes("other")] == [InstanceState.READY], "not among the changes"
    assert table.choose("m", 1.0) is table.get("c")


def test_a_whole_status_removes_what_it_omits() -> None:
    table = RouteTable()
    table.on_status(status(of("a", "m"), of("b", "m")), 0.0)
    assert table.on_status(status(of("b", "m")), 1.0) == {"m"}
    assert names(table, "m") == ["b"]
    assert table.get("a") is None
    table.on_status(status(), 2.0)
    assert names(table, "m") == []


def test_changes_of_a_node_that_was_given_up_are_taken_as_a_whole() -> None:
    table = RouteTable()
    table.on_status(status(of("a", "m"), of("b", "m")), 0.0)
    table.on_tick(NODE_LOST_AFTER_S + 1)
    assert names(table, "m") == []
    table.on_status(status(of("a", "m"), of("b", "m")), NODE_LOST_AFTER_S + 2, frozenset({"b"}))
    assert names(table, "m") == ["a", "b"]
