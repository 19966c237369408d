"""A pipeline group in one process: each stage has its layers, connections and computing thread."""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from pathlib import Path

import torch

from services.engine.generation.device_loop import DeviceLoop
from services.engine.generation.kv_bytes import layout_of
from services.engine.generation.kv_cache import SequenceKV, Slice
from services.engine.generation.runner import WARM_UP
from services.engine.model import checkpoint
from services.engine.model.bound_model import BoundModel
from services.engine.model.stage_model import bind_part
from services.engine.stages.connections import Inbound, Outbound
from services.engine.stages.first_stage import FirstStageRunner
from services.engine.stages.part import StagePart
from services.engine.stages.stage_kv import StageKv
from services.engine.stages.stage_receiving import StageReceiving
from services.engine.stages.steps import StageSteps
from shared.contracts.models import ModelCard
from shared.contracts.stages import split_layers

_WITHIN_S = 60.0
_MOST_BYTES = 64 << 20


class _Later:
    """A stage behind the first one."""

    def __init__(self, part: StagePart, sockets: tuple[socket.socket, socket.socket], kv_blocks: int, context: int) -> None:
        self.loop = DeviceLoop(1)
        inbound = Inbound(sockets[0], "before", _MOST_BYTES, lambda reason: None, self.loop.wake)
        outbound = Outbound(sockets[1], "next", lambda reason: None, _WITHIN_S)
        self.ring = inbound, outbound
        self.steps = StageSteps(part, inbound, outbound, kv_blocks, context, lambda: None)
        state = SequenceKV()
        part.compute([Slice(state, 0, len(WARM_UP))], (), torch.zeros(len(WARM_UP), part.hidden_size, dtype=part.dtype))
        self.layout = layout_of(state)

    def begin(self, *, sends_kv: bool, receives_kv: bool) -> None:
        """Start to compute; if it sends and receives keys and values, as the current version."""
        self.kv = StageKv(self.layout, "test", "127.0.0.1", self.steps.held, partial(self.loop.submit, "stage"))
        if sends_kv:
            self.steps.kv = self.kv
        self.receiving = StageReceiving(
            self.layout, "test", torch.device("cpu"), partial(self.loop.submit, "stage"), self.ring[1].put_small
        )
        if receives_kv:
            self.steps.receiving = self.receiving
        self.loop.serve("stage", self.steps)


class LocalGroup:
    """The stages of one model. Create it on the event loop.

    Attributes:
        runner: The first stage's, for a batcher.
        kv_blocks: That every stage can hold.
    """

    def __init__(
        self,
        bound: BoundModel,
        card: ModelCard,
        count: int,
        kv_blocks: int = 1 << 16,
        *,
        old_stages: tuple[int, ...] = (),
        sending_stages: tuple[int, ...] = (),
    ) -> None:
        """Start the stages.

        Args:
            bound: The whole model, whose segment they use.
            card: Of the model.
            count: Stages.
            kv_blocks: Of each stage.
            old_stages: Stages of a version that sends and receives no keys and values.
            sending_stages: Stages of a version that only sends them.
        """
        ranges = split_layers(bound.config.get_text_config().num_hidden_layers, count)
        kind, device = checkpoint.model_class(bound.config, card, Path(card.spec.source)), torch.device("cpu")
        dtype = checkpoint.torch_dtype(card)
        parts = [StagePart(bind_part(kind, bound.config, bound.segment, dtype, r), r, device) for r in ranges]
        pairs = [socket.socketpair() for _ in parts]  # from stage i to the next one
        self._sockets = [sock for pair in pairs for sock in pair]
        context = card.context_length
        self.later = [_Later(part, (pairs[i][1], pairs[i + 1][0]), kv_blocks, context) for i, part in enumerate(parts[1:])]
        for index, stage in enumerate(self.later, 1):
            stage.begin(sends_kv=index not in old_stages, receives_kv=index not in (*old_stages, *sending_stages))
        self._inbound = Inbound(pairs[-1][1], "last", _MOST_BYTES, lambda reason: None, lambda: None)
        self._outbound = Outbound(pairs[0][0], "next", lambda reason: None, _WITHIN_S)
        self.runner = FirstStageRunner(parts[0], count, context, _WITHIN_S)
        self.runner.connect(self._inbound, self._outbound)
        self.kv_blocks = self.runner.agree_on_capacity(kv_blocks)

    def sequences(self) -> list[int]:
        """Return how many sequences each later stage has."""
        return [stage.steps.sequences for stage in self.later]

    async def close(self) -> None:
        """End all stages."""
        for stage in self.later:
            stage.receiving.close()
        await asyncio.gather(*(stage.kv.close() for stage in self.later))
        for connection in (self._outbound, self._inbound, *(c for stage in self.later for c in stage.ring)):
            connection.close()
            for thread in (connection._thread,) if isinstance(connection, Inbound) else connection._threads:
                await asyncio.to_thread(thread.join, _WITHIN_S)
        for stage in self.later:
            stage.steps.stop()
            stage.loop.stop()
        for sock in self._sockets:
            sock.close()
