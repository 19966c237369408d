"""A CUDA driver whose device memory is host memory.

Streams are threads that copy in order while their gate is open.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import queue
import threading
from collections.abc import Callable

from shared.errors import DeviceFailed, InsufficientMemory
from tests.support.fake_virtual_memory import FakeVirtualMemory
from weights.devices.driver import IPC_HANDLE_BYTES, DeviceFacts, Event, Stream

TOTAL = 64 * 1024 * 1024
_exported: dict[bytes, int] = {}


class FakeStream:
    def __init__(self, driver: FakeDriver, device: int, *, urgent: bool) -> None:
        self.device, self.urgent = device, urgent
        self.work: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self._driver = driver
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (task := self.work.get()) is not None:
            self._driver.gate.wait()
            task()


class FakeEvent:
    def __init__(self) -> None:
        self.happened = threading.Event()
        self.error: DeviceFailed | None = None


class FakeDriver:
    """A fake driver.

    Attributes:
        gate: Blocks all copies while it is clear.
        copies: (offset from the device memory's start, bytes, urgent), as issued.
        peer_copies: (from, to, bytes, is direct) between devices.
        fail_copy: Makes the next copy fail. The driver reports failures at the call and later.
        fail_event: Makes the next event fail, in the same way.
    """

    def __init__(self, devices: int = 1, virtual_memory: FakeVirtualMemory | None = None, *, total_bytes: int = TOTAL) -> None:
        """Create the devices.

        Args:
            devices: Their number.
            virtual_memory: Mapped memory of the devices, which copies reach too.
            total_bytes: Memory of each device.
        """
        self.devices, self.total_bytes = devices, total_bytes
        self._virtual_memory = virtual_memory
        self.gate = threading.Event()
        self.gate.set()
        self.copies: list[tuple[int, int, bool]] = []
        self.peer_copies: list[tuple[int, int, int, bool]] = []
        self.unpinned_copies = 0
        self.pinned: dict[int, int] = {}
        self.memory: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self.streams: list[FakeStream] = []
        self.fail_copy = self.fail_event = False
        self.events = 0
        self.issued = threading.Condition()
        self._current = threading.local()
        self._numbers = itertools.count()

    def count(self) -> int:
        return self.devices

    def facts(self, index: int) -> DeviceFacts:
        return DeviceFacts(index, f"0000:{index:02x}:00.0", self.total_bytes, 13000)

    def use(self, index: int) -> None:
        self._current.index = index

    def free_bytes(self) -> int:
        index = self._check()
        total = self._virtual_memory.free_bytes(index) if self._virtual_memory is not None else self.total_bytes
        return total - sum(len(m) for m in self.memory.values())

    def allocate(self, nbytes: int) -> int:
        if nbytes > self.free_bytes():
            raise InsufficientMemory("cudaMalloc: out of memory", should_retry=True)
        memory = ctypes.create_string_buffer(nbytes)
        address = ctypes.addressof(memory)
        self.memory[address] = memory
        return address

    def free(self, address: int) -> None:
        self._check()
        del self.memory[address]

    def export(self, address: int) -> bytes:
        self._check()
        assert address in self.memory
        handle = next(self._numbers).to_bytes(IPC_HANDLE_BYTES, "big")
        _exported[handle] = address
        return handle

    def open(self, handle: bytes) -> int:
        return _exported[handle]

    def close(self, address: int) -> None:
        pass

    def register(self, address: int, nbytes: int) -> None:
        self._check()
        if address in self.pinned:
            raise DeviceFailed("cudaHostRegister: already registered")
        self.pinned[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.pinned[address]

    def stream(self, *, urgent: bool) -> Stream:
        self.streams.append(FakeStream(self, self._check(), urgent=urgent))
        return Stream(self.streams[-1])

    def destroy_stream(self, stream: Stream) -> None:
        assert isinstance(stream, FakeStream)
        stream.work.put(None)
        self.streams.remove(stream)

    def copy(self, to_device: int, from_host: int, nbytes: int, stream: Stream) -> None:
        self._check()
        assert isinstance(stream, FakeStream)
        if self.fail_copy:
            self.fail_copy = False
            raise DeviceFailed("cudaMemcpyAsync: an illegal address")
        start = self._start("cudaMemcpyAsync", to_device, nbytes, writable=True)
        if not any(a <= from_host and from_host + nbytes <= a + n for a, n in self.pinned.items()):
            self.unpinned_copies += 1
            if any(a < from_host + nbytes and from_host < a + n for a, n in self.pinned.items()):
                raise DeviceFailed("cudaMemcpyAsync: invalid argument (the range is page-locked in parts)")
        stream.work.put(functools.partial(ctypes.memmove, to_device, from_host, nbytes))
        with self.issued:
            self.copies.append((to_device - start, nbytes, stream.urgent))
            self.issued.notify_all()

    def can_access_peer(self, index: int, peer: int) -> bool:
        return index != peer and self._virtual_memory is not None and self._virtual_memory.has_links

    def copy_from_peer(self, to_device: int, index: int, from_device: int, peer: int, nbytes: int, stream: Stream) -> None:
        self._check()
        assert isinstance(stream, FakeStream)
        if self.fail_copy:
            self.fail_copy = False
            raise DeviceFailed("cudaMemcpyPeerAsync: an illegal address")
        memory = self._virtual_memory
        assert memory is not None
        if not memory.can_access(to_device, nbytes, writable=True, device=index) or not memory.can_access(
            from_device, nbytes, writable=False, device=peer
        ):
            raise DeviceFailed("cudaMemcpyPeerAsync: invalid argument (a device has no access to its own range)")
        is_direct = stream.device == index and memory.can_access(from_device, nbytes, writable=False, device=index)
        stream.work.put(functools.partial(ctypes.memmove, to_device, from_device, nbytes))
        with self.issued:
            self.peer_copies.append((peer, index, nbytes, is_direct))
            self.issued.notify_all()

    def copy_back(self, to_host: int, from_device: int, nbytes: int) -> None:
        self._check()
        self._start("cudaMemcpy", from_device, nbytes, writable=False)
        ctypes.memmove(to_host, from_device, nbytes)

    def record(self, stream: Stream) -> Event:
        assert isinstance(stream, FakeStream)
        if stream.device != self._check():
            raise DeviceFailed("cudaEventRecord: invalid resource handle (the stream is another device's)")
        event = FakeEvent()
        if self.fail_event:
            self.fail_event = False
            event.error = DeviceFailed("cudaEventSynchronize: the launch failed")
        self.events += 1
        stream.work.put(event.happened.set)
        return Event(event)

    def wait(self, event: Event) -> None:
        assert isinstance(event, FakeEvent)
        event.happened.wait()
        self.events -= 1
        if event.error is not None:
            raise event.error

    def await_copies(self, count: int) -> None:
        with self.issued:
            assert self.issued.wait_for(lambda: len(self.copies) >= count, 60), self.copies

    def _start(self, call: str, address: int, nbytes: int, *, writable: bool) -> int:
        """Return the start of the device memory that has the range."""
        for start, memory in self.memory.items():
            if start <= address and address + nbytes <= start + len(memory):
                return start
        if self._virtual_memory is None or not self._virtual_memory.can_access(
            address, nbytes, writable=writable, device=self._check()
        ):
            raise DeviceFailed(f"{call}: an illegal memory access was encountered")
        return next(a for a, n in self._virtual_memory.reservations.items() if a <= address < a + n)

    def _check(self) -> int:
        index: int | None = getattr(self._current, "index", None)
        if index is None:
            raise DeviceFailed("no device is current in this thread")
        return index
