"""Connect the stages of a group to a ring.

Each stage listens, publishes its address on the group's subject, and connects to the next stage
when it knows that one's address. A stage that receives a new address publishes its own again, so
that the order in which stages start does not matter; lost messages are repeated every second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable

from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from pydantic import ValidationError

from services.engine.generation.runner import RunnerLost
from services.engine.stages import handshake
from services.engine.stages.connections import Inbound, Outbound
from shared.contracts import subjects
from shared.contracts.engine import EngineStart
from shared.contracts.stages import GroupClosing, Stage, StageListening
from shared.errors import EngineFailed, UnsupportedParameter
from shared.messaging import Mesh
from shared.tasks import end

log = logging.getLogger(__name__)
_AGAIN_S = 1.0


Sockets = tuple[socket.socket, socket.socket]
"""The sockets from the previous stage and to the next one."""
_CLOSE_WITHIN_S = 2.0
_SEND_WITHIN_S = 60.0


def check_start(start: EngineStart, *, is_shared: bool) -> None:
    """Raise `UnsupportedParameter` if an engine cannot be a stage where it starts."""
    if is_shared:
        raise UnsupportedParameter("An executor's models have no stages. Unset the model's isolation, or its `stages`")
    if start.card.info.task != "generate":
        raise UnsupportedParameter("Only models that generate are divided into stages. Unset the model's `stages`")


def open_connections(
    sockets: Sockets,
    start: EngineStart,
    max_data_bytes: int,
    on_lost: Callable[[str], None],
    on_frame: Callable[[], None] | None = None,
) -> tuple[Inbound, Outbound]:
    """Start to receive from the stage before, and to send to the next one.

    Args:
        sockets: As from `connect_ring`.
        start: The engine's start; it is a stage.
        max_data_bytes: Most data of a received frame.
        on_lost: Called with the reason when a neighbour has ended, from any thread.
        on_frame: Called from another thread after each received frame, and when the stage before
            has ended: the caller then gets its frames before the error. None: `on_lost` is called
            at once.
    """
    stage = start.stage
    assert stage is not None
    before = f"stage {stage.previous_index}"
    if on_frame is None:
        inbound = Inbound(sockets[0], before, max_data_bytes, on_lost, lambda: None)
    else:
        inbound = Inbound(sockets[0], before, max_data_bytes, lambda reason: None, on_frame)
    return inbound, Outbound(sockets[1], f"stage {stage.next_index}", on_lost, _SEND_WITHIN_S)


def close_connections(ring: tuple[Inbound, Outbound], *, is_orderly: bool) -> None:
    """Close both connections.

    Args:
        is_orderly: The first stage stops: report to the later stages that this is no failure, and
            wait until the report has passed all of them.
    """
    inbound, outbound = ring
    if is_orderly and outbound.error is None:
        outbound.put_small(GroupClosing())
        with contextlib.suppress(RunnerLost):
            while not isinstance(inbound.get(_CLOSE_WITHIN_S).message, GroupClosing):
                pass
    outbound.flush_and_close(_CLOSE_WITHIN_S)
    inbound.close()


async def connect_ring(mesh: Mesh, stage: Stage, host: str) -> Sockets:
    """Return the connections from the stage before and to the next one.

    The caller bounds the time: other stages may start much later.

    Args:
        mesh: A connected mesh.
        stage: This stage.
        host: Address to listen on, which the stage before can reach.

    Raises:
        EngineFailed: `host` is not an address of this machine.
    """
    try:
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=16)
    except OSError as e:
        raise EngineFailed(f"A stage cannot listen on {host}: {e.strerror}. Set THAW_STAGE_HOST to an address of this node") from e
    listener.setblocking(False)
    shown = socket.gethostname() if host in ("0.0.0.0", "::") else host
    own = StageListening(group_id=stage.group_id, index=stage.index, host=shown, port=listener.getsockname()[1])
    meeting = _Meeting(mesh, stage, own)
    subscription = await mesh.nc.subscribe(subjects.stage_group(stage.group_id), cb=meeting.on_message)
    accepting = asyncio.create_task(handshake.accept(listener, stage), name="stage-accept")
    calling = asyncio.create_task(meeting.call_next(), name="stage-call")
    publishing = asyncio.create_task(meeting.publish_forever(), name="stage-address")
    try:
        before, after = await asyncio.gather(accepting, calling)
        return before, after
    except BaseException:
        for task in (accepting, calling):
            if task.done() and not task.cancelled() and task.exception() is None:
                task.result().close()
        raise
    finally:
        await end(accepting, calling, publishing)
        listener.close()
        with contextlib.suppress(NatsError):
            await subscription.unsubscribe()


class _Meeting:
    """The addresses of a group's stages."""

    def __init__(self, mesh: Mesh, stage: Stage, own: StageListening) -> None:
        self._mesh, self._stage, self._own = mesh, stage, own
        self._known: dict[int, StageListening] = {}
        self._changed = asyncio.Event()
        self._publish = asyncio.Event()

    async def on_message(self, message: Msg) -> None:
        try:
            found = StageListening.model_validate_json(message.data)
        except ValidationError as e:
            log.warning("dropped a malformed stage address", extra={"error": str(e)})
            return
        if found.group_id != self._stage.group_id or found.index == self._stage.index or self._known.get(found.index) == found:
            return
        self._known[found.index] = found
        self._changed.set()
        self._publish.set()

    async def publish_forever(self) -> None:
        """Publish this stage's address, again for each new one and every second."""
        while True:
            self._publish.clear()
            with contextlib.suppress(NatsError):
                await self._mesh.publish(subjects.stage_group(self._stage.group_id), self._own)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_AGAIN_S):
                    await self._publish.wait()

    async def call_next(self) -> socket.socket:
        """Connect to the next stage, at any address that is published for it."""
        while True:
            self._changed.clear()
            if (found := self._known.get(self._stage.next_index)) is not None:
                try:
                    return await handshake.call(found.host, found.port, self._stage)
                except (handshake.NotProven, OSError, TimeoutError) as e:
                    detail = {"group": self._stage.group_id, "stage": found.index, "host": found.host, "port": found.port}
                    log.warning("failed to connect to the next stage", extra={**detail, "error": repr(e)})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_AGAIN_S if found is not None else None):
                    await self._changed.wait()
