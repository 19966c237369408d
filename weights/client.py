"""Client of the node's loader for readers without NATS.

Foreign engines' plug-ins are such readers.

    with attach(loader_socket(node_state), source="/models/llama") as weights:
        for tensor, data in weights.tensors():
            ...  # `data` is a complete view of shared memory: copy it, or keep the weights open
                 while it is in use

Needs only the standard library and pydantic; imports nothing of the loader.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import ValidationError

from shared.contracts.audit import DeviceAudit
from shared.contracts.loader_socket import (
    MAX_LINE_BYTES,
    SOCKET_REPLY,
    SocketAttach,
    SocketAttached,
    SocketAudit,
    SocketAudited,
    SocketComplete,
    SocketError,
    SocketReply,
    SocketWatermark,
)
from shared.contracts.segment import HEADER_BYTES, LAYOUT_VERSION, MAGIC, SegmentHeader, SegmentIndex, SegmentTensor
from shared.contracts.stages import RankOf
from shared.errors import CheckpointInvalid, EngineFailed, Unreachable, from_body
from shared.mapping import map_extents
from shared.unix_sockets import short_address


def attach(
    path: Path | str,
    *,
    source: str | None = None,
    weights_id: str | None = None,
    background: bool = False,
    rank: RankOf | None = None,
    timeout: float | None = None,
) -> Weights:
    """Hold the weights of `source` or `weights_id` from the loader at socket `path`.

    The function returns when the index of the weights is written.

    Args:
        rank: Only what this rank of a tensor-parallel group needs, with `source`. Tensors of which
            it needs a range have a `cut` in the index.
        timeout: Longest silence of the loader in seconds, here and in every later wait.

    Raises:
        ThawError: The loader's refusal.
        Unreachable: No loader listens, or it went away.
    """
    connection = LoaderConnection(path, timeout)
    try:
        ask = SocketAttach(source=source, weights_id=weights_id, background=background, rank=rank)
        connection.send(ask.model_dump_json().encode() + b"\n")
        attached = connection.receive()
        if not isinstance(attached, SocketAttached):
            raise CheckpointInvalid(f"The loader answered {attached.kind!r} to an attach")
        return Weights(connection, attached)
    except BaseException:
        connection.close()
        raise


def audit_memory(path: Path | str, timeout: float) -> tuple[DeviceAudit, ...]:
    """Let the loader at socket `path` audit the device memory of its node.

    Args:
        timeout: Longest wait in seconds.

    Raises:
        ThawError: The loader's refusal; an earlier version knows no audit.
        Unreachable: No loader listens, it went away, or it did not answer in time.
    """
    connection = LoaderConnection(path, timeout)
    try:
        connection.send(SocketAudit().model_dump_json().encode() + b"\n")
        audited = connection.receive()
        if not isinstance(audited, SocketAudited):
            raise Unreachable(f"The loader answered {audited.kind!r} to an audit; restart it with this version")
        return audited.devices
    finally:
        connection.close()


class Weights:
    """Weights that this process holds.

    Attributes:
        buffer: The whole segment as a private, writable mapping: no other process sees writes to
            it.
    """

    def __init__(self, connection: LoaderConnection, attached: SocketAttached) -> None:
        self._connection = connection
        self.weights_id, self.directory = attached.weights_id, Path(attached.directory)
        self.total_bytes, self.loaded_bytes = attached.total_bytes, attached.loaded_bytes
        try:
            self.buffer: mmap.mmap = map_extents(attached.path, attached.extents, attached.total_bytes)
            self.header = SegmentHeader.model_validate_json(self.buffer[:HEADER_BYTES].rstrip(b"\0"))
            end = self.header.index_offset + self.header.index_bytes
            self.index = SegmentIndex.model_validate_json(self.buffer[self.header.index_offset : end])
        except (OSError, ValueError, ValidationError) as e:
            raise CheckpointInvalid(f"The segment of {attached.weights_id} cannot be read: {e}") from e
        if (self.header.magic, self.header.version) != (MAGIC, LAYOUT_VERSION):
            raise CheckpointInvalid(f"The segment has layout {self.header.magic} {self.header.version}, not {LAYOUT_VERSION}")

    @property
    def complete(self) -> bool:
        return self.loaded_bytes >= self.total_bytes

    def wait_until(self, watermark: int) -> None:
        """Return when every byte of the segment below `watermark` is loaded.

        Raises the load's error.
        """
        while self.loaded_bytes < min(watermark, self.total_bytes):
            message = self._connection.receive()
            if isinstance(message, SocketWatermark | SocketComplete):
                self.loaded_bytes = max(self.loaded_bytes, message.loaded_bytes)

    def wait(self) -> None:
        """Return when every byte is loaded."""
        self.wait_until(self.total_bytes)

    def tensors(self) -> Iterator[tuple[SegmentTensor, memoryview]]:
        """Yield every tensor in the order of its bytes, each as soon as it is complete."""
        view = memoryview(self.buffer)
        for tensor in sorted(self.index.tensors, key=lambda t: t.offset):
            self.wait_until(tensor.offset + tensor.nbytes)
            yield tensor, view[tensor.offset : tensor.offset + tensor.nbytes]

    def close(self) -> None:
        """Release the hold.

        Memory of live views stays mapped until they are gone: the loader does not reuse it before.
        """
        try:
            self.buffer.close()
        except BufferError:  # unmapped with the last view
            pass
        finally:
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


_RECEIVED_BYTES = 64 * 1024
_MOST_DESCRIPTORS = 253
"""The kernel's limit for one message (SCM_MAX_FD)."""


