"""Between schedulers, nodeagents, engines and the loader of a node.

Weights lie in one shared-memory segment per model revision and node, held by every instance that
asked for them; after the last release they stay in memory for the next one as long as the DRAM
budget has room, or are evicted. The layout of a segment is shared/contracts/segment.py's.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from shared.contracts.audit import AuditMemory
from shared.contracts.base import Deadline, ErrorBody, Frozen, Message, Request
from shared.contracts.model_info import ModelInfo
from shared.contracts.models import ModelCard, ModelSpec
from shared.contracts.phases import PhaseSpan
from shared.contracts.segment import ArenaHandle, Extent
from shared.contracts.stages import DevicePart, LayerRange, RankOf

PREFETCH_HOLDER = "prefetch:"
"""Prefix of the names of holders that are prefetches."""


def adapter_holder(instance_id: str, number: int) -> str:
    """Name the holder of an instance's `number`th LoRA adapter.

    The hold ends with the hold of `instance_id` at the latest.

    Args:
        number: Counts up from 1; adapters that load while the engine starts count down from 0.
    """
    return f"{instance_id}+{number}"


def instance_of(holder: str) -> str:
    """The instance that `holder` is, or that its adapter is loaded in."""
    return holder.partition("+")[0]


class InspectModel(Request):
    """Inspect a model without reading its weights.

    The loader checks that every shard, the tokenizer and the index exist.
    """

    deadline_ms: Deadline = 120_000
    kind: Literal["inspect"] = "inspect"
    spec: ModelSpec


class Inspected(Message):
    kind: Literal["inspected"] = "inspected"
    info: ModelInfo


class PrepareWeights(Request):
    """Start fetching and loading now for `instance_id`; answered at once with `Done`.

    Repeating it is harmless. With `parts` it names a device set and what each device gets. The
    parts load at the same time, each to its device over the device's own link. `device`, `layers`
    and `rank` are then those of the first part, for loaders of the previous version.
    """

    kind: Literal["prepare"] = "prepare"
    token: int
    instance_id: str
    card: ModelCard
    traceparent: str | None = None
    background: bool = Field(default=False, description="No request waits for it: other loads go first.")
    device: str | None = Field(
        default=None, description="A GPU (cuda:0), or a cpu device with memory of its own, that the weights are brought to."
    )
    layers: LayerRange | None = Field(default=None, description="Only what a pipeline stage with these layers needs; None: all.")
    rank: RankOf | None = Field(default=None, description="Only what this rank of a tensor-parallel group needs; None: all.")
    parts: tuple[DevicePart, ...] = Field(default=(), description="The devices of an instance on several; none: it has one.")


class AttachWeights(Request):
    """Attach weights, and start their load if none is running.

    The reply follows when the segment's index (`until="index"`) or every byte (`until="complete"`)
    is in memory.
    """

    deadline_ms: Deadline = 600_000
    kind: Literal["attach"] = "attach"
    instance_id: str
    card: ModelCard
    until: Literal["index", "complete"]
    traceparent: str | None = None
    device: str | None = Field(default=None, description="As of `PrepareWeights`; complete: every byte is there too.")
    layers: LayerRange | None = Field(default=None, description="As of `PrepareWeights`.")
    rank: RankOf | None = Field(default=None, description="As of `PrepareWeights`.")


class WeightsAttached(Message):
    """`phases` (fetch, load) are relative to this message's sending.

    Files of the model (config, tokenizer) lie in `directory`.
    """

    kind: Literal["attached"] = "attached"
    weights_id: str
    segment: str = Field(description="Name under /dev/shm (POSIX shared memory): the pool's file, or one of the segment's own.")
    extents: tuple[Extent, ...] = Field(default=(), description="Where the segment lies in that file, in order; none: all of it.")
    directory: str
    total_bytes: int
    loaded_bytes: int = Field(description="The watermark: every byte of the segment below it is there.")
    phases: tuple[PhaseSpan, ...] = ()
    handle: ArenaHandle | None = Field(
        default=None, description="The weights in the memory of the device that was asked for; None: copy them there."
    )
    device_error: ErrorBody | None = Field(
        default=None,
        description="Why the device does not have them, where the engine cannot take them from host memory; it fails with this.",
    )
    boot_id: str = Field(default="", description="Of the loader. What it has on a GPU ends with it.")


class ReleaseWeights(Request):
    """Release the weights and the LoRA adapters that `instance_id` holds.

    For an adapter's holder, only that adapter is released. A load without other waiters is
    cancelled. Unknown holders are ignored.
    """

    kind: Literal["release"] = "release"
    instance_id: str


class WeightsReleased(Message):
    kind: Literal["released"] = "released"
    freed_bytes: int = Field(description="Bytes of shared memory proved gone (0 while others hold the segment).")
    cached_bytes: int = Field(default=0, description="Bytes that no instance holds any more and the DRAM budget is charged with.")
    device_bytes: int = Field(default=0, description="Of a device's memory, given back with it.")


class PrefetchWeights(Request):
    """Prefetch weights into a tier before a request needs them.

    The reply is an immediate `Done`; `LoaderStatus.prefetches` has the outcome. All other loads
    precede a prefetch. The loader drops a prefetch as soon as a request waits for other weights, or
    if the node has no room. The request is idempotent: it replaces an earlier one of the same model
    and tier, whose load continues.
    """

    kind: Literal["prefetch"] = "prefetch"
    token: int = Field(description="Of the leader; an older epoch than one seen is refused.")
    card: ModelCard
    tier: Literal["dram", "ssd"] = Field(default="dram", description="ssd: of what is remote; it is not kept in memory.")


class CancelPrefetch(Request):
    """Drop a prefetch that is not over, if there is one of these weights.

    The load continues for instances, and for other prefetches of the same weights.
    """

    kind: Literal["cancel_prefetch"] = "cancel_prefetch"
    weights_id: str
    token: int | None = Field(default=None, description="Of its `PrefetchWeights`; None: all prefetches of the weights.")


class ExpectedModel(Frozen):
    """The likelihood that a model's weights are loaded soon."""

    weights_id: str
    source: str = Field(default="", description="As in `ModelInfo.source`: a loader reads the hashes in the index of a local one.")
    likelihood: float = Field(ge=0, le=1, description="Of a request within `ExpectModels.horizon_s`.")
    latency_sensitivity: float = Field(default=1.0, ge=0, description="As in `ModelSpec.latency_sensitivity`.")


