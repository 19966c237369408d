"""A loader whose weights arrive when a test says so, and which reports them to followers.

To host memory, to a separate cpu device, or to a GPU by the stand-in driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pydantic import TypeAdapter

from services.loader.adapters.descriptors import open_again, peer_process, send_descriptors
from services.loader.kv_lending import KvLending
from shared.contracts.loader import AttachWeights, WeightsAttached
from shared.contracts.loader_socket import (
    SocketArrived,
    SocketBorrow,
    SocketComplete,
    SocketDescriptors,
    SocketFollow,
    SocketMap,
    SocketPages,
    SocketUnits,
    loader_socket,
)
from shared.contracts.segment import ByteRange
from shared.errors import ThawError
from shared.messaging import Mesh
from tests.support.segments import FakeLoader, WrittenSegment
from tests.unit.loader.store.gpu import Gpus
from weights.devices.port import Contents, Place
from weights.formats.execution_order import execution_rank
from weights.store.arena import PagedArena
from weights.store.gpu_device import GpuDevice
from weights.store.separate import SeparateDevice
from weights.store.units import PAGE_BYTES

_names = itertools.count(1)
_ASK: TypeAdapter[SocketFollow | SocketBorrow | SocketMap] = TypeAdapter(SocketFollow | SocketBorrow | SocketMap)


class FollowedLoader(FakeLoader):
    """Serves one model. With `pages`, to a device of its own of that many bytes.

    Args:
        on_gpu: The device is a GPU, and no separate cpu device.
    """

    def __init__(self, mesh: Mesh, node: str, home: Path, directory: Path, *, pages: int = 0, on_gpu: bool = False) -> None:
        super().__init__(mesh, node, hold=True)
        self._socket = loader_socket(home / "nodes" / node)
        self._pages, self._on_gpu = pages, on_gpu
        self._gpus: list[Gpus] = []
        self.descriptors = 0
        """Descriptors that were sent."""
        self.segment = self._segments[str(directory)] = WrittenSegment(directory)
        complete = WrittenSegment(directory).write()
        self._bytes = ctypes.create_string_buffer(complete.path.read_bytes(), self.segment.total_bytes)
        complete.unlink()
        self.segment.write_index()
        self._order = sorted(self.segment.index.tensors, key=lambda t: (execution_rank(t.name), t.offset))
        self._sent = 0
        self._news = asyncio.Condition()
        self._followers: list[asyncio.StreamWriter] = []
        self._borrowers: list[asyncio.StreamWriter] = []
        self.followed = asyncio.Event()
        self._files: list[str] = []
        """Files with pages, in /dev/shm."""
        self._restart()

    def _restart(self) -> None:
        self._boot_id = f"boot-{next(_names)}"
        self.device: SeparateDevice | None = None
        self._lending: KvLending | None = None
        self.arena: PagedArena | None = None
        if self._pages:
            self.device = self._open_gpu() if self._on_gpu else self._open_separate()
            contents = Contents(self.segment.index.tensors, {}, "demo")
            self.arena = self.device.allocate(Place("test", self.segment.total_bytes, "", contents=contents))

    def _open_separate(self) -> SeparateDevice:
        self._files.append(f"thaw-test-followed-{self.segment.name}-{next(_names)}")
        device = SeparateDevice("cpu:1", self._pages, self._files[-1])
        self._lending = KvLending(lambda: {"cpu:1": device})
        return device

    def _open_gpu(self) -> GpuDevice:
        self._gpus.append(Gpus(self._pages // PAGE_BYTES, lends_kv=True))
        device = self._gpus[-1].get("cuda:0")
        self._lending = KvLending(lambda: {"cuda:0": device})
        return device

    async def start(self) -> None:
        await super().start()
        self._socket.parent.mkdir(parents=True)
        self._server = await asyncio.start_unix_server(self._serve, str(self._socket))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        if not line:  # the engine ended before it asked
            writer.close()
            return
        ask = _ASK.validate_json(line)
        if isinstance(ask, SocketFollow):
            await self._follow(writer)
        elif isinstance(ask, SocketMap):
            assert self.arena is not None
            with contextlib.suppress(ConnectionError):
                await self._send_units(writer, range(len(self.arena.units)))
                writer.write(SocketComplete(loaded_bytes=0).model_dump_json().encode() + b"\n")
                await writer.drain()
            writer.close()
        elif self._lending is not None:
            self._borrowers.append(writer)
            with contextlib.suppress(OSError):  # the test has ended
                await self._lending.serve(f"borrower-{next(_names)}", ask, reader, writer)

    async def _follow(self, writer: asyncio.StreamWriter) -> None:
        self._followers.append(writer)
        self.followed.set()
        sent = 0
        with contextlib.suppress(ConnectionError):
            if self.arena is not None:
                writer.write(SocketPages(layout=self.arena.layout()).model_dump_json().encode() + b"\n")
                while units := await asyncio.to_thread(self.arena.wait_units, sent):
                    sent += len(units)
                    if self._on_gpu:
                        await self._send_units(writer, [u.unit for u in units])
                    else:
                        writer.write(SocketUnits(units=units).model_dump_json().encode() + b"\n")
            else:
                while sent < len(self._order):
                    async with self._news:
                        while self._sent <= sent and not writer.is_closing():
                            await self._news.wait()
                    ranges = tuple(ByteRange(offset=t.offset, nbytes=t.nbytes) for t in self._order[sent : self._sent])
                    if not ranges:
                        return
                    sent += len(ranges)
                    writer.write(SocketArrived(ranges=ranges).model_dump_json().encode() + b"\n")
            writer.write(SocketComplete(loaded_bytes=0).model_dump_json().encode() + b"\n")
            await writer.drain()

    async def _send_units(self, writer: asyncio.StreamWriter, units: Sequence[int]) -> None:
        """Send descriptors of units on the GPU."""
        pid = peer_process(writer)
        assert isinstance(self.device, GpuDevice)
        assert self.arena is not None
        assert pid is not None
        line = SocketDescriptors(units=tuple(units)).model_dump_json().encode() + b"\n"
        export = partial(self.device.export, self.arena, units, pid)
        with contextlib.suppress(ThawError):  # the engine has disconnected
            await asyncio.to_thread(send_descriptors, open_again(writer), line, export)
            self.descriptors += len(units)

    async def send(self, share: float) -> None:
        """Let the tensors arrive, in execution order, up to this share of them."""
        until = round(share * len(self._order))
        with self.segment.path.open("r+b") as file:
            for tensor in self._order[self._sent : until]:
                file.seek(tensor.offset)
                file.write(self._bytes.raw[tensor.offset : tensor.offset + tensor.nbytes])
                if self.arena is not None:
                    self.arena.fill(tensor.offset, ctypes.addressof(self._bytes) + tensor.offset, tensor.nbytes)
        async with self._news:
            self._sent = until
            self._news.notify_all()

    async def finish(self) -> None:
        await self.send(1)
        if self.arena is not None:
            for unit in self.arena.units:  # the padding between tensors
                _fill_gaps(self.arena, unit.offset, unit.end, [(t.offset, t.offset + t.nbytes) for t in self._order], self._bytes)
            await asyncio.to_thread(self.arena.wait_units, len(self.arena.units))
        self._complete.set()

    async def fail(self, error: ThawError) -> None:
        self._error = error
        self._complete.set()

    def disconnect(self) -> None:
        """End the connections of all followers."""
        for writer in self._followers:
            writer.close()

    async def restart(self) -> None:
        """Lose all that has arrived on the device, as a killed loader does."""
        before, self._sent = self.device, 0
        self.disconnect()
        self._restart()
        if before is not None:
            await asyncio.to_thread(before.close)

    async def _attach(self, command: AttachWeights) -> WeightsAttached:
        found = await super()._attach(command)
        if self.arena is not None and command.until == "complete":
            found = found.model_copy(update={"handle": self.arena.handle()})
        return found.model_copy(update={"loaded_bytes": 0, "boot_id": self._boot_id})

    async def stop(self) -> None:
        self.disconnect()
        for writer in self._borrowers:
            writer.close()
        if self.arena is not None:
            self.arena.release()
        self._server.close()
        if self.device is not None:
            await asyncio.to_thread(self.device.close)
        for gpus in self._gpus:
            await asyncio.to_thread(gpus.close)
        # A loader that was replaced leaves its pages to be counted by the next one.
        for name in self._files:
            Path("/dev/shm", name).unlink(missing_ok=True)
        self.close()


def _fill_gaps(arena: PagedArena, start: int, end: int, taken: list[tuple[int, int]], source: ctypes.Array[ctypes.c_char]) -> None:
    at = start
    for first, last in sorted(span for span in taken if start <= span[0] < end):
        if first > at:
            arena.fill(at, ctypes.addressof(source) + at, first - at)
        at = max(at, last)
