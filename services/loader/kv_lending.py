"""Lend a device's pages to the KV caches of engines, over the local socket (ADR 0056).

Each connection is a borrower. The loader takes its pages back when the engine returns them, or when
the connection has ended and no process maps them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from pydantic import ValidationError

from services.loader.adapters.descriptors import peer_process, visible_process
from shared.contracts.base import Message
from shared.contracts.loader_socket import (
    BORROWER_LINE,
    SocketBorrow,
    SocketBorrowing,
    SocketDemand,
    SocketLent,
    SocketReturn,
    SocketShrink,
)
from shared.errors import EngineFailed, InvalidRequest, NotFound
from weights.store.lending import Borrower, Turn
from weights.store.separate import SeparateDevice

log = logging.getLogger(__name__)
_UNMAP_POLL_S = 0.1
"""The kernel sends no event for an unmapping. It unmaps a killed engine's pages before it closes
the engine's socket.
"""
_LACKING_POLL_S = 1.0
"""Period of the search for pages for a borrower's guarantee, as processes may unmap some."""


@dataclass
class _Borrower:
    name: str
    device: SeparateDevice
    demand: SocketDemand | None = None
    answered: int = 0
    sent_turn: int = 0
    asked_to_keep: int | None = None
    is_open: bool = True
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class KvLending:
    """The borrowers of all devices. Its methods run on the event loop."""

    def __init__(self, find_devices: Callable[[], Mapping[str, SeparateDevice]]) -> None:
        """Start without borrowers.

        Args:
            find_devices: Returns the devices with pages. It is called each time, because GPUs are
                opened at their first use.
        """
        self._find_devices = find_devices
        self._borrowers: dict[str, _Borrower] = {}

    def _on_change(self, loop: asyncio.AbstractEventLoop, device_id: str) -> None:
        """Wake the device's borrowers, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and its borrowers with it
            loop.call_soon_threadsafe(self._wake, device_id)

    def _wake(self, device_id: str) -> None:
        for borrower in self._borrowers.values():
            if borrower.device.device_id == device_id:
                borrower.changed.set()

    async def serve(self, name: str, ask: SocketBorrow, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a borrower until it disconnects and has unmapped its pages.

        Raises:
            NotFound: The node has no such device with memory of its own, or it lends nothing.
            InvalidRequest: A line is no demand or return.
            EngineFailed: The device is a GPU, and the borrower's process is not visible.
        """
        device = self._find_devices().get(ask.device)
        if device is None or not device.lends_kv:
            raise NotFound(f"{ask.device} lends no pages on this node: see THAW_DEVICES, and THAW_CUDA_LEND_KV for GPUs")
        device.lender.on_change = partial(self._on_change, asyncio.get_running_loop(), ask.device)
        pid = visible_process(writer) if device.bus_id is not None else peer_process(writer)
        borrower = self._borrowers[name] = _Borrower(name, device)
        known = Borrower(ask.floor_pages, ask.instance_id, ask.model, pid, ceiling=ask.ceiling_pages)
        device.lender.open(name, known)
        log.info("lending pages to a KV cache", extra={"instance": ask.instance_id, "device": ask.device})
        is_stopping = False
        granting = asyncio.create_task(self._grant(borrower, writer), name=f"{name}-lending")
        try:
            await _send(writer, SocketBorrowing(file=device.file, total_pages=device.page_count))
            await self._read(borrower, reader)
        except asyncio.CancelledError:  # the loader stops; the next loader counts the mapped pages
            is_stopping = True
            raise
        finally:
            borrower.is_open = False
            borrower.changed.set()
            try:
                await asyncio.shield(granting)  # a thread may be lending pages that have to be taken back
            except asyncio.CancelledError:
                is_stopping = True
                raise
            finally:
                device.lender.close(name)
                del self._borrowers[name]
                if not is_stopping:
                    await self._reclaim(borrower)

    async def _read(self, borrower: _Borrower, reader: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await reader.readuntil(b"\n")
            except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
                return
            try:
                message = BORROWER_LINE.validate_json(line)
            except ValidationError as e:
                raise InvalidRequest(f"The line is no demand or return: {e.errors()[0]['msg']}") from e
            match message:
                case SocketDemand():
                    borrower.demand = message
                    borrower.changed.set()
                case SocketReturn(pages=pages):
                    borrower.asked_to_keep = None
                    await asyncio.to_thread(borrower.device.lender.take_back, borrower.name, frozenset(pages))

    async def _grant(self, borrower: _Borrower, writer: asyncio.StreamWriter) -> None:
        """Lend the demanded pages as they become free, and ask for pages that others need."""
        lender = borrower.device.lender
        while borrower.is_open:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LACKING_POLL_S if lender.has_shortage(borrower.name) else None):
                    await borrower.changed.wait()
            borrower.changed.clear()
            if (demand := borrower.demand) is not None:
                wanted = Turn(demand.turn, demand.turn_pages) if demand.turn else None
                try:
                    pages = await asyncio.to_thread(lender.lend, borrower.name, demand.pages, wanted)
                except EngineFailed as e:  # its process has exited
                    log.info("lending no more pages to a KV cache", extra={"borrower": borrower.name, "reason": e.message})
                    return
                except OSError:  # the pages' memory could not be freed; the next change tries again
                    log.exception("failed to lend pages to a KV cache", extra={"borrower": borrower.name})
                    continue
                turn = demand.turn if lender.has_turn(borrower.name) else 0
                if pages or demand.number > borrower.answered or turn != borrower.sent_turn:
                    borrower.answered, borrower.sent_turn = demand.number, turn
                    await _send(writer, SocketLent(number=demand.number, pages=pages, turn=turn))
            keep = lender.target(borrower.name)
            if keep is not None and keep != borrower.asked_to_keep:
                await _send(writer, SocketShrink(pages=keep))
            borrower.asked_to_keep = keep

    async def _reclaim(self, borrower: _Borrower) -> None:
        """Take all pages back, each as soon as no process maps it."""
        while left := await asyncio.to_thread(borrower.device.lender.take_back, borrower.name):
            log.debug("a process still maps lent pages", extra={"borrower": borrower.name, "pages": left})
            await asyncio.sleep(_UNMAP_POLL_S)


async def _send(writer: asyncio.StreamWriter, message: Message) -> None:
    try:
        writer.write(message.model_dump_json().encode() + b"\n")
        await writer.drain()
    except ConnectionError:  # `_read` sees the end of the connection
        pass