class ExpectModels(Request):
    """Notify a loader of the models that are likely to be loaded, likeliest first.

    It prices the weights on its devices by that when pages are needed (Tangram Eq. 2). The leader
    repeats it every `EXPECT_EVERY_S`; after `valid_s` all models count as equally likely again.
    """

    kind: Literal["expect"] = "expect"
    token: int = Field(description="Of the leader; an older epoch than one seen is refused.")
    horizon_s: float = Field(gt=0)
    valid_s: float = Field(default=60.0, gt=0)
    models: tuple[ExpectedModel, ...] = ()


EXPECT_EVERY_S = 10.0


ModelFile = Literal[
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json"
]


class ReadModelFile(Request):
    """Read a part of a small file that a gateway counts tokens with.

    The request fails with `NotFound` if this node does not have the file.
    """

    kind: Literal["read_model_file"] = "read_model_file"
    source: str = Field(description="As in `ModelInfo.source`.")
    name: ModelFile
    offset: int = Field(default=0, ge=0)
    limit: int = Field(default=256 * 1024, gt=0, description="Bytes at most.")


class ModelFilePart(Message):
    kind: Literal["model_file_part"] = "model_file_part"
    data: str = Field(description="Base64.")
    total: int = Field(description="Bytes of the whole file.")


class FetchModelFiles(Request):
    """Have all files of a model on the node's disk, for an engine that reads them itself.

    The reply follows when they are there. The disk cache may evict a copy of a remote model
    afterwards.
    """

    deadline_ms: Deadline = 600_000
    kind: Literal["fetch_files"] = "fetch_files"
    card: ModelCard


class ModelFilesFetched(Message):
    kind: Literal["files_fetched"] = "files_fetched"
    directory: str


LoaderCommand = Annotated[
    InspectModel
    | PrepareWeights
    | AttachWeights
    | ReleaseWeights
    | PrefetchWeights
    | CancelPrefetch
    | AuditMemory
    | ExpectModels
    | FetchModelFiles,
    Field(discriminator="kind"),
]
LOADER_COMMAND: TypeAdapter[LoaderCommand] = TypeAdapter(LoaderCommand)


