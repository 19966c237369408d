"""Weights that arrive while the model computes (Torpor, section 4.3).

The loader reports over its local socket which bytes have arrived. Its replies over NATS stay the
authority: after a lost connection the engine waits for the whole load, and loses nothing else.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from services.engine.domain.coverage import Coverage
from services.engine.model.gpu_units import ArrivingUnits
from services.engine.model.segment import SHARED_MEMORY
from shared.contracts.loader_socket import (
    SocketArrived,
    SocketComplete,
    SocketDescriptors,
    SocketFollow,
    SocketPages,
    SocketUnits,
)
from shared.contracts.segment import Extent, PagesHandle, PagesLayout, UnitPages
from shared.errors import EngineFailed, ThawError
from shared.mapping import ReservedRange
from weights.client import LoaderConnection

log = logging.getLogger(__name__)
ByteSpan = tuple[int, int]
"""First byte in the segment, and the byte after the last."""


class ArrivingWeights:
    """The bytes of a segment that have arrived. Threads report them; the computing thread waits."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._there = Coverage()
        self._is_complete = False
        self._error: ThawError | None = None

    def mark_arrived(self, spans: Iterable[ByteSpan]) -> None:
        with self._changed:
            for start, end in spans:
                self._there.add(start, end)
            self._changed.notify_all()

    def mark_complete(self) -> None:
        """Record that all bytes have arrived."""
        with self._changed:
            self._is_complete = True
            self._changed.notify_all()

    def fail(self, error: ThawError) -> None:
        """Make every wait raise `error`. This has no effect after `mark_complete`."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def wait(self, spans: Sequence[ByteSpan]) -> None:
        """Wait until all of these bytes have arrived. Raises the error of the load."""
        with self._changed:
            while not self._is_complete and not all(self._there.has(*span) for span in spans):
                if self._error is not None:
                    raise self._error
                self._changed.wait()


class ArrivingPages:
    """A device's pages, mapped unit by unit at fixed addresses.

    An access to an unmapped unit ends the process, so that the engine never computes with wrong
    bytes.
    """

    def __init__(self, layout: PagesLayout) -> None:
        """Reserve the addresses. Raises `EngineFailed` if there is no such range."""
        self.layout = layout
        self._file = layout.file
        self._mapped: dict[int, tuple[Extent, ...]] = {}
        try:
            self._range = ReservedRange(layout.nbytes)
        except OSError as e:
            raise EngineFailed(f"{layout.nbytes} bytes of addresses cannot be reserved ({e})") from e
        self.memory = torch.frombuffer(self._range.area, dtype=torch.uint8)

    def map(self, units: Sequence[UnitPages]) -> list[ByteSpan]:
        """Map units, and return their bytes in the segment.

        Raises:
            EngineFailed: The file is gone: its loader has ended.
        """
        self._map(self._file, {u.unit: u.extents for u in units})
        return [(found.offset, found.offset + found.nbytes) for found in (self.layout.units[u.unit] for u in units)]

    def map_all(self, handle: PagesHandle) -> None:
        """Map all units where the loader's final reply places them; keep mappings that are equal.

        Raises:
            EngineFailed: The units are not those that the model is bound to, or their file is gone.
        """
        if (handle.nbytes, handle.units) != (self.layout.nbytes, self.layout.units):
            raise EngineFailed(f"The units on {handle.device} have changed during the load. Start the instance again")
        wanted = dict(enumerate(_by_unit(handle)))
        changed = {i: extents for i, extents in wanted.items() if handle.file != self._file or self._mapped.get(i) != extents}
        if handle.file == self._file and changed.keys() & self._mapped.keys():
            raise EngineFailed(f"Units on {handle.device} have moved during the load. Start the instance again")
        if handle.file != self._file:
            log.warning("the loader was restarted and has copied the weights again; mapping again")
        self._map(handle.file, changed)
        self._file = handle.file

    def _map(self, file: str, units: dict[int, tuple[Extent, ...]]) -> None:
        path = SHARED_MEMORY / file
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                for index, extents in units.items():
                    self._range.map(self.layout.units[index].start, fd, extents)
            finally:
                os.close(fd)
            path.stat()  # as of `device_segment.open_pages`: a new loader renames the file before it frees pages
        except (OSError, ValueError) as e:
            raise EngineFailed(f"The pages of {self.layout.device} cannot be mapped ({e}). Start the instance again") from e
        self._mapped.update(units)


def _by_unit(handle: PagesHandle) -> list[tuple[Extent, ...]]:
    """Divide the handle's extents among its units."""
    found: list[tuple[Extent, ...]] = []
    rest = [(e.offset, e.nbytes) for e in reversed(handle.extents)]
    ends = [*(u.start for u in handle.units[1:]), handle.nbytes]
    for unit, end in zip(handle.units, ends, strict=True):
        own, left = [], end - unit.start
        while left:
            offset, nbytes = rest.pop()
            own.append(Extent(offset=offset, nbytes=min(nbytes, left)))
            if nbytes > left:
                rest.append((offset + left, nbytes - left))
            left -= own[-1].nbytes
        found.append(tuple(own))
    return found


