"""The two connections of a stage: frames from the stage before, and to the next one.

Each has a thread of its own, so that a stage receives and sends while it computes. Small frames do
without the sender's thread while no other frame waits: its wake-up takes longer than the sending.
Both queues are bounded. A stage that does not keep up stops reading, TCP's window closes, and the
stages before it wait: no stage stores more than a few frames.
"""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from services.engine.domain.frames import HEADER_BYTES, ProtocolError, decode_header, decode_message, encode_head
from services.engine.domain.stage_frames import STAGES
from services.engine.generation.runner import RunnerLost
from shared.contracts.stages import KvReceived, StageMessage

QUEUED_FRAMES = 8
"""Most frames that wait in one direction; at least the micro-batches of a step (`MAX_STAGES`)."""
_JOINED_BYTES = 64 * 1024
"""Smaller frames are sent by one call."""
_FAR = 1e9


@dataclass(frozen=True)
class Frame:
    """A message and the bytes that follow it."""

    message: StageMessage
    data: bytes | bytearray | memoryview = b""


class Connection:
    """The common part of both directions. The first failure is passed to `on_lost`, once."""

    def __init__(self, sock: socket.socket, peer: str, on_lost: Callable[[str], None]) -> None:
        self._sock, self._peer, self._on_lost = sock, peer, on_lost
        sock.setblocking(True)
        self._lock = threading.Lock()
        self._error: str | None = None
        self._is_closing = False

    @property
    def error(self) -> str | None:
        """The reason why the connection cannot be used any more."""
        return self._error

    def close(self) -> None:
        """Close the connection without a report."""
        self._is_closing = True
        self._fail("this stage has closed the connection")

    def _fail(self, reason: str) -> None:
        with self._lock:
            if self._error is not None:
                return
            self._error = f"The connection to {self._peer} is lost: {reason}"
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # its threads end then; closed with the object, so that no thread uses its number
        self._wake()
        if not self._is_closing:
            self._on_lost(self._error)

    def _wake(self) -> None:
        """Wake the threads that wait for a frame or for room."""