class SegmentStatus(Frozen):
    weights_id: str
    model: str
    segment: str
    total_bytes: int
    loaded_bytes: int
    fetched_bytes: int = Field(
        default=0,
        description="Bytes of a remote source's model that have arrived so far, those from this node's disk cache included. A load of only "
        "what a device lacks counts as all bytes once it has ended.",
    )
    holders: tuple[str, ...]
    error: ErrorBody | None = None
    on_devices: dict[str, int] = Field(default_factory=dict, description="Bytes of it on each device that it is brought to.")
    is_partial: bool = Field(
        default=False, description="Host memory has only the bytes that a device lacked; no other load uses them."
    )


class SegmentProgress(Frozen):
    weights_id: str
    total_bytes: int
    loaded_bytes: int


class LoaderProgress(Message):
    """The part of a `LoaderStatus` that engines use.

    A receiver reads a status as this, so that its cost does not depend on all the models that the
    loader knows.
    """

    boot_id: str
    stopping: bool = False
    segments: tuple[SegmentProgress, ...] = ()


class LinkStatus(Frozen):
    """A resource that loads share: a disk, a remote host, a peer, a device's bus.

    `finish_ms`: when all that is queued now will be loaded.
    """

    link: str = Field(
        description="As ssd:nvme0n1, remote:bucket.s3.amazonaws.com, peer:node-1, bus:cuda:0, or p2p:cpu:1>cpu:2 for copies from "
        "one device of the node to another."
    )
    bytes_per_second: float | None = Field(default=None, description="Learned from its latest chunks.")
    queued_bytes: int = 0
    loads: int = 0
    finish_ms: float | None = None
    moved_bytes: int = Field(default=0, description="Bytes that have crossed it since the loader was started.")
    is_paced: bool = Field(default=False, description="Its bandwidth is a setting of an experiment, not the machine's.")
    models: tuple[str, ...] = Field(default=(), description="Models of its loads, in the order of their names.")
    group_bytes: int | None = Field(
        default=None,
        description="Of a device's bus: bytes of a group of copies, the smallest with the bus's full bandwidth as measured.",
    )


class ModelUnits(Frozen):
    """Units of one model on a device, in bytes of whole pages."""

    model: str
    weights_id: str
    mapped_bytes: int = Field(description="Of instances that run or load.")
    reusable_bytes: int = Field(description="Of no instance; the model's next load there does not copy them.")
    shared_bytes: int = Field(description="Of both: units that another model has as well.")


class KvOnDevice(Frozen):
    """The KV cache of one instance, in bytes of whole pages that it borrows from a device."""

    instance_id: str
    model: str = ""
    floor_bytes: int = Field(description="Booked for it: others cannot ask for these pages.")
    lent_bytes: int = Field(description="What it has.")
    wanted_bytes: int = Field(default=0, description="What its sequences need, known so far; at least the floor.")


class WeightsOnDevice(Frozen):
    """The units of some weights that a device has, loaded or not.

    The shares of a unit that several weights have are in the figures of each of them.
    """

    weights_id: str
    total_bytes: int = Field(description="Of all its units.")
    missing_bytes: int = Field(description="That a load would copy to the device.")
    read_bytes: int = Field(description="That a load would read from its source, unless host memory has the weights.")
    unmapped_bytes: int = Field(description="Whole pages of its units that no instance maps or loads, missing ones included.")
    exclusive_bytes: int = Field(default=0, description="Whole pages of mapped units that no other known weights have.")
    peer_bytes: dict[str, int] = Field(
        default_factory=dict,
        description="Of `missing_bytes`, what other devices of the node have. A unit that several have counts for the one with "
        "the fastest link.",
    )


