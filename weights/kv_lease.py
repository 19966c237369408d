"""Client of the node's loader for a KV cache that borrows pages (ADR 0056).

A lent page is a right to 2 MiB of memory of this process. The lease maps each page without access.
As long as a page is mapped, no loader lends it to another process, even if the connection or the
loader ends. After a restart of the loader the lease keeps its pages, and borrows from the new
loader. A page is locked while it is mapped (`shared.file_locks`), which is how loaders see it.

On a GPU the lease maps nothing. It has memory allocated for each page (`LentMemory`), and returns
those pages at once for which there is none (ADR 0107).

Needs only the standard library and pydantic; imports nothing of the loader.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from shared.contracts.base import Message
from shared.contracts.loader_socket import (
    LENDER_LINE,
    MAX_LINE_BYTES,
    SocketBorrow,
    SocketBorrowing,
    SocketDemand,
    SocketError,
    SocketLent,
    SocketReturn,
    SocketShrink,
)
from shared.file_locks import lock_mapped, unlock_mapped
from shared.unix_sockets import short_address

log = logging.getLogger(__name__)
PAGE_BYTES = 2 * 1024 * 1024
SHARED_MEMORY = Path("/dev/shm")
_RECONNECT_S = 0.25
_REFUSED_S = 1.0
"""After it has found no memory for pages, the lease asks for them again in this time."""
_MADV_DONTFORK = 10
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


@dataclass(frozen=True)
class Lent:
    """The loader has lent `more` pages.

    Attributes:
        is_answer: True if the loader has received the latest demand.
        turn: Number of the granted turn; 0: none. None: the loader does not support turns.
    """

    more: int
    is_answer: bool
    turn: int | None = 0


@dataclass(frozen=True)
class Shrink:
    """Another process needs pages: return all but `keep`."""

    keep: int


class LentMemory(Protocol):
    """A GPU's memory for lent pages. `add` is called on the lease's thread."""

    def add(self, pages: int) -> int:
        """Allocate memory for more pages; return the number of pages that got memory."""
        ...


@dataclass(frozen=True)
class _Claim:
    """A borrowed page.

    Attributes:
        file: The file that it is mapped from; empty on a GPU.
        address: Address at which the page is mapped; None: it is a GPU's page, and has none.
        lender: Number of the connection over which it was lent.
    """

    file: str
    page: int
    address: int | None
    lender: int


class KvLease:
    """Pages that this process borrows. Its methods may be called from any thread."""

    def __init__(
        self,
        path: Path,
        device: str,
        instance_id: str,
        floor_pages: int,
        deliver: Callable[[Lent | Shrink], None],
        *,
        ceiling_pages: int | None = None,
        model: str = "",
        memory: LentMemory | None = None,
    ) -> None:
        """Connect in the background, and repeat that while the loader is not running.

        Args:
            path: The loader's socket.
            floor_pages: Pages that are booked for the instance.
            deliver: Receives events, on the lease's thread.
            ceiling_pages: The most pages that the cache may have; None: unknown.
            model: Name of the instance's model, for the loader's status.
            memory: Memory of the pages, on a GPU; None: the pages are the file's.
        """
        self._path, self._deliver, self._memory = path, deliver, memory
        self._ask = SocketBorrow(
            device=device, instance_id=instance_id, floor_pages=floor_pages, ceiling_pages=ceiling_pages, model=model
        )
        self._lock = threading.Lock()
        self._claims: list[_Claim] = []
        self._descriptors: dict[str, int] = {}
        """Descriptors of files with claims. Locks of neighbouring pages merge within each one."""
        self._connection: socket.socket | None = None
        self._file = ""
        self._lender = 0
        """Number of the connection over which pages are lent now; 0: there is none."""
        self._demand, self._turn, self._turn_pages = floor_pages, 0, 0
        self._number = self._connections = 0
        self._retry: threading.Timer | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-lease", daemon=True)
        self._thread.start()

    @property
    def held(self) -> int:
        with self._lock:
            return len(self._claims)

    def demand(self, pages: int, turn: int = 0, turn_pages: int = 0) -> None:
        """Ask for a total number of pages. `Lent` events follow.

        A smaller number than before returns no page, and limits later loans.

        Args:
            pages: Total number of pages.
            turn: Number of the turn that the engine waits for or has; 0: none.
            turn_pages: Pages that the engine needs for the turn.
        """
        with self._lock:
            self._demand, self._turn, self._turn_pages = pages, turn, turn_pages
            self._send_demand()

    def give_back(self, pages: int) -> None:
        """Return `pages` pages, whose memory the caller has freed."""
        with self._lock:
            # Pages of earlier connections first: they cannot be taken back over the present one.
            self._claims.sort(key=self._is_current, reverse=True)
            kept = len(self._claims) - pages
            given, self._claims = self._claims[kept:], self._claims[:kept]
            self._unmap(given)
            if current := tuple(c.page for c in given if self._is_current(c)):
                self._send(SocketReturn(pages=current))
            if len(current) < len(given):
                self._send_demand()

    def abandon(self) -> None:
        """Stop borrowing, and deliver no more events.

        The pages stay until `close` or the end of this process.
        """
        self._closed.set()
        self._deliver = _ignore  # it refers to the KV cache and the model, and the thread may wait for the loader

    def close(self) -> None:
        """End the connection and unmap all pages."""
        self._closed.set()
        with self._lock:
            if self._retry is not None:
                self._retry.cancel()
            if self._connection is not None:
                with contextlib.suppress(OSError):  # wakes the thread that reads
                    self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        with self._lock:
            given, self._claims = self._claims, []
            self._unmap(given)

    # -- the lease's thread ------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._talk()
            except OSError as e:
                log.debug("no connection to the loader; borrowed pages stay", extra={"error": str(e)})
            except ValidationError:
                log.exception("the loader sent a line that this engine does not know")
            except Exception:  # the thread's boundary: without it the cache would wait for pages for ever
                log.exception("failed to handle a message of the loader; connecting again")
            self._closed.wait(_RECONNECT_S)

    def _talk(self) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with short_address(self._path) as address:
                connection.connect(address)
            with self._lock:
                self._connection = connection
                self._send(self._ask)
            with connection.makefile("rb") as lines:
                while not self._closed.is_set() and (line := lines.readline(MAX_LINE_BYTES)).endswith(b"\n"):
                    self._on_line(line)
        finally:
            with self._lock:
                self._connection, self._file, self._lender = None, "", 0
                connection.close()

    def _on_line(self, line: bytes) -> None:
        match LENDER_LINE.validate_json(line):
            case SocketBorrowing(file=file):
                with self._lock:
                    self._connections += 1
                    self._file, self._lender = file, self._connections
                    self._send_demand()
            case SocketLent(number=number, pages=pages, turn=turn):
                made = self._memory.add(len(pages)) if self._memory is not None else len(pages)
                with self._lock:
                    is_answer = number == self._number
                    on_gpu = [_Claim("", page, None, self._lender) for page in pages[:made]]
                    claims = self._map(pages) if self._memory is None else on_gpu
                    self._claims += claims
                    event = Lent(len(claims), is_answer, turn)
                    if refused := pages[made:]:
                        self._refuse(refused)
                self._deliver(event)
            case SocketShrink(pages=pages):
                with self._lock:
                    keep = pages + sum(not self._is_current(c) for c in self._claims)
                self._deliver(Shrink(keep))
            case SocketError(error=error):
                log.error("the loader lends no pages", extra={"error": error.message})

    def _refuse(self, pages: tuple[int, ...]) -> None:
        """Return pages for which there is no memory, and ask again later. Called with the lock."""
        log.warning("the GPU has no memory for lent pages", extra={"pages": len(pages), "device": self._ask.device})
        held = sum(map(self._is_current, self._claims))
        self._send_demand(most=held)  # or the loader would lend the same pages at once
        self._send(SocketReturn(pages=pages))
        if self._retry is None and not self._closed.is_set():
            self._retry = threading.Timer(_REFUSED_S, self._ask_again)
            self._retry.daemon = True
            self._retry.start()

    def _is_current(self, claim: _Claim) -> bool:
        """True if the page was lent over the present connection. Called with the lock."""
        return claim.lender == self._lender

    def _ask_again(self) -> None:
        with self._lock:
            self._retry = None
            self._send_demand()

    def _map(self, pages: tuple[int, ...]) -> list[_Claim]:
        """Map lent pages without access. Raises `OSError` if the loader has been replaced
        meanwhile.
        """
        if not pages:
            return []
        path, found = SHARED_MEMORY / self._file, list[_Claim]()
        if (fd := self._descriptors.get(self._file)) is None:
            fd = self._descriptors[self._file] = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            for page in pages:
                lock_mapped(fd, page * PAGE_BYTES, PAGE_BYTES)
                address = _libc.mmap(None, PAGE_BYTES, 0, mmap.MAP_SHARED, fd, page * PAGE_BYTES)
                if address == ctypes.c_void_p(-1).value:
                    error = ctypes.get_errno()
                    raise OSError(error, os.strerror(error))
                # A copy in a forked process would outlive the lock, which this one gives up.
                _libc.madvise(address, PAGE_BYTES, _MADV_DONTFORK)
                found.append(_Claim(self._file, page, address, self._lender))
            # A new loader renames the file before it counts the pages that processes map.
            path.stat()
        except OSError:
            self._unmap(found)
            if self._file in self._descriptors:  # the page that could not be mapped
                for page in pages:
                    unlock_mapped(fd, page * PAGE_BYTES, PAGE_BYTES)
            raise
        return found

    def _unmap(self, claims: Sequence[_Claim]) -> None:
        """Unmap and unlock pages that are no longer among `_claims`."""
        for claim in claims:
            if claim.address is not None:
                _libc.munmap(claim.address, PAGE_BYTES)
                unlock_mapped(self._descriptors[claim.file], claim.page * PAGE_BYTES, PAGE_BYTES)
        for file in self._descriptors.keys() - {c.file for c in self._claims}:
            os.close(self._descriptors.pop(file))

    # -- sending, with the lock --------------------------------------------------------------------

    def _send_demand(self, most: int | None = None) -> None:
        """Send the demand.

        Args:
            most: Largest number of pages to ask for now; None: all.
        """
        if self._lender:
            self._number += 1
            earlier = sum(not self._is_current(c) for c in self._claims)
            pages, turn_pages = max(0, self._demand - earlier), max(0, self._turn_pages - earlier)
            if most is not None:
                pages = min(pages, most)
            self._send(SocketDemand(number=self._number, pages=pages, turn=self._turn, turn_pages=turn_pages))

    def _send(self, message: Message) -> None:
        if self._connection is not None:
            try:
                self._connection.sendall(message.model_dump_json().encode() + b"\n")
            except OSError as e:  # the reading thread sees the end of the connection, and connects again
                log.debug("failed to send to the loader", extra={"error": str(e)})


def _ignore(_: Lent | Shrink) -> None:
    """Drop the event."""
