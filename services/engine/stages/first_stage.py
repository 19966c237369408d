"""The first stage's runner: its own layers here, the others at the stages behind it.

The batcher above it plans, samples and counts as for a whole model. Rows name a sequence by a
number. When the batcher drops a sequence's state, the other stages free theirs too.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Sequence

import torch

from services.engine.domain.frames import ProtocolError
from services.engine.domain.micro_batches import split_rows
from services.engine.generation.kv_cache import SequenceKV, Slice
from services.engine.generation.kv_transfers import GroupOrder, Permission, PermittedSequence
from services.engine.generation.lora_layers import LoraAdapter
from services.engine.generation.runner import WARM_UP, Row, RunnerLost
from services.engine.stages.connections import Frame, Inbound, Outbound
from services.engine.stages.part import StagePart
from services.engine.stages.receipts import Receipts, StageReceipt
from services.engine.stages.tensors import from_bytes, to_bytes, tokens_to_bytes
from shared.contracts.kv_transfer import KvPart
from shared.contracts.stages import (
    GroupCapacity,
    KvEndReceive,
    KvPermit,
    KvReceive,
    StageFailed,
    StageRelease,
    StageResult,
    StageRow,
    StageStep,
)
from shared.errors import InvalidRequest, ThawError, UnsupportedParameter, from_body


class StagedSequence(SequenceKV):
    """A sequence of the group: this stage's keys and values, and its number in all stages."""

    def __init__(self, number: int, context: int) -> None:
        super().__init__(context)
        self.number = number


