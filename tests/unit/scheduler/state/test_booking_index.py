"""The orders of the booking index equal a scan over all devices."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import nsmallest
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.domain.cost.learned import Parameter
from services.scheduler.domain.estimates.start_times import Forecast
from services.scheduler.domain.placement.shortlist import CLEARED, FITTING, SHORTLIST_SIZE, shortlists
from services.scheduler.domain.policy import Policy
from services.scheduler.domain.state.booking import Booking
from services.scheduler.domain.state.booking_index import BookingTable
from services.scheduler.domain.state.changes import Put, apply
from services.scheduler.domain.state.cluster import ClusterState
from services.scheduler.domain.state.entities import Device, Node
from services.scheduler.domain.state.measurements import Estimate
from services.scheduler.domain.state.transaction import Transaction
from services.scheduler.domain.state.volatile import Cooldown
from shared.contracts.model_info import ModelInfo
from shared.contracts.models import ModelCard, ModelSpec
from tests.support.examples import examples

INFO = ModelInfo(
    source="/m/a",
    revision="r",
    architecture="L",
    model_type="llama",
    task="generate",
    weights_bytes=10**9,
    parameters=1,
    dtype="bfloat16",
    context_length=10,
    kv_bytes_per_token=1,
)
CARD = ModelCard(spec=ModelSpec(name="a", source="/m/a"), info=INFO, created=0)
AFAR = CARD.model_copy(update={"info": INFO.model_copy(update={"source": "s3://bucket/a"})})
NODES, DEVICES = 7, 3


def scanned(tx: Transaction, need: int, avoid: tuple[str, ...], forecast: Forecast) -> Iterator[list[Booking]]:
    """Return the result that `shortlists` promises, by scanning every device."""
    devices = list(tx.state.bookings.values())
    usable = [b for b in devices if not b.closed_reason and not tx.is_cooling_down(b.key)]

    def ms(b: Booking) -> float:
        return forecast.predict_ms(b, leaving=False)[1]

    for fitting in ([b for b in usable if b.free_bytes >= need], [b for b in usable if b.free_soon_bytes >= need]):
        if fitting:
            first = nsmallest(FITTING, fitting, key=lambda b: (b.key in avoid, ms(b), b.free_bytes, b))
            known = [
                b for b in usable if b.node in forecast.known_nodes and b.free_soon_bytes < need <= b.free_soon_bytes + b.idle_bytes
            ]
            sooner = [b for b in known if forecast.predict_ms(b, leaving=True)[1] < ms(first[0])]
            yield [*first, *nsmallest(CLEARED, sooner, key=lambda b: (b.key in avoid, ms(b), b.idle_since, b))]
            return
    possible = [b for b in usable if b.free_soon_bytes + b.evictable_bytes >= need]
    if not possible:
        yield nsmallest(SHORTLIST_SIZE, devices, key=lambda b: (bool(b.closed_reason), -b.free_soon_bytes, b.key))
        return
    possible.sort(key=lambda b: (b.free_soon_bytes + b.idle_bytes < need, b.key in avoid, ms(b), b.idle_since, b))
    yield possible[:CLEARED]
    for start in range(CLEARED, len(possible), SHORTLIST_SIZE):
        yield possible[start : start + SHORTLIST_SIZE]


def booking(random: Random, node: int, device: int) -> Booking:
    free, leaving, idle = random.randrange(5), random.choice([0, 0, 0, 2]), random.randrange(5)
    return Booking(
        key=f"n{node}/cuda:{device}",
        node=f"n{node}",
        device_id=f"cuda:{device}",
        budget_bytes=random.randrange(4, 10),
        held_bytes=0,
        claimed_bytes=0,
        leaving_bytes=leaving,
        free_bytes=free,
        free_soon_bytes=free + leaving,
        idle_bytes=idle,
        evictable_bytes=idle + random.randrange(5),
        idle_since=random.choice([1.0, 2.0, float("inf")]),
        closed_reason=random.choice(["", "", "", "cordoned"]),
        is_reachable=random.random() < 0.5,
        bytes_per_second=random.choice([None, 1e9, 2e9]),
        remote_bytes_per_second=random.choice([None, None, 1e8, 3e9]),
    )


def draft_of(seed: int) -> Transaction:
    """Return a cluster, and a decision that has changed part of it."""
    random = Random(seed)
    state = ClusterState(epoch=1)
    for n in range(NODES):
        ids = tuple(Device(f"cuda:{i}", "cuda", "", 9) for i in range(DEVICES))
        apply(state, [Put(Node(f"n{n}", devices=ids))])
    for node in random.sample(range(NODES), random.randrange(4)):
        apply(state, [Put(Estimate("a", f"n{node}", {"init": Parameter(random.randrange(5) * 400.0)}))])
    for paused in random.sample(range(NODES), random.randrange(3)):
        apply(state, [Put(Cooldown(f"n{paused}/cuda:0", 100.0))])
    places = [(n, i) for n in range(NODES) for i in range(DEVICES)]
    for n, i in [*places, *random.choices(places, k=random.randrange(6))]:
        state.bookings[f"n{n}/cuda:{i}"] = booking(random, n, i)
    tx = Transaction(state, 10.0, Policy())
    for n, i in random.choices(places, k=random.randrange(5)):
        tx.state.get_writable("bookings")[f"n{n}/cuda:{i}"] = booking(random, n, i)
    for n, i in random.choices(places, k=random.randrange(3)):
        tx.state.get_writable("bookings").pop(f"n{n}/cuda:{i}", None)
    return tx


drafts = st.integers(0, 2**32).map(draft_of)


@settings(max_examples=examples(300))
@given(
    drafts,
    st.integers(1, 9),
    st.sets(st.sampled_from([f"n{n}/cuda:1" for n in range(NODES)]), max_size=2),
    st.sampled_from([CARD, AFAR]),
)
def test_shortlists_equal_a_scan_over_all_devices(tx: Transaction, need: int, avoid: set[str], card: ModelCard) -> None:
    forecast = Forecast(tx.state, card)
    found = list(shortlists(tx, need, tuple(avoid), forecast))
    assert found == list(scanned(tx, need, tuple(avoid), forecast))
    reachable = [b.budget_bytes for b in tx.state.bookings.values() if b.is_reachable]
    assert tx.bookings().largest_budget() == max(reachable, default=0)


@given(drafts)
def test_rebuilt_table_has_the_same_orders(tx: Transaction) -> None:
    kept = tx.origin.bookings
    assert isinstance(kept, BookingTable)
    rebuilt = BookingTable(kept.items())
    assert (kept.classes, kept.most_free_first, kept.budgets) == (rebuilt.classes, rebuilt.most_free_first, rebuilt.budgets)
    assert (kept.fastest_first, kept.fastest_remote_first) == (rebuilt.fastest_first, rebuilt.fastest_remote_first)
    copied = tx.origin.fork().bookings
    assert isinstance(copied, BookingTable)
    for key in list(copied):
        del copied[key]
    assert (copied.classes, copied.fastest_first, copied.most_free_first, copied.budgets) == ({}, [], [], [])
    assert len(kept) == NODES * DEVICES