class Follower:
    """A thread that follows a load, and reports the bytes that arrive."""

    def __init__(self, socket: Path, instance_id: str, weights_id: str, on_pages: Callable[[PagesLayout | None], None]) -> None:
        """Connect, and start the thread.

        Args:
            socket: The loader's socket.
            instance_id: The holder of the weights.
            weights_id: The weights.
            on_pages: Called once: with the layout of a device's pages before the first of them, or
                None if the connection ends without one. It is not called for host memory.

        Raises:
            Unreachable: No loader listens.
        """
        self.arriving = ArrivingWeights()
        self.pages: ArrivingPages | ArrivingUnits | None = None
        self._socket, self._instance_id, self._weights_id = socket, instance_id, weights_id
        self._on_pages: Callable[[PagesLayout | None], None] | None = on_pages
        self._connection = LoaderConnection(socket, None)
        ask = SocketFollow(instance_id=instance_id, weights_id=weights_id)
        try:
            self._connection.send(ask.model_dump_json().encode() + b"\n")
        except ThawError:
            self._connection.close()
            raise
        self._thread = threading.Thread(target=self._follow, name="follow", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the thread. Mapped units stay mapped."""
        self._connection.interrupt()
        self._thread.join()

    def _follow(self) -> None:
        try:
            self._receive()
        except ThawError as e:
            log.info("stopped following the load", extra={"error": e.message})
        except Exception:  # the thread's boundary: the load's end over NATS decides
            log.exception("failed to follow the load")
        finally:
            self._connection.close()
            self._report_pages(None)

    def _receive(self) -> None:
        while True:
            match self._connection.receive():
                case SocketArrived(ranges=ranges):
                    self.arriving.mark_arrived((r.offset, r.offset + r.nbytes) for r in ranges)
                case SocketPages(layout=layout):
                    self.pages = self._reserve(layout)
                    self._report_pages(layout)
                case SocketUnits(units=units) if isinstance(self.pages, ArrivingPages):
                    self.arriving.mark_arrived(self.pages.map(units))
                case SocketDescriptors(units=numbers) if isinstance(self.pages, ArrivingUnits):
                    descriptors = self._connection.take_descriptors(len(numbers))
                    self.arriving.mark_arrived(self.pages.map(numbers, descriptors))
                case SocketComplete():
                    return
                case other:
                    raise EngineFailed(f"The loader answered {other.kind!r} to a follow request")

    def _reserve(self, layout: PagesLayout) -> ArrivingPages | ArrivingUnits:
        if layout.bus_id is None:
            return ArrivingPages(layout)
        return ArrivingUnits(layout, self._socket, self._instance_id, self._weights_id)

    def _report_pages(self, layout: PagesLayout | None) -> None:
        report, self._on_pages = self._on_pages, None
        if report is not None:
            report(layout)
