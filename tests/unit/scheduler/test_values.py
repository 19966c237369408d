"""Unguarded values and unchecked records behave like their ordinary counterparts."""

from __future__ import annotations

import dataclasses

import pytest

from services.scheduler.domain.state.entities import Instance
from services.scheduler.domain.values import replace, value
from shared.contracts.plans import Candidate, PlanRecord
from tests.support.fake_node import MIB
from tests.unit.scheduler.world import World


@value(frozen=True, slots=True)
class Point:
    x: int
    y: int = 2


def test_value_is_a_hashable_dataclass_with_slots() -> None:
    p = Point(1)
    assert dataclasses.asdict(p) == {"x": 1, "y": 2}
    assert (p, hash(p)) == (Point(1, 2), hash(Point(1, 2)))
    assert not hasattr(p, "__dict__")


def test_replacing_is_as_in_dataclasses() -> None:
    i = Instance("i", "p", "m", 1, "r", "n", ("cpu:0",), 5, 6, 7, 1.0, 2.0)
    assert replace(i, sent_at=3.0, token=9) == dataclasses.replace(i, sent_at=3.0, token=9)
    assert i.sent_at is None
    with pytest.raises(AttributeError):
        replace(i, no_such_field=1)  # type: ignore[call-arg]  # the case under test


def test_decision_records_equal_those_validated_by_pydantic() -> None:
    """Records of decisions equal those that pydantic creates.

    They have every field, in the model's order, of its type, and the same JSON.
    """
    w = World()
    for n in range(12):
        w.node(f"n{n}", 400 * MIB)
    w.model("m")
    w.demand("m")
    plan = w.state.last_plan_of("m")
    assert plan is not None
    for record in (plan, *plan.candidates):
        kind = type(record)
        assert list(record.__dict__) == list(kind.model_fields)
        again = kind.model_validate(record.model_dump())
        assert again == record
        assert again.model_dump_json() == record.model_dump_json()
    assert len(plan.candidates) > 1
    copied = plan.model_copy(update={"outcome": "ready"})
    assert (copied.outcome, plan.outcome) == ("ready", "pending")
    assert {type(plan), *map(type, plan.candidates)} == {PlanRecord, Candidate}
