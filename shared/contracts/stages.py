"""Stages of a pipeline group: their layers, and the messages between them.

A group serves one model with several engines, its stages. Stage 0 has the embeddings and the first
layers, schedules all sequences and answers requests. The last stage has the last layers, the final
norm and the head. Stages form a ring: each sends to the next one, and the last one to stage 0.

Each stage listens on a TCP port, and publishes `StageListening` on the group's subject until its
ring is closed. Bulk data never travels on NATS. On a connection, the stage before sends

    `GroupCapacity`  once: the KV blocks that every stage up to here can hold. It returns to stage 0
                     when all stages have their weights: the group is ready then.
    `StageStep`      with hidden states: new tokens of some sequences.
    `StageResult`    from the last stage, with the logits after each row's last token.
    `StageFailed`    instead of a result: the step failed in some stage.
    `StageRelease`   sequences whose keys and values are no longer needed.
    `KvPermit`       another engine may read a sequence's keys and values. It returns to stage 0
                     with the addresses of all stages.
    `KvReceive`      each stage receives the keys and values of its layers from another engine.
    `KvReceived`     a stage has received what it could. It is passed on to stage 0.
    `KvEndReceive`   the transfer is over: its connections are closed.
    `GroupClosing`   the first stage has stopped; each stage stops too.

`services/engine/domain/stage_frames.py` has the format of a frame, and ADR 0067 the reasons.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, TypeAdapter, model_validator

from shared.contracts.base import ErrorBody, Frozen, Message
from shared.contracts.kv_transfer import TICKET, KvOffer, KvPart

MAX_STAGES = 8
MAX_RANKS = 64
"""Ranks of a tensor-parallel group."""
STAGEABLE = frozenset(
    {"cohere", "gemma", "gpt2", "gpt_neox", "granite", "llama", "mistral", "mixtral", "olmo2", "opt", "phi", "phi3", "qwen2"}
    | {"qwen3", "qwen3_moe", "smollm3", "starcoder2"}
)
"""Model types whose stages are tested against the whole model
(tests/integration/engine/test_stage_families.py).
"""


class LayerRange(Frozen):
    """Layers [first, end) of a model with `total` layers.

    The embeddings belong to the first layer, the final norm and the head to the last one.
    """

    first: int = Field(ge=0)
    end: int = Field(gt=0)
    total: int = Field(gt=0)

    @model_validator(mode="after")
    def _is_range(self) -> Self:
        if not self.first < self.end <= self.total:
            raise ValueError("give first < end <= total")
        return self

    @property
    def is_first(self) -> bool:
        """True if it has the embeddings."""
        return self.first == 0

    @property
    def is_last(self) -> bool:
        """True if it has the final norm and the head."""
        return self.end == self.total

    @property
    def count(self) -> int:
        return self.end - self.first


def split_layers(total: int, stages: int) -> tuple[LayerRange, ...]:
    """Divide `total` layers among `stages`, as evenly as possible.

    Earlier stages get the additional layers, because the last one has the head.

    Raises:
        ValueError: There are fewer layers than stages, or no stage.
    """
    if not 1 <= stages <= total:
        raise ValueError(f"{total} layers cannot be divided among {stages} stages")
    sizes = [total // stages + (i < total % stages) for i in range(stages)]
    ends = [sum(sizes[: i + 1]) for i in range(stages)]
    return tuple(LayerRange(first=end - size, end=end, total=total) for size, end in zip(sizes, ends, strict=True))


class RankOf(Frozen):
    """A rank of a tensor-parallel group: number `index` of `count`.

    It has `1 / count` of each tensor that the model's architecture divides, and all other tensors
    whole (ADR 0102).
    """

    index: int = Field(ge=0)
    count: int = Field(ge=2, le=MAX_RANKS)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.index >= self.count:
            raise ValueError("give index < count")
        return self


class DevicePart(Frozen):
    """The part of a model's weights that one device of an instance gets.

    Attributes:
        holder: Holder of the part at its loader (`stage_holder`).
        device: As of `PrepareWeights`; None: the part stays in host memory.
        layers: Of a pipeline stage; None: all layers.
        rank: Of a tensor-parallel group; None: whole tensors.
    """

    holder: str
    device: str | None = None
    layers: LayerRange | None = None
    rank: RankOf | None = None


def part_id(weights_id: str, layers: LayerRange | None, rank: RankOf | None = None) -> str:
    """Return the id of a part of some weights. None of both: all of them."""
    found = weights_id if layers is None else f"{weights_id}.layers-{layers.first}-{layers.end}-{layers.total}"
    return found if rank is None else f"{found}.rank-{rank.index}-{rank.count}"


def weights_of(part: str) -> str:
    """Return the id of the weights of which this is a part; of all of them, the same."""
    return part.partition(".layers-")[0].partition(".rank-")[0]


def stage_instance(instance_id: str, index: int) -> str:
    """Return the id under which a stage's process reports itself and is addressed."""
    return instance_id if index == 0 else f"s{index}-{instance_id}"


def stage_holder(instance_id: str, index: int) -> str:
    """Return the holder of a stage's weights at its loader.

    As of a LoRA adapter, the hold ends with the hold of `instance_id` at the latest.
    """
    return instance_id if index == 0 else f"{instance_id}+s{index}"


def whole_instance(instance_id: str) -> str:
    """Return the id of the instance that a stage's process belongs to."""
    found = re.fullmatch(r"s\d+-(.+)", instance_id)
    return instance_id if found is None else found[1]