class DeviceMemory(Frozen):
    """The memory of a device that keeps units, in pages of 2 MiB.

    That is a separate cpu device, or a GPU whose units stay (`THAW_CUDA_REUSE_BYTES`), from its
    first load on. What engines have allocated themselves on a GPU is not in these figures.

    Free, mapped, reusable and lent bytes are `total_bytes` together. A unit counts once, however
    many models share it.
    """

    device_id: str
    total_bytes: int
    free_bytes: int
    mapped_bytes: int
    reusable_bytes: int
    lent_bytes: int = Field(default=0, description="Of KV caches, and of engines that map pages of an earlier loader.")
    copied_bytes: int = Field(default=0, description="Copied to it since the loader's start.")
    peer_bytes: int = Field(default=0, description="Of `copied_bytes`, from other devices of the node.")
    reused_bytes: int = Field(default=0, description="Wanted there since then, and not copied, because it had them.")
    violations: tuple[str, ...] = Field(default=(), description="Of conservation, in the latest audit; none in a correct node.")
    changed_units: int = Field(
        default=0, description="Units whose bytes loads found changed since the loader's start. They were copied again."
    )
    models: tuple[ModelUnits, ...] = ()
    weights: tuple[WeightsOnDevice, ...] = Field(
        default=(),
        description="Weights of which the device has units, most bytes first. Their hashes are in the checkpoint's "
        "index, or known from an earlier load.",
    )
    is_lending: bool = Field(default=False, description="Engines of this device borrow pages for their KV caches.")
    kv: tuple[KvOnDevice, ...] = Field(default=(), description="KV caches that borrow pages; their part of `lent_bytes`.")
    paced_bytes_per_second: float | None = Field(
        default=None, description="Copies from host memory are slowed to it, for an experiment (`bandwidth` in thaw.yaml)."
    )
    numa_node: int | None = Field(default=None, description="NUMA node that its memory is bound to; None: to none.")


class CachedModel(Frozen):
    """A revision that this node stores without an instance of it.

    Peers fetch weights from this node, on either tier.
    """

    weights_id: str
    tier: Literal["dram", "ssd"]
    nbytes: int
    source: str = ""


class PretouchStatus(Frozen):
    """Progress of touching the host's memory in the background, once after boot."""

    state: Literal["waiting", "running", "complete", "skipped"]
    touched_bytes: int = 0
    reason: str = Field(default="", description="Why it is skipped.")


class PrefetchStatus(Frozen):
    """A prefetch that runs, or one of the latest that ended.

    States:
        preempted: The loader dropped it, because a request waited for other weights.
    """

    token: int = Field(description="Of its `PrefetchWeights`.")
    weights_id: str
    state: Literal["running", "complete", "preempted", "failed"]
    error: ErrorBody | None = Field(default=None, description="Why it failed.")
    loaded_bytes: int = Field(default=0, description="While it runs: bytes of the weights that have arrived.")
    total_bytes: int = Field(default=0, description="While it runs: bytes of the weights; 0: not known yet.")
    bytes_per_second: float | None = Field(default=None, description="Of the last seconds; None: not measured yet.")


class LoaderStatus(Message):
    """Broadcast on every change and every second."""

    kind: Literal["loader_status"] = "loader_status"
    node: str
    boot_id: str
    pid: int = 0
    stopping: bool = Field(default=False, description="It is about to end, and what it has on devices with it.")
    segments: tuple[SegmentStatus, ...] = ()
    bytes_per_second: float | None = Field(default=None, description="Measured by the latest loads.")
    read_bytes: int = Field(default=0, description="Of weights, read from disks and remote sources by loads since its start.")
    links: tuple[LinkStatus, ...] = ()
    memory: tuple[DeviceMemory, ...] = Field(default=(), description="Of devices that keep units.")
    cached: tuple[CachedModel, ...] = ()
    prefetches: tuple[PrefetchStatus, ...] = ()
    dram_bytes: int = Field(
        default=0, description="Of the pool, beyond what instances hold: cached, spare, and not proved free yet."
    )
    dram_budget_bytes: int = 0
    pretouch: PretouchStatus | None = Field(default=None, description="None: an earlier version.")
    ssd_bytes: int = 0
    ssd_budget_bytes: int = 0
    disk_bytes: int = Field(default=0, description="Of the file system of the disk cache; 0: an earlier version.")
    disk_free_bytes: int = 0
    peer_url: str | None = Field(default=None, description="Where other loaders fetch this node's files.")
    peer_token: str | None = Field(default=None, description="Bearer token for `peer_url`.")