class FirstStageRunner:
    """Implements `Runner` over all stages of a group. Runs on the computing thread."""

    rewinds = True

    def __init__(self, part: StagePart, stages: int, context: int, result_within_s: float) -> None:
        """Create a runner without connections.

        Args:
            part: The first stage's layers.
            stages: Stages of the group.
            context: Most tokens of a sequence.
            result_within_s: Seconds after which a step without a result has failed for good.
        """
        self._part, self._stages, self._context, self._within_s = part, stages, context, result_within_s
        self._inbound: Inbound | None = None
        self._outbound: Outbound | None = None
        self._sends_kv = self._receives_kv = False
        self._receipts = Receipts()
        self._sequences, self._steps, self._orders = itertools.count(), itertools.count(), itertools.count()

    def connect(self, inbound: Inbound, outbound: Outbound) -> None:
        """Use these connections: from the last stage, and to the second."""
        self._inbound, self._outbound = inbound, outbound
        inbound.on_report = self._receipts.take

    def agree_on_capacity(self, kv_blocks: int) -> int:
        """Return the KV blocks that all stages can hold. Waits until all have their weights.

        Raises:
            RunnerLost: A stage has ended, or does not answer.
        """
        inbound, outbound = self._connections()
        outbound.put_small(GroupCapacity(kv_blocks=kv_blocks, sends_kv=True, receives_kv=True))
        message = inbound.get(float("inf")).message
        if not isinstance(message, GroupCapacity):
            raise RunnerLost(f"The last stage sent {message.kind!r} before the group was ready")
        self._sends_kv, self._receives_kv = message.sends_kv, message.receives_kv
        return message.kv_blocks

    def new_state(self) -> StagedSequence:
        state = StagedSequence(next(self._sequences), self._context)
        weakref.finalize(state, self._release, state.number).atexit = False
        return state

    def forget(self, adapter: LoraAdapter) -> None:
        """No adapter is ever used."""

    @property
    def device(self) -> torch.device:
        return self._part.device

    def warm_up(self) -> SequenceKV:
        """Compute a few tokens in this stage, and return their state."""
        state = SequenceKV(self._context)
        self._part.compute([Slice(state, 0, len(WARM_UP))], WARM_UP, None)
        return state

    def permit(self, permission: Permission, sequences: Sequence[PermittedSequence]) -> tuple[KvPart, ...]:
        """Let an engine read sequences of a request at the later stages, and return where.

        When it returns, every stage has the keys and values of all tokens that are computed.

        Raises:
            UnsupportedParameter: A stage does not send keys and values.
            RunnerLost: A stage has ended.
        """
        inbound, outbound = self._connections()
        if not self._sends_kv:
            raise UnsupportedParameter("A stage of this group has a version that sends no keys and values", param="kv")
        parts: tuple[KvPart, ...] = ()
        for each in sequences:
            assert isinstance(each.state, StagedSequence)
            asked = KvPermit(
                request_id=permission.request_id,
                ticket=permission.ticket,
                secret=permission.secret,
                cache_salt=permission.cache_salt,
                choice=each.choice,
                sequence=each.state.number,
                computed=each.computed,
            )
            outbound.put(Frame(asked, tokens_to_bytes(each.tokens)))
            passed = inbound.get(self._within_s).message
            if not isinstance(passed, KvPermit):
                raise RunnerLost(f"The last stage sent {passed.kind!r} instead of the permission to read")
            if passed.refused or len(passed.parts) != self._stages - 1:
                raise UnsupportedParameter(passed.refused or "Not every stage sends keys and values", param="kv")
            parts = passed.parts
        return parts

    def receive(self, state: SequenceKV, order: GroupOrder) -> StageReceipt:
        """Order the later stages to receive their layers of a sequence.

        Raises:
            UnsupportedParameter: A stage does not receive keys and values.
            RunnerLost: A stage has ended.
        """
        _, outbound = self._connections()
        if not self._receives_kv:
            raise UnsupportedParameter("A stage of this group has a version that receives no keys and values", param="kv")
        assert isinstance(state, StagedSequence)
        number = next(self._orders)
        ending = KvEndReceive(number=number, ticket=order.offer.ticket)
        receipt = StageReceipt(order, self._stages - 1, lambda: outbound.put_small(ending))
        asked = KvReceive(
            number=number,
            offer=order.offer,
            choice=order.choice,
            sequence=state.number,
            start=order.start,
            end=order.end,
            within_ms=None if order.within_s == math.inf else round(order.within_s * 1e3),
            stall_ms=max(1, round(order.stall_s * 1e3)),
        )
        self._receipts.add(number, receipt)
        outbound.put(Frame(asked, tokens_to_bytes(order.tokens[: order.end + 1])))
        return receipt

    def compute_own(self, rows: Sequence[Row]) -> torch.Tensor:
        """Compute this stage's layers, and return the hidden states of all new tokens."""
        slices = [Slice(row.state, row.start, len(row.tokens)) for row in rows]
        return self._part.compute(slices, [token for row in rows for token in row.tokens], None)

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        """Return the logits after each row's last token: [rows, vocabulary], float32.

        Raises:
            RunnerLost: The group cannot compute any more.
            ThawError: The step failed in some stage; the group continues.
        """
        if any(row.adapter is not None for row in rows):
            raise InvalidRequest("A model in stages takes no LoRA adapters", param="model")
        inbound, outbound = self._connections()
        sent: list[tuple[int, int]] = []
        error: Exception | None = None
        for first, end in split_rows([len(row.tokens) for row in rows], self._stages):
            try:
                hidden = self.compute_own(rows[first:end])
            except Exception as e:  # results of the micro-batches before must be taken in any case
                error = e
                break
            number = next(self._steps)
            parts = tuple(StageRow(sequence=r.state.number, start=r.start, count=len(r.tokens)) for r in rows[first:end])
            outbound.put(Frame(StageStep(number=number, rows=parts), to_bytes(hidden)))
            sent.append((number, end - first))
        positions = [row.start + len(row.tokens) for row in rows]
        if len(sent) == 1 and max(positions) < self._context:
            self._part.prepare(positions)  # of the next step, while other stages compute this one
        results: list[torch.Tensor] = []
        for number, count in sent:
            try:
                results.append(self._take_result(inbound, number, count))
            except ThawError as e:
                error = error or e
        if error is not None:
            raise error
        return torch.cat(results) if len(results) > 1 else results[0]

    def _take_result(self, inbound: Inbound, number: int, rows: int) -> torch.Tensor:
        frame = inbound.get(self._within_s)
        match frame.message:
            case StageResult(number=found) if found == number:
                try:
                    return from_bytes(frame, rows, self._part.vocabulary, self._part.dtype).float()
                except ProtocolError as e:
                    raise RunnerLost(str(e)) from e
            case StageFailed(number=found, error=error) if found == number:
                raise from_body(error)
        raise RunnerLost(f"The last stage sent {frame.message.kind!r} instead of the result of step {number}")

    def _connections(self) -> tuple[Inbound, Outbound]:
        if self._inbound is None or self._outbound is None:
            raise RunnerLost("The stages are not connected yet")
        return self._inbound, self._outbound

    def _release(self, number: int) -> None:
        if self._outbound is not None:
            self._outbound.put_small(StageRelease(sequences=(number,)))