class LoaderConnection:
    """A connection to a loader's local socket: JSON lines both ways, and descriptors from it."""

    def __init__(self, path: Path | str, timeout: float | None) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout)
        try:
            with short_address(Path(path)) as address:
                self._socket.connect(address)
        except OSError as e:
            self._socket.close()
            raise Unreachable(f"No loader listens at {path}: {e}; start this node's loader") from e
        self._received = bytearray()
        self._descriptors: deque[int] = deque()

    def send(self, line: bytes) -> None:
        """Send a line. Raises `Unreachable`."""
        try:
            self._socket.sendall(line)
        except OSError as e:
            raise Unreachable(f"The loader at {self._path} went away: {e}") from e

    def receive(self) -> SocketReply:
        """Return the loader's next message.

        Raises its error, or `Unreachable` if it went away, was silent for too long, or sent a
        message that is not known here.
        """
        try:
            message = SOCKET_REPLY.validate_json(self._receive_line())
        except ValidationError as e:
            raise Unreachable(
                f"The loader at {self._path} sent a message that is not known here; restart both with one version"
            ) from e
        if isinstance(message, SocketError):
            raise from_body(message.error)
        return message

    def take_descriptors(self, count: int) -> list[int]:
        """Return descriptors of the latest message. The caller closes them.

        Raises:
            EngineFailed: The loader has sent fewer.
        """
        if count > len(self._descriptors):
            raise EngineFailed(f"The loader has sent {len(self._descriptors)} descriptors instead of {count}")
        return [self._descriptors.popleft() for _ in range(count)]

    def _receive_line(self) -> bytes:
        while (end := self._received.find(b"\n")) < 0:
            if len(self._received) > MAX_LINE_BYTES:
                raise Unreachable(f"The loader at {self._path} sent a line of more than {MAX_LINE_BYTES} bytes")
            try:
                data, descriptors, flags, _ = socket.recv_fds(
                    self._socket, _RECEIVED_BYTES, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                )
            except TimeoutError as e:
                raise Unreachable(f"The loader at {self._path} was silent for {self._socket.gettimeout()} s") from e
            except OSError as e:
                raise Unreachable(f"The loader at {self._path} went away: {e}") from e
            self._descriptors.extend(descriptors)
            if flags & socket.MSG_CTRUNC:
                raise EngineFailed("This process cannot take so many descriptors: raise its limit (ulimit -n)")
            if not data:
                raise Unreachable(f"The loader at {self._path} closed the connection; ask again when it is back")
            self._received += data
        line = bytes(self._received[: end + 1])
        del self._received[: end + 1]
        return line

    def interrupt(self) -> None:
        """End a `receive` in another thread: it raises `Unreachable`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection, and the descriptors that were not taken."""
        self._socket.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())
