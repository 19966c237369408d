"""Process the frames that a stage behind the first one receives."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from services.engine.domain.fair_slots import Flow
from services.engine.domain.frames import ProtocolError
from services.engine.generation.flow_work import BACKGROUND, FlowWork
from services.engine.generation.kv_cache import SequenceKV, Slice
from services.engine.generation.runner import RunnerLost, check_device
from services.engine.stages.connections import Frame, Inbound, Outbound
from services.engine.stages.part import StagePart
from services.engine.stages.stage_kv import StageKv
from services.engine.stages.stage_receiving import StageReceiving
from services.engine.stages.tensors import from_bytes, to_bytes, tokens_from_bytes
from shared.contracts.stages import (
    GroupCapacity,
    GroupClosing,
    KvEndReceive,
    KvPermit,
    KvReceive,
    KvReceived,
    StageFailed,
    StageMessage,
    StageRelease,
    StageResult,
    StageStep,
)
from shared.errors import EngineFailed, ThawError

log = logging.getLogger(__name__)


class StageSteps:
    """Computes steps in the order of their arrival. Runs on the computing thread (`Steps`)."""

    def __init__(
        self, part: StagePart, inbound: Inbound, outbound: Outbound, kv_blocks: int, context: int, on_closing: Callable[[], None]
    ) -> None:
        """Create it.

        Args:
            part: This stage's layers.
            inbound: From the stage before.
            outbound: To the next stage, or back to the first.
            kv_blocks: KV blocks that this stage can hold.
            context: Most tokens of a sequence.
            on_closing: Called on the computing thread when the first stage has stopped.
        """
        self._on_closing = on_closing
        self.on_command: Callable[[], None] = lambda: None
        self.required_requests: float | None = None
        self._part, self._inbound, self._outbound = part, inbound, outbound
        self._kv_blocks, self._context = kv_blocks, context
        self._sequences: dict[int, SequenceKV] = {}
        self.kv: StageKv | None = None
        """Sends keys and values to other engines; None: nothing does. Set before the first step."""
        self.receiving: StageReceiving | None = None
        """Receives those of other engines; None: nothing does. Set before the first step."""
        self._is_stopped = self._is_closing = False

    @property
    def held(self) -> Mapping[int, SequenceKV]:
        """Keys and values of the stage's sequences by number, for the computing thread."""
        return self._sequences

    @property
    def sequences(self) -> int:
        """Sequences whose keys and values the stage has now."""
        return len(self._sequences)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that the stage has now."""
        return sum(s.nbytes for s in tuple(self._sequences.values()))

    def stop(self) -> None:
        """End after the step in progress. May be called from any thread."""
        self._is_stopped = True
        self.on_command()

    def next_step_at(self, now: float) -> float:
        if self._is_stopped:
            return now
        if self._is_closing:  # a lost connection is no failure any more
            return float("inf")
        return now if self._inbound.has_frame or self._inbound.error is not None else float("inf")

    def has_commands(self) -> bool:
        return self._is_stopped

    def flow_work(self, now: float) -> Mapping[Flow, FlowWork]:
        """Return one entry: frames do not say whose requests they are of."""
        return BACKGROUND

    def step(self, *, is_contended: bool = False, computes: bool = True) -> bool:
        """Handle one frame.

        Args:
            is_contended: Ignored: the first stage divides prompts.
            computes: False: only look whether it is stopped.

        Raises:
            RunnerLost: The stage before has ended or broke the protocol, or this GPU is lost.
        """
        if self._is_stopped:
            return False
        if not computes:
            return True
        frame = self._inbound.get(0)
        match frame.message:
            case GroupCapacity() as capacity:
                self._outbound.put_small(self._limit(capacity))
            case KvPermit() as permit:
                self._permit(permit, frame)
            case KvReceive() as asked:
                self._receive(asked, frame)
            case KvReceived():
                self._outbound.put_small(frame.message)
            case KvEndReceive(number=number, ticket=ticket):
                if self.receiving is not None:
                    self.receiving.stop(number, ticket)
                self._relay(frame.message)
            case StageStep() as step:
                self._outbound.put(self._compute(step, frame))
                self._prepare(step)
            case StageRelease(sequences=numbers):
                for number in numbers:
                    self._sequences.pop(number, None)
                    if self.kv is not None:
                        self.kv.release(number)
                    if self.receiving is not None:
                        self.receiving.release(number)
                self._relay(frame.message)
            case StageFailed():
                self._outbound.put_small(frame.message)
            case GroupClosing():
                self._is_closing = True
                self._on_closing()  # first: the next stage ends when it has the message
                self._outbound.put_small(frame.message)
            case StageResult():
                raise RunnerLost("The stage before sent a result, which only the last stage does")
        return True

    def _relay(self, message: StageMessage) -> None:
        if not self._part.layers.is_last:
            self._outbound.put_small(message)

    def _limit(self, capacity: GroupCapacity) -> GroupCapacity:
        """Return what all stages up to this one can do."""
        return GroupCapacity(
            kv_blocks=min(capacity.kv_blocks, self._kv_blocks),
            sends_kv=capacity.sends_kv and self.kv is not None,
            receives_kv=capacity.receives_kv and self.receiving is not None,
        )

    def _receive(self, asked: KvReceive, frame: Frame) -> None:
        """Begin to receive a sequence, and pass the order on."""
        try:
            tokens = tokens_from_bytes(frame.data)
        except ProtocolError as e:
            raise RunnerLost(str(e)) from e
        if not self._part.layers.is_last:
            self._outbound.put(Frame(asked, frame.data))
        if self.receiving is None:
            raise RunnerLost("The first stage has ordered keys and values, which this stage does not receive")
        try:
            self.receiving.begin(asked, tokens, self._find(asked.sequence, asked.start))
        except ThawError as e:
            self._outbound.put_small(KvReceived(number=asked.number, end=asked.start, reason=e.message))

    def _permit(self, permit: KvPermit, frame: Frame) -> None:
        """Let another engine read a sequence. The last stage returns the message without tokens."""
        try:
            tokens = tokens_from_bytes(frame.data)
        except ProtocolError as e:
            raise RunnerLost(str(e)) from e
        if self.kv is not None and not permit.refused:
            permit = self.kv.permit(permit, tokens)
        self._outbound.put(Frame(permit, b"" if self._part.layers.is_last else frame.data))

    def _compute(self, step: StageStep, frame: Frame) -> Frame:
        part = self._part
        tokens = sum(row.count for row in step.rows)
        try:
            hidden = from_bytes(frame, tokens, part.hidden_size, part.dtype)
        except ProtocolError as e:
            raise RunnerLost(str(e)) from e
        if self.receiving is not None:
            for row in step.rows:
                self.receiving.end(row.sequence)
        try:
            slices = [Slice(self._find(row.sequence, row.start), row.start, row.count) for row in step.rows]
            output = to_bytes(part.compute(slices, (), hidden))
        except Exception as e:  # a process boundary: the step fails, the group continues
            log.exception("a step failed")
            check_device(e, part.device)
            failed = EngineFailed(f"A stage failed while computing: {type(e).__name__}: {str(e)[:300]}")
            error = e if isinstance(e, ThawError) else failed
            return Frame(StageFailed(number=step.number, error=error.body()))
        if part.layers.is_last:
            return Frame(StageResult(number=step.number), output)
        return Frame(step, output)

    def _prepare(self, step: StageStep) -> None:
        """Prepare the step after this one while other stages compute, unless a frame waits here."""
        positions = [row.start + row.count for row in step.rows]
        if max(positions) < self._context and not self._inbound.has_frame:
            self._part.prepare(positions)

    def _find(self, number: int, start: int) -> SequenceKV:
        known = self._sequences.get(number)
        if known is None:
            if start:
                raise EngineFailed(f"This stage does not have the first {start} tokens of sequence {number}")
            known = self._sequences[number] = SequenceKV(self._context)
        return known
