"""Two batchers of one model that exchange keys and values, and a faulty network between them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Literal

import pytest
from _pytest.mark.structures import ParameterSet

from services.engine.generation.batcher import Batcher
from services.engine.generation.kv_transfers import StagedRunner
from services.engine.generation.prepared_prefixes import Computed, Outcome, PrepareOrder
from services.engine.kv_transfer.destination import STALL_S, BatcherStore, KvDestination, Received
from services.engine.kv_transfer.exchange import Destination, KvExchange, carry_out
from services.engine.kv_transfer.group_destination import GroupDestination
from services.engine.kv_transfer.source import KvSource
from shared.contracts.kv_transfer import KvOffer

REVISION = "test"
PATIENT_S = 60.0
"""A source may send nothing for so long: on a busy machine one of its threads may not run."""


class Side:
    """One engine's ends of transfers."""

    def __init__(self, batcher: Batcher, revision: str = REVISION) -> None:
        self.batcher = batcher
        is_group = isinstance(batcher._runner, StagedRunner)
        destination: Destination = (
            GroupDestination(batcher, revision) if is_group else KvDestination(BatcherStore(batcher), revision)
        )
        self.exchange = KvExchange(KvSource(batcher, revision, "127.0.0.1"), destination)

    async def receive(
        self,
        name: str,
        sequences: tuple[tuple[int, ...], ...],
        offer: KvOffer,
        within_s: float = 60.0,
        stall_s: float = PATIENT_S,
    ) -> tuple[Computed, Received]:
        """Do what `PrepareResume` with an offer does."""
        outcome, received = await self.exchange.prepare(
            self.batcher, order(name, sequences, within_s), offer, range(len(sequences)), stall_s
        )
        assert isinstance(outcome, Computed), outcome
        return outcome, received

    async def compute(self, name: str, sequences: tuple[tuple[int, ...], ...]) -> Computed:
        """Do what `PrepareResume` without an offer does."""
        outcome = await carry_out(self.batcher, order(name, sequences, 60.0))
        assert isinstance(outcome, Computed), outcome
        return outcome


def order(name: str, sequences: tuple[tuple[int, ...], ...], within_s: float) -> PrepareOrder:
    def ignore(outcome: Outcome) -> None:
        """`carry_out` waits for the outcome."""

    return PrepareOrder(name, sequences, None, "", 60.0, 60.0, ignore, within_s)


@dataclass(frozen=True)
class Fault:
    """A fault that a proxy injects into the bytes of the source.

    Attributes:
        kind: `pass` injects none.
        after: Number of bytes before the fault.
    """

    kind: Literal["cut", "flip", "stall", "pass"]
    after: int = 0


def faults_of_parts(parts: int) -> list[ParameterSet]:
    """Return each fault at each part of an offer, with the reason that the destination reports.

    Each fault and each part are in one case; the other combinations are for `make test-long`.
    """
    reasons = {"cut": "closed", "flip": "damaged", "stall": "timed out"}
    cases = product(enumerate(reasons.items()), range(parts))
    return [
        pytest.param(part, fault, reason, marks=() if part == i % parts else pytest.mark.long, id=f"{fault}-{part}")
        for (i, (fault, reason)), part in cases
    ]


def stall_s_with(fault: str) -> float:
    """Return the seconds that a source may send nothing: few only if the fault is its silence."""
    return STALL_S if fault == "stall" else PATIENT_S


class Proxy:
    """A network with a fault: forwards connections to a port."""

    def __init__(self, port: int, fault: Fault) -> None:
        self._fault, self._port = fault, port
        self._server = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = [self._server]
        self.port: int = self._server.getsockname()[1]
        self.struck = threading.Event()
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def offered(self, offer: KvOffer, part: int = 0) -> KvOffer:
        """Return the offer with one of its parts at this proxy."""
        if part == 0:
            return offer.model_copy(update={"port": self.port})
        later = [p.model_copy(update={"port": self.port}) if i == part else p for i, p in enumerate(offer.later, 1)]
        return offer.model_copy(update={"later": tuple(later)})

    def close(self) -> None:
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                upstream = socket.create_connection(("127.0.0.1", self._port))
                self._open += [client, upstream]
                for ends in ((client, upstream, _unchanged), (upstream, client, self._strike)):
                    threading.Thread(target=self._forward, args=ends, name="proxy", daemon=True).start()

    def _strike(self, data: bytes, seen: int) -> bytes | None:
        """Return what arrives of `data`, after `seen` bytes; None: the connection ends."""
        at = self._fault.after - seen
        if self._fault.kind == "pass" or at >= len(data):
            return data
        self.struck.set()
        if self._fault.kind == "flip":
            return data if at < 0 else data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        return data[: max(0, at)] if self._fault.kind == "stall" else None

    @staticmethod
    def _forward(source: socket.socket, to: socket.socket, change: Callable[[bytes, int], bytes | None]) -> None:
        seen = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                changed = change(data, seen)
                if changed is None:
                    break
                to.sendall(changed)
                seen += len(data)
        for sock in (source, to):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def _unchanged(data: bytes, seen: int) -> bytes:
    return data
