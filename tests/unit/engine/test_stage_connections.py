"""Connections between stages over real sockets: peers that are hostile, slow or gone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import socket
import struct
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from services.engine.domain.frames import encode_head
from services.engine.domain.stage_frames import GREETING, STAGES
from services.engine.generation.runner import RunnerLost
from services.engine.stages import handshake
from services.engine.stages.connections import QUEUED_FRAMES, Frame, Inbound, Outbound
from shared.contracts.stages import GroupCapacity, LayerRange, Stage, StageRelease, StageResult
from shared.engines.secret_proof import NONCE_BYTES

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

WITHIN_S = 60.0
SECRET = "s" * 43


def stage(index: int, secret: str = SECRET, group: str = "g") -> Stage:
    return Stage(group_id=group, index=index, count=2, layers=LayerRange(first=index, end=index + 1, total=2), secret=secret)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


class Losses(queue.Queue[str]):
    def reason(self) -> str:
        return self.get(timeout=WITHIN_S)


async def test_stages_with_one_secret_connect(listener: socket.socket) -> None:
    accepting = asyncio.create_task(handshake.accept(listener, stage(1)))
    called = await handshake.call("127.0.0.1", listener.getsockname()[1], stage(0))
    accepted = await accepting
    try:
        await asyncio.get_running_loop().sock_sendall(called, b"x")
        assert await asyncio.get_running_loop().sock_recv(accepted, 9) == b"x"
    finally:
        called.close()
        accepted.close()


@pytest.mark.parametrize("wrong", [stage(0, secret="t" * 43), stage(0, group="other"), stage(1)])
async def test_caller_without_the_secret_is_refused_and_the_right_one_still_connects(listener: socket.socket, wrong: Stage) -> None:
    accepting = asyncio.create_task(handshake.accept(listener, stage(1)))
    port = listener.getsockname()[1]
    with pytest.raises(handshake.NotProven):
        await handshake.call("127.0.0.1", port, wrong)
    assert not accepting.done()
    called = await handshake.call("127.0.0.1", port, stage(0))
    (await accepting).close()
    called.close()


async def test_silent_callers_do_not_keep_the_right_one_out(listener: socket.socket) -> None:
    accepting = asyncio.create_task(handshake.accept(listener, stage(1)))
    port = listener.getsockname()[1]
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(handshake.MAX_CALLERS - 1)]
    try:
        called = await handshake.call("127.0.0.1", port, stage(0))
        (await accepting).close()
        called.close()
    finally:
        for sock in silent:
            sock.close()


async def test_listener_that_does_not_know_the_secret_is_refused(listener: socket.socket) -> None:
    async def impostor() -> None:
        loop = asyncio.get_running_loop()
        sock, _ = await loop.sock_accept(listener)
        with sock:
            await loop.sock_sendall(sock, GREETING + os.urandom(NONCE_BYTES))
            await loop.sock_recv(sock, 64)
            await loop.sock_sendall(sock, os.urandom(32))

    task = asyncio.create_task(impostor())
    with pytest.raises(handshake.NotProven, match="secret"):
        await handshake.call("127.0.0.1", listener.getsockname()[1], stage(0))
    await task


def test_frames_arrive_in_order_with_their_data(pair: tuple[socket.socket, socket.socket]) -> None:
    losses = Losses()
    outbound = Outbound(pair[0], "next", losses.put, WITHIN_S)
    inbound = Inbound(pair[1], "before", 1 << 20, losses.put, lambda: None)
    sent = [os.urandom(n) for n in (1, 100_000, 64)]
    for number, data in enumerate(sent):
        outbound.put(Frame(StageResult(number=number), data))
    outbound.put_small(GroupCapacity(kv_blocks=4))
    frames = [inbound.get(WITHIN_S) for _ in range(4)]
    assert [bytes(f.data) for f in frames[:3]] == sent
    assert frames[3].message == GroupCapacity(kv_blocks=4)
    outbound.flush_and_close(WITHIN_S)
    assert "ended" in losses.reason()
    inbound.close()


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "does not carry"),
        (struct.pack(">2sBBII", b"TS", 1, 0, 20, 2**31), "out of bounds"),
        (encode_head(STAGES, StageResult(number=0), 10) + b"12345", "within a frame"),
        (encode_head(STAGES, StageResult(number=0), 10)[:7], "within a frame"),
        (struct.pack(">2sBBII", b"TS", 1, 0, 2, 0) + b"{}", "invalid"),
        (b"", "has ended"),
    ],
)
def test_broken_frames_end_the_connection_with_a_reason(
    pair: tuple[socket.socket, socket.socket], sent: bytes, reason: str
) -> None:
    losses = Losses()
    inbound = Inbound(pair[1], "stage 0", 1000, losses.put, lambda: None)
    pair[0].sendall(sent)
    pair[0].shutdown(socket.SHUT_WR)
    assert reason in losses.reason()
    with pytest.raises(RunnerLost, match=r"stage 0 is lost"):
        inbound.get(WITHIN_S)


def test_stage_that_reads_nothing_holds_the_sender_back_and_then_ends_the_group(pair: tuple[socket.socket, socket.socket]) -> None:
    losses = Losses()
    outbound = Outbound(pair[0], "stage 1", losses.put, 0.2)
    sent: list[int] = []

    def send_forever() -> None:
        while len(sent) < 1000:
            outbound.put(Frame(StageResult(number=0), bytes(1 << 20)))
            sent.append(1)

    with pytest.raises(RunnerLost, match="read nothing"):
        send_forever()
    assert len(sent) <= QUEUED_FRAMES + 1
    assert "read nothing" in losses.reason()


def test_slow_stage_stores_few_frames(pair: tuple[socket.socket, socket.socket]) -> None:
    losses = Losses()
    inbound = Inbound(pair[1], "stage 0", 1 << 20, losses.put, lambda: None)
    pair[0].settimeout(0.2)
    frame, sent = encode_head(STAGES, StageResult(number=0), 1 << 20) + bytes(1 << 20), 0
    with contextlib.suppress(TimeoutError):
        while sent < 100:
            pair[0].sendall(frame)
            sent += 1
    assert sent <= QUEUED_FRAMES + 3
    inbound.close()


def test_end_of_the_next_stage_is_noticed_while_nothing_is_sent(pair: tuple[socket.socket, socket.socket]) -> None:
    losses = Losses()
    outbound = Outbound(pair[0], "stage 1", losses.put, WITHIN_S)
    pair[1].close()
    assert "stage 1 is lost: the stage has ended" in losses.reason()
    with pytest.raises(RunnerLost):
        outbound.put(Frame(StageResult(number=0), b"x"))


class HookedSocket(socket.socket):
    """Calls `after_send` before a send returns."""

    after_send: Callable[[], None]

    def send(self, data: ReadableBuffer, flags: int = 0, /) -> int:
        sent = super().send(data, flags)
        self.after_send()
        return sent

    def sendall(self, data: ReadableBuffer, flags: int = 0, /) -> None:
        super().sendall(data, flags)
        self.after_send()


@pytest.mark.parametrize("size", [1, 100_000])
def test_connection_that_is_closed_during_a_send_ends_quietly(pair: tuple[socket.socket, socket.socket], size: int) -> None:
    losses = Losses()
    with HookedSocket(fileno=pair[0].detach()) as hooked:
        outbound = Outbound(hooked, "stage 1", losses.put, WITHIN_S)
        hooked.after_send = outbound.close
        outbound.put(Frame(StageResult(number=0), bytes(size)))
        outbound.flush_and_close(WITHIN_S)
        for _ in range(2 * QUEUED_FRAMES):  # none waits for room
            with pytest.raises(RunnerLost, match="has closed the connection"):
                outbound.put(Frame(StageResult(number=0), b"x"))
    assert losses.empty()


def test_message_that_is_sent_during_a_send_follows_its_frame(pair: tuple[socket.socket, socket.socket]) -> None:
    """Garbage collection releases sequences at any time, also on the thread that sends."""
    inbound = Inbound(pair[1], "before", 1 << 20, Losses().put, lambda: None)
    with HookedSocket(fileno=pair[0].detach()) as hooked:
        outbound = Outbound(hooked, "next", Losses().put, WITHIN_S)
        inner = [StageRelease(sequences=(7,))]

        def release() -> None:
            if inner:
                outbound.put_small(inner.pop())

        hooked.after_send = release
        outbound.put(Frame(StageResult(number=0), b"x"))
        outbound.put(Frame(StageResult(number=1), b"y"))
        assert [inbound.get(WITHIN_S).message for _ in range(3)] == [
            StageResult(number=0),
            StageRelease(sequences=(7,)),
            StageResult(number=1),
        ]
        outbound.flush_and_close(WITHIN_S)
    inbound.close()


def test_frames_beyond_the_room_of_the_socket_arrive_whole_and_in_order(pair: tuple[socket.socket, socket.socket]) -> None:
    for end, option in zip(pair, (socket.SO_SNDBUF, socket.SO_RCVBUF), strict=True):
        end.setsockopt(socket.SOL_SOCKET, option, 4096)
    outbound = Outbound(pair[0], "next", Losses().put, WITHIN_S)
    sizes = [60_000, 1, 30_000, 70_000, 5]
    sent = [Frame(StageResult(number=n), os.urandom(size)) for n, size in enumerate(sizes)]
    for frame in sent:
        outbound.put(frame)
    outbound.put_small(StageRelease(sequences=(1,)))
    inbound = Inbound(pair[1], "before", 1 << 20, Losses().put, lambda: None)
    received = [inbound.get(WITHIN_S) for _ in range(len(sent) + 1)]
    assert [(f.message, bytes(f.data)) for f in received[:-1]] == [(f.message, f.data) for f in sent]
    assert received[-1].message == StageRelease(sequences=(1,))
    outbound.flush_and_close(WITHIN_S)
    inbound.close()


def test_no_frame_within_the_time_is_an_error(pair: tuple[socket.socket, socket.socket]) -> None:
    inbound = Inbound(pair[1], "stage 3", 10, Losses().put, lambda: None)
    with pytest.raises(RunnerLost, match=r"stage 3 has sent nothing"):
        inbound.get(0.01)
    inbound.close()
