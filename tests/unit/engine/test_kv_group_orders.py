"""A group's order to receive keys and values: memory, reports, and its end in each stage."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from services.engine.domain.kv_pieces import Piece
from services.engine.domain.step_planning import BLOCK_TOKENS
from services.engine.generation.kv_bytes import layout_of, read_piece
from services.engine.generation.kv_cache import SequenceKV
from services.engine.generation.kv_transfers import GroupOrder
from services.engine.kv_transfer.arrivals import NotTransferred, match_parts
from services.engine.stages.receipts import Receipts, StageReceipt
from services.engine.stages.stage_receiving import StageReceiving
from shared.contracts.kv_transfer import KvOffer
from shared.contracts.stages import STAGE_MESSAGE, GroupCapacity, KvReceive, KvReceived
from shared.errors import EngineFailed, InsufficientMemory, NotFound
from tests.unit.engine.received_kv import FakeRunner, Receiving, offer, sequence

TOKENS = 3 * BLOCK_TOKENS


class FakeGroup(FakeRunner):
    """The first stage's runner. It keeps the orders to the later stages."""

    def __init__(self) -> None:
        self.receipts: list[StageReceipt] = []

    def permit(self, permission: Any, sequences: Any) -> tuple[()]:
        return ()

    def receive(self, state: SequenceKV, order: GroupOrder) -> StageReceipt:
        self.receipts.append(StageReceipt(order, 1, lambda: None))
        return self.receipts[-1]


def asked(made: KvOffer, on_failed: Callable[[], None] = lambda: None) -> GroupOrder:
    return GroupOrder(made, 0, tuple(range(TOKENS + 1)), 0, TOKENS, 1.0, 1.0, on_failed)


def accepted(free_blocks: int) -> Receiving:
    """Return the first stage of a group, which has accepted an order of `TOKENS` tokens."""
    return Receiving(TOKENS, FakeGroup(), free_blocks)


def test_group_orders_what_it_has_memory_for() -> None:
    made = accepted(free_blocks=2)
    receipt = made.transfers.receive_in_group(made.number, 0, asked(offer(2, 2)))
    assert (receipt.order.start, receipt.order.end) == (0, 2 * BLOCK_TOKENS)
    assert made.prepared.blocks == 2
    with pytest.raises(InsufficientMemory):
        accepted(free_blocks=0).transfers.receive_in_group(made.number, 0, asked(offer(2, 2)))


def test_group_counts_the_tokens_that_all_stages_have() -> None:
    made = accepted(free_blocks=9)
    made.transfers.receive_in_group(made.number, 0, asked(offer(2, 2)))
    made.store(Piece(0, 100, 0, 4))
    assert made.computed == 0
    assert made.transfers.settle(made.number, 0, (120, 70)) == made.computed == 70
    made.prepared.forget("p")
    with pytest.raises(NotFound):
        made.transfers.settle(made.number, 0, (120, 70))


def test_first_failure_of_a_stage_ends_the_transfer_of_the_others() -> None:
    receipts, failed = Receipts(), list[str]()
    receipt = StageReceipt(asked(offer(2, 2), lambda: failed.append("own")), 2, lambda: failed.append("others"))
    receipts.add(7, receipt)
    receipts.take(KvReceived(number=6, end=1))
    assert (receipt.failure, failed) == ("", [])
    receipts.take(KvReceived(number=7, end=5, nbytes=3, reason="damaged"))
    with pytest.raises(EngineFailed, match="not reported"):
        receipt.wait(0.0)
    receipt.stop()
    receipts.take(KvReceived(number=7, end=9, nbytes=4, reason="ended"))
    assert (receipt.failure, receipt.nbytes, receipt.wait(0.0)) == ("damaged", 7, (5, 9))
    assert failed == ["own", "others", "own"]


def test_lost_stage_ends_the_wait_for_reports() -> None:
    receipts = Receipts()
    before, after = (StageReceipt(asked(offer(2, 2)), 1, lambda: None) for _ in range(2))
    receipts.add(1, before)
    receipts.take(None)
    receipts.add(2, after)
    for receipt in (before, after):
        with pytest.raises(EngineFailed, match="has ended"):
            receipt.wait(60.0)


def now(work: Callable[[], Any]) -> Future[Any]:
    """Run `work` as the computing thread does."""
    done: Future[Any] = Future()
    try:
        done.set_result(work())
    except Exception as e:
        done.set_exception(e)
    return done


@pytest.mark.parametrize("event", ["step", "release", "another order"])
def test_stage_stores_nothing_after_a_step_of_the_sequence(event: str) -> None:
    """Nor after its release, or another order for it."""
    stage, source = sequence(TOKENS, range(2, 4)), sequence(1, range(2, 4))
    reports: list[KvReceived] = []
    receiving = StageReceiving(layout_of(source), "r", torch.device("cpu"), now, reports.append)
    receiving._threads.submit = lambda *work: None  # type: ignore[method-assign, assignment]  # nothing arrives by itself
    order = KvReceive(number=1, offer=offer(2, 2), choice=0, sequence=4, start=0, end=TOKENS, stall_ms=1)
    receiving.begin(order, tuple(range(TOKENS + 1)), SequenceKV())
    piece = Piece(0, 10, 0, 2)
    data: Any = bytearray(read_piece(stage, piece, layout_of(stage)))
    receiving.store(1, 0, piece, data).result(0)
    kept = receiving._orders[1]
    match event:
        case "step":
            receiving.end(4)
        case "release":
            receiving.release(4)
        case _:
            receiving.begin(order.model_copy(update={"number": 2, "start": 10}), tuple(range(TOKENS + 1)), kept.state)
    assert kept.transfer.is_stopped
    with pytest.raises(NotFound):
        receiving.store(1, 0, Piece(10, 20, 0, 2), data).result(0)
    receiving.close()


def test_stage_wants_its_layers_of_the_parts_that_have_them() -> None:
    own = layout_of(sequence(1, range(1, 3)))
    (whole,) = match_parts(own, offer(4).model_copy(update={"selects_layers": True}), is_stage=True)
    assert (whole.layout, whole.first_layer, whole.layer_count) == (own, 1, 2)
    two = offer(2, 2)
    later = tuple(p.model_copy(update={"selects_layers": True}) for p in two.later)
    parts = match_parts(own, two.model_copy(update={"selects_layers": True, "later": later}), is_stage=True)
    assert [(s.first_layer, s.layer_count, len(s.layout.layers)) for s in parts] == [(1, 1, 1), (0, 1, 1)]
    for wrong, reason in ((offer(4), "no selected layers"), (offer(2), "layers")):
        with pytest.raises(NotTransferred, match=reason):
            match_parts(own, wrong, is_stage=True)


def test_stage_of_the_previous_version_receives_nothing() -> None:
    parsed = STAGE_MESSAGE.validate_json('{"kind": "capacity", "kv_blocks": 3, "sends_kv": true}')
    assert parsed == GroupCapacity(kv_blocks=3, sends_kv=True, receives_kv=False)
