"""Migrations end under any faults and message orders.

Processes die and messages are lost; no state is left behind, and no step is done twice.
"""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shared.contracts.migration import FINAL, MigrationRecord
from tests.support.examples import examples
from tests.unit.migrator.world import World

ANY = st.integers(min_value=0, max_value=1_000)


class Interleavings(RuleBasedStateMachine):
    """Two migrators, three engines, up to five requests and four orders."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.orders: list[MigrationRecord] = []
        self.seen: dict[str, MigrationRecord] = {}

    @initialize(count=st.integers(min_value=1, max_value=4))
    def begin(self, count: int) -> None:
        self.world.migrator(), self.world.migrator()
        for number in range(count):
            self.world.request("ab"[number % 2], fixed="an embedding" if number == 3 else "")

    # Orders

    @precondition(lambda self: len(self.orders) < 4)
    @rule(which=ANY, whole=st.booleans(), way=st.sampled_from(["ab", "ba", "ac"]), stale=st.booleans())
    def order(self, which: int, whole: bool, way: str, stale: bool) -> None:
        requests = list(self.world.requests.values())
        request = None if whole else requests[which % len(requests)]
        revision = "r0" if stale and which % 5 == 0 else "r1"
        self.orders.append(self.world.order(request, way[0], way[1], revision))

    @precondition(lambda self: len(self.world.requests) < 5)
    @rule()
    def arrive(self) -> None:
        if self.world.engines["a"].alive:
            self.world.request("a")

    @rule(which=ANY)
    def finish(self, which: int) -> None:
        """End a request: it completes, or its client disconnects."""
        requests = list(self.world.requests.values())
        requests[which % len(requests)].at = None

    # Message faults

    @rule(seconds=st.sampled_from([0.005, 0.05, 0.3, 1.1, 3.5]))
    def wait(self, seconds: float) -> None:
        self.world.pass_time(seconds)
        self.world.step()

    @precondition(lambda self: self.world.letters)
    @rule(which=ANY)
    def deliver(self, which: int) -> None:
        self.world.deliver(self.world.letters[which % len(self.world.letters)])

    @precondition(lambda self: self.world.letters)
    @rule(which=ANY, done=st.booleans())
    def lose(self, which: int, done: bool) -> None:
        self.world.lose(self.world.letters[which % len(self.world.letters)], done=done)

    @rule()
    def poll(self) -> None:
        for migrator in self.world.migrators:
            migrator.poll()

    @rule(to=st.booleans())
    def connection(self, to: bool) -> None:
        self.world.connected = to

    # Deaths

    @rule(which=st.integers(min_value=0, max_value=5))
    def migrator_dies(self, which: int) -> None:
        alive = [m for m in self.world.migrators if m.alive]
        if which < len(alive):
            alive[which].alive = False
            self.world.migrator()

    @rule(name=st.sampled_from("ab"))
    def engine_dies(self, name: str) -> None:
        if self.world.engines[name].alive:
            self.world.kill(name)

    @precondition(lambda self: self.orders)
    @rule(which=ANY)
    def cancel(self, which: int) -> None:
        order = self.orders[which % len(self.orders)]
        if not self.world.record(order).over:
            self.world.cancel(order)

    # Invariants

    @invariant()
    def what_is_over_stays_so(self) -> None:
        for key, (record, _) in self.world.bucket.items():
            old = self.seen.get(key)
            if old is not None and old.over:
                assert record == old
            self.seen[key] = record

    @invariant()
    def a_fixed_request_never_moves(self) -> None:
        assert all(not r.moves for r in self.world.requests.values() if r.fixed)

    @invariant()
    def moves_go_where_they_were_ordered_to(self) -> None:
        allowed = {o.instance_id for o in self.orders}
        assert all(set(r.moves) <= allowed for r in self.world.requests.values())

    def teardown(self) -> None:
        world = self.world
        world.connected = True
        # Messages of a dead owner still arrive.
        for letter in [each for each in world.letters if not each.migrator.alive]:
            world.deliver(letter)
        world.settle()
        for order in self.orders:
            record = world.record(order)
            assert record.state in FINAL
            if record.state != "cancelled":
                assert all(m.outcome != "moving" for m in record.requests)
            for moved in record.requests:
                if moved.outcome == "moved":
                    request = world.requests[moved.request_id.rpartition("-")[0]]
                    assert record.instance_id in request.places
        self._nothing_prepared_is_kept()

    def _nothing_prepared_is_kept(self) -> None:
        """Check that no prepared state is kept.

        Preparations of an owner that died, lost its lease or was cancelled expire by themselves.
        """
        disturbed = {
            record.migration_id
            for record, _ in self.world.bucket.values()
            if record.state == "cancelled"
            or any(not m.alive and m.migration_id == record.migration_id for m in self.world.migrators)
        }
        disturbed |= {e.record.migration_id for m in self.world.migrators for e in m.ended if e.lost}
        for engine in self.world.engines.values():
            left = {name for name in engine.prepared if name.split(".")[0] not in disturbed}
            assert not left


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(
    max_examples=examples(150),
    stateful_step_count=40,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