class Stage(Frozen):
    """The place of an engine in its group.

    A rank of vLLM on several nodes is a stage too: its host connects to that of the first one (ADR
    0090), and `layers` is only its share of the memory.

    Attributes:
        group_id: Common to the stages; another one after each start.
        secret: Known to the stages only: each proves on every connection that it has it.
        holder: Holder of the stage's weights at its loader; None: the engine's instance id.
        first: Instance id of the first stage, if the stages are started one by one; else None.
    """

    group_id: str = Field(min_length=1)
    index: int = Field(ge=0)
    count: int = Field(ge=2, le=MAX_STAGES)
    layers: LayerRange
    secret: str = Field(min_length=32, repr=False)
    holder: str | None = None
    first: str | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.index >= self.count:
            raise ValueError("give index < count")
        if (self.layers.is_first, self.layers.is_last) != (self.index == 0, self.index == self.count - 1):
            raise ValueError("the first stage alone has the first layer, and the last stage alone the last one")
        return self

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    @property
    def next_index(self) -> int:
        return (self.index + 1) % self.count

    @property
    def previous_index(self) -> int:
        return (self.index - 1) % self.count


class GroupPlace(Frozen):
    """The place of an instance in a group whose stages are started one by one.

    Attributes:
        first: Instance id of the first stage.
    """

    first: str
    index: int = Field(ge=0)
    count: int = Field(ge=2, le=MAX_STAGES)


class StageListening(Message):
    """A stage accepts the connection of the stage before it at `host`:`port`."""

    kind: Literal["stage_listening"] = "stage_listening"
    group_id: str
    index: int = Field(ge=0)
    host: str
    port: int = Field(gt=0, lt=65536)


class StageRow(Frozen):
    """`count` new tokens of a sequence, of which `start` tokens are computed."""

    sequence: int = Field(ge=0)
    start: int = Field(ge=0)
    count: int = Field(gt=0)


class GroupCapacity(Message):
    kind: Literal["capacity"] = "capacity"
    kv_blocks: int = Field(ge=0)
    sends_kv: bool = Field(default=False, description="Every stage up to here understands `KvPermit`.")
    receives_kv: bool = Field(default=False, description="Every stage up to here understands `KvReceive`.")


class StageStep(Message):
    """Hidden states follow: [tokens of all rows, hidden size], in the model's type."""

    kind: Literal["step"] = "step"
    number: int = Field(ge=0)
    rows: tuple[StageRow, ...] = Field(min_length=1)


class StageResult(Message):
    """Logits follow: [rows, vocabulary], in the model's type."""

    kind: Literal["result"] = "result"
    number: int = Field(ge=0)


class StageFailed(Message):
    kind: Literal["failed"] = "failed"
    number: int = Field(ge=0)
    error: ErrorBody


class StageRelease(Message):
    kind: Literal["release"] = "release"
    sequences: tuple[int, ...]


class KvPermit(Message):
    """The tokens of the sequence follow, as uint32 in the byte order of the host.

    The last stage returns the message without them.

    Attributes:
        ticket: Of the request; `secret` and `cache_salt` as in `KvOffer`.
        choice: Of the sequence in the request.
        computed: Tokens whose keys and values every stage has when it gets the message.
        parts: The stages that have had the message, from the second one on.
        refused: Why a stage cannot be read; empty: none has refused.
    """

    kind: Literal["kv_permit"] = "kv_permit"
    request_id: str
    ticket: str = Field(pattern=TICKET)
    secret: str = Field(min_length=32, repr=False)
    cache_salt: str = ""
    choice: int = Field(ge=0)
    sequence: int = Field(ge=0)
    computed: int = Field(ge=0)
    parts: tuple[KvPart, ...] = Field(default=(), max_length=MAX_STAGES)
    refused: str = ""


class KvReceive(Message):
    """The tokens of the sequence follow, as those of `KvPermit`. Each stage answers `KvReceived`.

    A stage stores what it receives until it gets a step of the sequence, its release or another
    order for it.

    Attributes:
        number: Of the order, in this group.
        choice: Of the sequence in the source's request.
        start: Tokens whose keys and values every stage has already.
        end: Tokens whose keys and values are wanted.
        within_ms: Milliseconds after which no further range is asked for; None: no limit.
        stall_ms: Milliseconds that the source may send nothing.
    """

    kind: Literal["kv_receive"] = "kv_receive"
    number: int = Field(ge=0)
    offer: KvOffer
    choice: int = Field(ge=0)
    sequence: int = Field(ge=0)
    start: int = Field(ge=0)
    end: int = Field(gt=0)
    within_ms: int | None = Field(default=None, ge=0)
    stall_ms: int = Field(gt=0)


class KvReceived(Message):
    """A stage has the keys and values of the first `end` tokens.

    Attributes:
        number: Of the order.
        nbytes: Received for it.
        reason: Why the transfer ended early; empty: it did not.
    """

    kind: Literal["kv_received"] = "kv_received"
    number: int = Field(ge=0)
    end: int = Field(ge=0)
    nbytes: int = Field(default=0, ge=0)
    reason: str = ""


class KvEndReceive(Message):
    """Close the connections of an order's source. A stage that still receives reports at once."""

    kind: Literal["kv_end_receive"] = "kv_end_receive"
    number: int = Field(ge=0)
    ticket: str = Field(pattern=TICKET)


class GroupClosing(Message):
    kind: Literal["closing"] = "closing"


StageMessage = Annotated[
    GroupCapacity
    | StageStep
    | StageResult
    | StageFailed
    | StageRelease
    | KvPermit
    | KvReceive
    | KvReceived
    | KvEndReceive
    | GroupClosing,
    Field(discriminator="kind"),
]
STAGE_MESSAGE: TypeAdapter[StageMessage] = TypeAdapter(StageMessage)
