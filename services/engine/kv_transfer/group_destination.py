"""The destination of a transfer in a group: each stage receives its own layers (ADR 0094).

The first stage orders each sequence from the later stages, receives its own layers meanwhile, and
counts the tokens that all stages have. Whatever a stage lacks is computed by all.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, replace

from services.engine.generation.kv_transfers import GroupOrder, Receipt
from services.engine.kv_transfer.destination import (
    KEPT_CONNECTIONS,
    STEP_WITHIN_S,
    BatcherStore,
    KvDestination,
    Received,
    Transfer,
    Wanted,
)
from services.engine.kv_transfer.source import Transferring
from shared.contracts.kv_transfer import KvOffer
from shared.errors import ThawError

log = logging.getLogger(__name__)
_REPORTS_WITHIN_S = 60.0
"""Seconds that later stages may need longer than the first one. A dead one ends the group earlier.
"""


@dataclass
class _Known:
    """The source of the sequences of a name, and the latest order to the later stages."""

    offer: KvOffer
    receipt: Receipt | None = None


class GroupDestination:
    """Receives for a group, as `KvDestination` does for an engine with all layers."""

    def __init__(self, batcher: Transferring, revision: str) -> None:
        self._batcher = batcher
        self._own = KvDestination(BatcherStore(batcher), revision, is_stage=True)
        self._known: dict[str, _Known] = {}
        self._lock = threading.Lock()

    def has_source(self, name: str) -> bool:
        """True if more can be received for the sequences of this name."""
        return self._own.has_source(name)

    def receive(self, transfer: Transfer, wanted: list[Wanted], offer: KvOffer | None) -> Received:
        """Receive what the sequences lack. Never raises.

        Args:
            transfer: The order that they belong to.
            wanted: Its sequences, in their order.
            offer: Of the source; None: the one of the last call for this name.
        """
        began, reason = time.monotonic(), ""
        known = self._know(transfer.name, offer)
        for each in wanted:
            left_s = transfer.within_s - (time.monotonic() - began)
            if each.computed >= each.end or (transfer.nbytes and left_s <= 0):
                continue
            own = Transfer(transfer.name, transfer.number, transfer.variant, max(0.0, left_s), transfer.stall_s)
            reason = self._receive_sequence(own, transfer, each, known) if known is not None else "there is no source"
            if reason:
                log.info("a group computes keys and values", extra={"prepared": transfer.name, "reason": reason})
                break
        return Received(transfer.tokens, transfer.nbytes, (time.monotonic() - began) * 1e3, reason)

    def forget(self, name: str) -> None:
        """Close the connections that all stages have kept for this name."""
        self._own.forget(name)
        with self._lock:
            known = self._known.pop(name, None)
        if known is not None and known.receipt is not None:
            known.receipt.stop()

    def close(self) -> None:
        """Close this stage's connections."""
        self._own.close()

    def _know(self, name: str, offer: KvOffer | None) -> _Known | None:
        with self._lock:
            if offer is None:
                return self._known.get(name)
            self._known[name] = known = _Known(offer)
            while len(self._known) > KEPT_CONNECTIONS:
                del self._known[next(iter(self._known))]
            return known

    def _receive_sequence(self, own: Transfer, total: Transfer, wanted: Wanted, known: _Known) -> str:
        """Receive one sequence in all stages, and count it.

        Args:
            own: The transfer of this sequence in this stage.
            total: That of all sequences in all stages.
            wanted: The sequence.
            known: Its source.

        Returns:
            Why the transfer ended early; empty: it did not.
        """
        asked = GroupOrder(
            known.offer, wanted.choice, wanted.tokens, wanted.computed, wanted.end, own.within_s, own.stall_s, own.stop
        )
        ordering = self._batcher.transfer(lambda t: t.receive_in_group(own.number, wanted.index, asked))
        try:
            receipt = ordering.result(STEP_WITHIN_S)
        except (ThawError, TimeoutError) as e:
            return str(e) or type(e).__name__
        known.receipt = receipt
        limited = replace(wanted, tokens=wanted.tokens[: receipt.order.end + 1])
        received = self._own.receive(own, [limited], known.offer)
        reason = receipt.failure or received.reason
        if reason:
            receipt.stop()
        try:
            others = receipt.wait(_REPORTS_WITHIN_S)
            total.count(received.nbytes + receipt.nbytes)
            settling = self._batcher.transfer(lambda t: t.settle(own.number, wanted.index, others))
            total.tokens += settling.result(STEP_WITHIN_S) - wanted.computed
        except (ThawError, TimeoutError) as e:
            receipt.stop()
            return reason or str(e) or type(e).__name__
        if not reason and (reason := receipt.failure):
            receipt.stop()
        return reason
