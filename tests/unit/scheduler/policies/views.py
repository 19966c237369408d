"""Views for the policies' tests, and Hypothesis strategies for them."""

from __future__ import annotations

from typing import Literal

from hypothesis import strategies as st

from services.scheduler.domain.cost.cost import Cost, Way
from services.scheduler.domain.policies.port import NOTHING_TO_CLEAR, Ask, Clearance, DeviceView, MigrationTarget, Option, Resident

State = Literal["serving", "idle", "parked", "starting", "leaving", "weights"]


def ask(model: str = "new", waited: float = 0.0, **more: object) -> Ask:
    return Ask(model=model, need_bytes=10, waited_s=waited, **more)  # type: ignore[arg-type]  # the test's own keywords


def device(key: str = "n0/g0", *residents: Resident, free: int = 0, **more: object) -> DeviceView:
    return DeviceView(key, key.split("/", maxsplit=1)[0], 100, free, residents=residents, **more)  # type: ignore[arg-type]  # as above


def option(
    key: str = "n0/g0", seconds: float = 1.0, way: Way = "load", clearance: Clearance = NOTHING_TO_CLEAR, **more: object
) -> Option:
    on = {k: more.pop(k) for k in ("free", "running", "neighbour_loads") if k in more}
    residents = more.pop("residents", ())
    return Option((device(key, *residents, **on),), way, Cost(seconds), clearance, **more)  # type: ignore[arg-type,misc]  # as above


@st.composite
def residents(draw: st.DrawFn, key: str) -> Resident:
    states: list[State] = ["serving", "idle", "parked", "starting", "leaving", "weights"]
    state = draw(st.sampled_from(states))
    busy = state == "serving"
    moves = draw(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), max_size=2, unique_by=lambda m: m[0]))
    return Resident(
        key,
        model=draw(st.sampled_from(["new", "m0", "m1", "m2"])),
        nbytes=draw(st.integers(1, 20)),
        state=state,
        last_used=float(draw(st.integers(0, 5))),
        ready_at=float(draw(st.integers(0, 5))),
        active=draw(st.integers(1, 3)) if busy else 0,
        queued=draw(st.integers(0, 2)) if busy else 0,
        is_heavy=draw(st.booleans()),
        sensitivity=draw(st.sampled_from([0.5, 1.0, 2.0])),
        miss_probability=draw(st.sampled_from([0.0, 0.5, 1.0])),
        reload_s=float(draw(st.integers(0, 9))),
        moves=tuple(MigrationTarget(f"{d}/g0", float(s), {"a": 10, "b": 25, "c": 60}[d]) for d, s in moves) if busy else (),
        replicas=draw(st.integers(1, 2)),
        protected_reason=draw(st.sampled_from(["", "", "", "pinned"])),
    )


@st.composite
def devices(draw: st.DrawFn) -> DeviceView:
    count = draw(st.integers(0, 6))
    return device("n0/g0", *(draw(residents(f"r{n}")) for n in range(count)))
