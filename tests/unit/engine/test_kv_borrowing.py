"""Pages that an engine borrows before its batcher exists."""

from __future__ import annotations

import threading

from services.engine.generation.kv_borrowing import _KeptEvents
from weights.kv_lease import Lent, Shrink

EVENTS: list[Lent | Shrink] = [Lent(2, is_answer=True), Shrink(1), Lent(1, is_answer=False)]


def test_events_before_the_batcher_are_passed_on_in_order() -> None:
    kept, got = _KeptEvents(), list[Lent | Shrink]()
    for event in EVENTS:
        kept.deliver(event)
    assert not got
    kept.pass_on(got.append)
    kept.deliver(EVENTS[0])
    assert got == [*EVENTS, EVENTS[0]]


def test_an_event_that_arrives_while_kept_ones_are_passed_on_follows_them() -> None:
    kept, got, began = _KeptEvents(), list[Lent | Shrink](), threading.Event()

    def deliver_late() -> None:
        began.set()
        kept.deliver(EVENTS[2])

    late = threading.Thread(target=deliver_late)

    def take(event: Lent | Shrink) -> None:
        if not got:
            late.start()
            assert began.wait(60)
        got.append(event)

    for event in EVENTS[:2]:
        kept.deliver(event)
    kept.pass_on(take)
    late.join(60)
    assert got == EVENTS