class _Reader:
    """Reads a socket in pieces of any length: a small frame by one call of the system."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = memoryview(bytearray(_JOINED_BYTES))
        self._start = self._end = 0  # of the bytes that are received and not read

    def read(self, count: int) -> bytearray:
        """Return the next `count` bytes.

        Raises:
            EOFError: The stage has ended.
        """
        data = bytearray(count)
        done = self._take(data, 0)
        with memoryview(data) as view:
            while done < count:
                is_large = count - done >= len(self._buffer)
                got = self._sock.recv_into(view[done:] if is_large else self._buffer)
                if got == 0:
                    within = f" within a frame ({done} of {count} bytes)" if done else ""
                    raise EOFError(f"the stage has ended{within}")
                if is_large:
                    done += got
                else:
                    self._start, self._end = 0, got
                    done = self._take(data, done)
        return data

    def _take(self, data: bytearray, done: int) -> int:
        """Move received bytes to `data` from `done` on, and return its new end."""
        taken = min(len(data) - done, self._end - self._start)
        data[done : done + taken] = self._buffer[self._start : self._start + taken]
        self._start += taken
        return done + taken


class Inbound(Connection):
    """Frames of the stage before."""

    def __init__(
        self, sock: socket.socket, peer: str, max_data_bytes: int, on_lost: Callable[[str], None], on_frame: Callable[[], None]
    ) -> None:
        """Start to receive.

        Args:
            sock: The connection, after the handshake.
            peer: The stage before, for errors.
            max_data_bytes: Most data of a frame: a longer one ends the connection.
            on_lost: Called with the reason when the connection ends, from any thread.
            on_frame: Called after each frame, from the receiving thread.
        """
        super().__init__(sock, peer, on_lost)
        self._max_data_bytes, self._on_frame = max_data_bytes, on_frame
        self.on_report: Callable[[KvReceived | None], None] | None = None
        """Gets each `KvReceived` at once, instead of `get`, and None when the connection ends.

        It is called from any thread.
        """
        self._frames: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(QUEUED_FRAMES)
        self._reader = _Reader(sock)
        self._thread = threading.Thread(target=self._receive, name="stage-in", daemon=True)
        self._thread.start()

    @property
    def has_frame(self) -> bool:
        return not self._frames.empty()

    def get(self, timeout_s: float) -> Frame:
        """Return the next frame.

        Raises:
            RunnerLost: None arrives within `timeout_s`, or the connection is lost.
        """
        try:
            frame = self._frames.get(timeout=min(timeout_s, _FAR)) if self._error is None else self._frames.get_nowait()
        except queue.Empty:
            raise RunnerLost(self._error or f"{self._peer} has sent nothing for {timeout_s:g} s") from None
        if frame is None:
            raise RunnerLost(self._error or "the connection is closed")
        self._room.release()
        return frame

    def _receive(self) -> None:
        try:
            while True:
                lengths = decode_header(STAGES, bytes(self._reader.read(HEADER_BYTES)), self._max_data_bytes)
                message = decode_message(STAGES, bytes(self._reader.read(lengths.message)))
                frame = Frame(message, self._reader.read(lengths.data))
                if self.on_report is not None and isinstance(message, KvReceived):
                    self.on_report(message)
                    continue
                self._put(frame)
                self._on_frame()
        except ProtocolError as e:
            self._fail(str(e))
        except (OSError, EOFError) as e:
            self._fail(str(e) or type(e).__name__)

    def _put(self, frame: Frame) -> None:
        self._room.acquire()
        if self._error is not None:
            raise EOFError
        self._frames.put(frame)

    def _wake(self) -> None:
        self._frames.put(None)
        self._room.release()
        self._on_frame()
        if self.on_report is not None:
            self.on_report(None)


class Outbound(Connection):
    """Frames to the next stage."""

    def __init__(self, sock: socket.socket, peer: str, on_lost: Callable[[str], None], send_within_s: float) -> None:
        """Start to send.

        Args:
            sock: The connection, after the handshake.
            peer: The next stage, for errors.
            on_lost: Called with the reason when the connection ends, from any thread.
            send_within_s: Seconds that a frame may wait for the next stage to read.
        """
        super().__init__(sock, peer, on_lost)
        self._within_s = send_within_s
        self._unsent: deque[Frame | memoryview] = deque()  # a view is the rest of a frame that is sent in part
        self._turn = threading.Lock()  # its holder sends, from the first unsent frame on
        self._wakeups: queue.SimpleQueue[bool] = queue.SimpleQueue()  # False: the thread ends
        self._room = threading.Semaphore(QUEUED_FRAMES)  # not bounded: `_wake` releases it too
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for name, work in (("stage-out", self._send), ("stage-watch", self._watch))
        ]
        for thread in self._threads:
            thread.start()

    def put(self, frame: Frame) -> None:
        """Send a frame with data. Waits while too many are unsent.

        Raises:
            RunnerLost: The next stage reads nothing for too long, or the connection is lost.
        """
        if not frame.data:
            self.put_small(frame.message)
            return
        if self._send_now(frame):
            return
        if self._error is None and not self._room.acquire(timeout=self._within_s):
            self._fail(f"it has read nothing for {self._within_s:g} s")
        if self._error is not None:
            raise RunnerLost(self._error)
        self._enqueue(frame)

    def put_small(self, message: StageMessage) -> None:
        """Send a message without data, after all frames so far. Never waits and never raises."""
        frame = Frame(message)
        if self._error is None and not self._send_now(frame):
            self._enqueue(frame)

    def flush_and_close(self, within_s: float) -> None:
        """Close the connection when all frames are sent, or after `within_s`."""
        self._is_closing = True
        self._wakeups.put(False)
        self._threads[0].join(within_s)
        self.close()

    def _enqueue(self, frame: Frame) -> None:
        """Let the thread send a frame. Never waits: garbage collection may call it anywhere."""
        self._unsent.append(frame)
        self._wakeups.put(True)

    def _send_now(self, frame: Frame) -> bool:
        """Send a small frame unless another one is unsent. Never waits.

        Returns:
            False if the frame is still to be sent.
        """
        if len(frame.data) > _JOINED_BYTES or not self._turn.acquire(blocking=False):
            return False
        try:
            if self._unsent or self._error is not None:
                return False
            data = memoryview(b"".join((encode_head(STAGES, frame.message, len(frame.data)), frame.data)))
            with contextlib.suppress(BlockingIOError):
                data = data[self._sock.send(data, socket.MSG_DONTWAIT) :]
            if data:
                self._unsent.appendleft(data)
                self._wakeups.put(True)
        except (OSError, ProtocolError) as e:
            self._fail(str(e) or type(e).__name__)
            return False
        finally:
            self._turn.release()
        return True

    def _send(self) -> None:
        try:
            while self._wakeups.get():
                with self._turn:
                    while self._unsent:
                        self._transmit(self._unsent.popleft())
        except (OSError, ProtocolError) as e:
            self._fail(str(e) or type(e).__name__)

    def _transmit(self, frame: Frame | memoryview) -> None:
        if isinstance(frame, memoryview):
            self._sock.sendall(frame)
            return
        head = encode_head(STAGES, frame.message, len(frame.data))
        if len(frame.data) <= _JOINED_BYTES:
            self._sock.sendall(b"".join((head, frame.data)))
        else:
            self._sock.sendall(head)
            self._sock.sendall(frame.data)
        if frame.data:
            self._room.release()

    def _watch(self) -> None:
        """Notice the end of the next stage while nothing is sent.

        The next stage sends nothing on this connection.
        """
        try:
            poll = select.poll()
            poll.register(self._sock, select.POLLIN | select.POLLHUP | select.POLLERR)
            while not poll.poll(1000):
                if self._error is not None:
                    return
            data = self._sock.recv(1)
            self._fail("the stage has ended" if not data else "it sent data in the wrong direction")
        except (OSError, ValueError) as e:
            self._fail(str(e) or type(e).__name__)

    def _wake(self) -> None:
        self._wakeups.put(False)
        self._room.release(QUEUED_FRAMES)  # each `put` that waits raises: the connection has failed
