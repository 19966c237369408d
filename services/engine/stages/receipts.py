"""Orders of a group's first stage to receive keys and values, and the later stages' reports."""

from __future__ import annotations

import threading
from collections.abc import Callable

from services.engine.generation.kv_transfers import GroupOrder
from shared.contracts.stages import KvReceived
from shared.errors import EngineFailed


class StageReceipt:
    """The reports of one order. Implements `Receipt`."""

    def __init__(self, order: GroupOrder, stages: int, stop: Callable[[], None]) -> None:
        """Create it.

        Args:
            order: The order.
            stages: Later stages, each of which reports once.
            stop: Orders them to end the transfer.
        """
        self.order, self._stages, self._stop = order, stages, stop
        self._reports: list[KvReceived] = []
        self._changed = threading.Condition()
        self._lost: str | None = None

    @property
    def failure(self) -> str:
        return next((r.reason for r in tuple(self._reports) if r.reason), "")

    @property
    def nbytes(self) -> int:
        return sum(r.nbytes for r in tuple(self._reports))

    @property
    def is_complete(self) -> bool:
        """True if every later stage has reported."""
        return len(self._reports) >= self._stages

    def take(self, report: KvReceived) -> None:
        """Take the report of a stage. Called from any thread."""
        with self._changed:
            self._reports.append(report)
            self._changed.notify_all()
        if report.reason:
            self.order.on_failed()

    def lose(self, reason: str) -> None:
        """Expect no further report: the group ends."""
        with self._changed:
            self._lost = reason
            self._changed.notify_all()
        self.order.on_failed()

    def wait(self, timeout_s: float) -> tuple[int, ...]:
        with self._changed:
            self._changed.wait_for(lambda: self.is_complete or self._lost is not None, timeout_s)
            if not self.is_complete:
                raise EngineFailed(
                    self._lost or f"A stage of the group has not reported its keys and values within {timeout_s:g} s"
                )
            return tuple(r.end for r in self._reports)

    def stop(self) -> None:
        self._stop()


class Receipts:
    """The orders whose reports are expected, by number. Used from any thread."""

    def __init__(self) -> None:
        self._open: dict[int, StageReceipt] = {}
        self._is_lost = False
        self._lock = threading.Lock()

    def add(self, number: int, receipt: StageReceipt) -> None:
        """Expect the reports of an order."""
        with self._lock:
            self._open[number] = receipt
            is_lost = self._is_lost
        if is_lost:
            self.take(None)

    def take(self, report: KvReceived | None) -> None:
        """Take a report. None: the connection has ended. Reports of unknown orders are ignored."""
        if report is None:
            with self._lock:
                lost, self._open, self._is_lost = list(self._open.values()), {}, True
            for receipt in lost:
                receipt.lose("A stage of the group has ended")
            return
        with self._lock:
            found = self._open.get(report.number)
        if found is not None:
            found.take(report)
            if found.is_complete:
                with self._lock:
                    self._open.pop(report.number, None)
