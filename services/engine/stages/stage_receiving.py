"""The keys and values of its layers that a later stage receives for its group (ADR 0094).

The first stage orders it (`KvReceive`). Each stage then connects to the sources of its layers, and
reports how many tokens it has. It stores nothing of an order after a step of the sequence, its
release, or another order for it: whatever the first stage sends later finds what it expects.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import dataclass

import torch

from services.engine.domain.kv_pieces import Piece
from services.engine.generation.kv_bytes import write_piece
from services.engine.generation.kv_cache import SequenceKV
from services.engine.kv_transfer.destination import MAX_TRANSFERS, STEP_WITHIN_S, KvDestination, Transfer, Wanted
from services.engine.stages.stage_kv import Submit
from shared.contracts.kv_transfer import KvLayout
from shared.contracts.stages import KvReceive, KvReceived
from shared.errors import NotFound, ThawError

log = logging.getLogger(__name__)


@dataclass
class _Order:
    """An order that this stage carries out.

    Attributes:
        ends: Position after the last token received, by layer.
    """

    asked: KvReceive
    state: SequenceKV
    transfer: Transfer
    ends: list[int]


class StageReceiving:
    """Receives for one later stage. `begin`, `end` and `stop` run on the computing thread."""

    def __init__(
        self,
        layout: KvLayout,
        revision: str,
        device: torch.device,
        submit: Submit,
        report: Callable[[KvReceived], None],
    ) -> None:
        """Create it.

        Args:
            layout: Of this stage's layers.
            revision: Of the model's weights.
            device: Of the sequences.
            submit: Runs a function on the computing thread, between two steps.
            report: Sends a report to the first stage. Called from any thread.
        """
        self._layout, self._device, self._submit, self._report = layout, device, submit, report
        self._orders: dict[int, _Order] = {}
        self._sources: dict[int, str] = {}
        self._destination = KvDestination(self, revision, is_stage=True)
        self._threads = ThreadPoolExecutor(MAX_TRANSFERS, thread_name_prefix="kv-in")

    def begin(self, asked: KvReceive, tokens: tuple[int, ...], state: SequenceKV) -> None:
        """Begin to receive a sequence, which has its first `start` tokens."""
        self.end(asked.sequence)
        ticket = asked.offer.ticket
        within_s = asked.within_ms / 1e3 if asked.within_ms is not None else math.inf
        transfer = Transfer(ticket, asked.number, "", within_s, asked.stall_ms / 1e3)
        order = _Order(asked, state, transfer, [asked.start] * len(self._layout.layers))
        self._orders[asked.number], self._sources[asked.sequence] = order, ticket
        self._threads.submit(self._receive, order, Wanted(asked.choice, tokens[: asked.end + 1], asked.start))

    def end(self, sequence: int) -> None:
        """Store nothing more for a sequence."""
        for number in [n for n, order in self._orders.items() if order.asked.sequence == sequence]:
            self._orders.pop(number).transfer.stop()

    def release(self, sequence: int) -> None:
        """Forget a sequence that the group has dropped."""
        self.end(sequence)
        if (ticket := self._sources.pop(sequence, None)) is not None:
            self._destination.forget(ticket)

    def stop(self, number: int, ticket: str) -> None:
        """End an order, and close the connections to its source."""
        if (order := self._orders.get(number)) is not None:
            order.transfer.stop()
        self._destination.forget(ticket)

    def close(self) -> None:
        """Close all connections."""
        self._destination.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _receive(self, order: _Order, wanted: Wanted) -> None:
        """Carry out an order, in a thread, and report what this stage has then."""
        received = self._destination.receive(order.transfer, [wanted], order.asked.offer)
        end, reason = order.asked.start, received.reason
        try:
            end = self._submit(lambda: self._finish(order)).result(STEP_WITHIN_S)
        except (ThawError, NotInTime) as e:
            reason = reason or str(e) or type(e).__name__
        self._report(KvReceived(number=order.asked.number, end=end, nbytes=received.nbytes, reason=reason))

    def _finish(self, order: _Order) -> int:
        """End an order, and return the tokens that the sequence has in all layers of this stage."""
        if self._orders.pop(order.asked.number, None) is None:
            raise NotFound("The sequence is computed, or was dropped")
        return min(order.ends)

    # Storing, from any thread

    def layout(self) -> Future[KvLayout]:
        done: Future[KvLayout] = Future()
        done.set_result(self._layout)
        return done

    def store(self, number: int, index: int, piece: Piece, data: bytearray) -> Future[None]:
        def work() -> None:
            order = self._orders.get(number)
            if order is None or any(end != piece.start for end in order.ends[piece.layers]):
                raise NotFound("The sequence is computed, or was dropped")
            write_piece(order.state, piece, self._layout, data, self._device)
            order.ends[piece.layers] = [piece.end] * piece.layer_count

        return self._submit(work)
