"""The simulated system: cluster.yaml and models.yaml.

Bytes and bandwidths are in GB (10^9), times in seconds, unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from services.scheduler.domain.policies.port import Capability
from shared.errors import InvalidRequest
from simulator.file_faults import faults

GB = 10**9
EVERY_CAPABILITY: frozenset[Capability] = frozenset(("sleep", "suspend", "reuse", "peer_copy", "pipeline", "preempt", "migrate"))
SharedLink = Literal["remote", "ssd", "device", "bus"]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LinkSpeeds(_Strict):
    """GB per second.

    `remote` and `ssd` belong to a node, `device` to each device, `bus` to `bus_devices` neighbours,
    and `peer` to a pair of devices.
    """

    remote: float = Field(gt=0)
    ssd: float = Field(gt=0)
    device: float = Field(gt=0, description="Host to one device.")
    bus: float | None = Field(default=None, gt=0, description="Shared by neighbouring devices; none: no shared bus.")
    bus_devices: int = Field(default=2, ge=1)
    peer: float | tuple[tuple[float, ...], ...] | None = Field(
        default=None, description="Device to device: one value, or one per pair (0: not connected)."
    )
    sequential: frozenset[SharedLink] = Field(
        default=frozenset(), description="Links that run one load after the other; the others share their bandwidth fairly."
    )

    def get_bandwidth(self, source: int, target: int) -> float:
        """Return the bandwidth between two devices; 0: not connected."""
        if isinstance(self.peer, tuple):
            return self.peer[source][target] if max(source, target) < len(self.peer) else 0.0
        return self.peer or 0.0


class NodeGroup(_Strict):
    """Identical nodes, called NAME-0, NAME-1 …"""

    name: str = "node"
    count: int = Field(default=1, ge=1)
    kind: str = Field(default="", description="Kind of its devices, to which models may give another speed.")
    devices: int = Field(ge=1, description="Of each node.")
    device_gb: float = Field(gt=0)
    dram_gb: float = Field(ge=0, description="Of each node, for weights and snapshots.")
    ssd_gb: float = Field(
        default=0.0,
        ge=0,
        description="Of each node, for weights; filled at the start with the models in order, round robin over the nodes.",
    )
    memory: Literal["unified", "separate"] = Field(
        default="unified",
        description="separate: devices keep the weights of stopped instances, and loads copy what is missing, also from other devices "
        "of the node (`links.peer`). Only with --mesh.",
    )
    links: LinkSpeeds


class Startup(_Strict):
    """Durations of a start besides loading.

    With `prefetch` weights are fetched while the engine starts; with `stream` they continue to the
    device as they arrive; with `overlap` libraries load while weights are copied. All three:
    HydraServe's Eq. 5; none: its Eq. 1.
    """

    container_s: float = Field(default=0.0, ge=0)
    context_s: float = Field(default=0.0, ge=0)
    libraries_s: float = Field(default=0.0, ge=0)
    init_s: float = Field(default=0.0, ge=0, description="From the last byte to an engine that can run.")
    warm_up_s: float = Field(default=0.0, ge=0, description="From there to ready: the first run and profiling.")
    leave_s: float = Field(default=0.0, ge=0, description="From the last request to free memory.")
    restore_s: float = Field(default=0.0, ge=0, description="Restore of a snapshot, without loading its bytes.")
    copy_s: float = Field(default=0.0, ge=0, description="Fixed time of a load to a separate device. Only with --mesh.")
    compute_while_loading: bool = Field(
        default=False, description="Engines accept requests after init_s, and compute while weights arrive. Only with --mesh."
    )
    prefetch: bool = True
    stream: bool = True
    overlap: bool = True


class Runtime(_Strict):
    """The simulated system's behaviour, whatever the policy."""

    startup: Startup = Startup()
    capabilities: frozenset[Capability] = EVERY_CAPABILITY
    exclusive: bool = Field(
        default=False, description="A device executes one request at a time, and requests bind to devices one by one (Torpor §4.5)."
    )
    late_execution: bool = Field(default=True, description="With `exclusive`: execution starts with the first bytes (Torpor §4.3).")
    homes: bool = Field(default=False, description="Each model is assigned to one node, round robin, and runs only there.")
    cache_dram: bool = True
    cache_ssd: bool = True
    ssd_copies: Literal["one", "full"] = Field(
        default="one", description="Copies of each model on disks at the start: one, or as many as fit on the disks of all nodes."
    )
    in_dram: bool = Field(default=False, description="Every model is in the memory of its nodes at the start, as far as it fits.")
    elastic_kv: bool = Field(
        default=False, description="KV cache memory is allocated per request, not per instance (Tangram §3.3)."
    )
    kv_overhead: float = Field(default=0.0, ge=0, description="Share of a token's time that elastic KV adds.")
    merge_gb_per_second: float | None = Field(
        default=None, gt=0, description="Speed of moving tensors to merge free memory; none: instantaneous."
    )
    merge_share: float = Field(default=1.0, ge=0, le=1, description="Share of the device's content that has to be moved.")
    share_compute: Literal["turns", "memory", "none"] = Field(
        default="turns",
        description="How busy instances share a device: in turns of equal time, as processes on one GPU do; in proportion to their booked "
        "memory (HydraServe §4.1); or not at all, each as if it were alone. `true` is `memory`, `false` is `none`.",
    )
    hop_s: float = Field(default=0.0, ge=0, description="t_n of HydraServe: one stage to the next.")
    stage_batches: bool = Field(
        default=False,
        description="A pipeline of s stages has s batches in flight: s times the requests of one engine, and their prompts overlap "
        "(HydraServe). Otherwise it runs what one engine runs (Thaw).",
    )
    gather_gb_per_second: float = Field(default=1.0, gt=0, description="Transfer of a pipeline's KV cache to the remaining stage.")
    window_s: float = Field(default=10.0, gt=0, description="Sliding window of the autoscaler.")
    alpha: float = Field(default=0.5, ge=0, le=1, description="Initial alpha of the SLO queue.")
    alpha_period_s: float = Field(default=10.0, gt=0)
    timeout_s: float = Field(
        default=300.0, gt=0, description="A request that has waited this long fails; one that is interrupted waits again."
    )
    failover: Literal["restart", "resume"] = Field(default="resume", description="Requests of a failed node restart, or resume.")
    message_ms: float = Field(default=1.0, ge=0, description="One way, between any two processes. Only with --mesh.")
    reply_ms: float = Field(
        default=0.0, ge=0, description="Part of the TTFT for messages between gateway and engine. Only with --mesh."
    )
    gateway_ms: float = Field(
        default=0.0, ge=0, description="From a request's arrival to the sending of its demand. Only with --mesh."
    )
    noticed_s: float = Field(
        default=10.3,
        ge=0,
        description="Until a gateway takes requests back from a silent node: it asks after 10 s. Only with --mesh.",
    )
    decision_ms: float = Field(
        default=0.0,
        ge=0,
        description="From an event to the sending of its effects: the scheduler's transaction. Only with --mesh.",
    )

    @field_validator("share_compute", mode="before")
    @classmethod
    def _accept_bool(cls, found: object) -> object:
        """Accept the values of files that were written for earlier versions."""
        return {True: "memory", False: "none"}[found] if isinstance(found, bool) else found


class Failure(_Strict):
    """A node is down from `at` on, for `seconds`."""

    node: str
    at: float = Field(ge=0)
    seconds: float = Field(gt=0)


class Failures(_Strict):
    events: tuple[Failure, ...] = ()
    mtbf_s: float | None = Field(
        default=None, gt=0, description="Mean time between failures of one node, exponential, drawn from the seed."
    )
    mttr_s: float = Field(default=60.0, gt=0)


class ClusterFile(_Strict):
    nodes: tuple[NodeGroup, ...] = Field(min_length=1)
    runtime: Runtime = Runtime()
    failures: Failures = Failures()

    @model_validator(mode="after")
    def _check_names(self) -> ClusterFile:
        names = [name for name, _ in self.iter_nodes()]
        if len(set(names)) < len(names):
            raise ValueError("two groups of nodes have the same name")
        if unknown := {f.node for f in self.failures.events} - set(names):
            raise ValueError(f"failures.events: no node {min(unknown)!r} exists. The nodes are {', '.join(names[:8])}")
        return self

    def iter_nodes(self) -> Iterator[tuple[str, NodeGroup]]:
        for group in self.nodes:
            for n in range(group.count):
                yield f"{group.name}-{n}", group


class Fixed(_Strict):
    """An engine of the older papers: one request at a time per instance, all equally long."""

    kind: Literal["fixed"] = "fixed"
    seconds: float = Field(gt=0)


class Batching(_Strict):
    """A batching engine.

    Prompts are computed one after the other. Each running request gets a token every `tpot_ms`,
    plus `tpot_ms_more` for each further running request.
    """

    kind: Literal["batching"] = "batching"
    prefill_tokens_per_second: float = Field(gt=0)
    prefill_ms: float = Field(default=0.0, ge=0, description="Fixed time of each prompt; with `prefill_together`, of each pass.")
    prefill_together: bool = Field(default=False, description="Waiting prompts are computed in one pass, not one after the other.")
    tpot_ms: float = Field(gt=0)
    tpot_ms_more: float = Field(default=0.0, ge=0)
    concurrency: int = Field(default=16, ge=1)


Service = Annotated[Fixed | Batching, Field(discriminator="kind")]


class ModelGroup(_Strict):
    """Identical models, called NAME-0, NAME-1 …; the more popular ones first."""

    name: str
    copies: int = Field(default=1, ge=1)
    weights_gb: float = Field(gt=0)
    kv_gb: float = Field(default=0.0, ge=0, description="Memory that an instance books besides the weights.")
    kv_mb_per_token: float = Field(
        default=0.0, ge=0, description="For elastic KV, and for the transfer of a consolidated pipeline."
    )
    snapshot_gb: float | None = Field(default=None, gt=0, description="Of a suspended instance; none: its weights.")
    largest_stage: dict[int, Annotated[float, Field(gt=0, le=1)]] = Field(
        default_factory=dict,
        description="Share of the weights in the first stage of a pipeline, by number of stages: the first one has the embeddings. "
        "None: all stages have an equal part.",
    )
    service: Service
    services: dict[str, Service] = Field(default_factory=dict, description="By kind of device, where it differs.")
    kinds: frozenset[str] = Field(default=frozenset(), description="Kinds of device it may be on; empty: all.")
    slo_ttft: float = Field(gt=0)
    has_ttft_objective: bool = Field(
        default=True,
        description="False: slo_ttft only counts requests in time, and the scheduler knows no such objective.",
    )
    slo_tpot: float | None = Field(default=None, gt=0)
    percentile: float = Field(
        default=0.98, gt=0, lt=1, description="Share of requests within slo_ttft that makes a function compliant."
    )
    keep_alive: float = Field(default=300.0, ge=-1)
    replicas_min: int = Field(default=0, ge=0)
    replicas_max: int = Field(default=1, ge=1)
    priority: int = 0
    sensitivity: float = Field(default=1.0, gt=0, description="alpha of Tangram §3.2.")
    heavy: bool = Field(default=False, description="Swapping it over the bus slows it down (Torpor §5.3).")
    resume_s: float = Field(default=0.0, ge=0, description="b of ServerlessLLM §6.2.")
    resume_s_per_token: float | None = Field(default=None, ge=0, description="a of it; none: as prefill.")

    @property
    def capacity(self) -> int:
        """Return the requests that an instance runs at once."""
        return 1 if isinstance(self.service, Fixed) else self.service.concurrency


class ModelsFile(_Strict):
    models: tuple[ModelGroup, ...] = Field(min_length=1)


def names_of(groups: tuple[ModelGroup, ...] | list[ModelGroup]) -> list[str]:
    return [f"{g.name}-{n}" if g.copies > 1 else g.name for g in groups for n in range(g.copies)]


File = TypeVar("File", bound=BaseModel)


def read(path: Path, kind: type[File]) -> File:
    """Read a YAML file.

    Raises:
        InvalidRequest: The file or a key is invalid; the text names both.
    """
    try:
        return kind.model_validate(yaml.safe_load(path.read_text()))
    except (OSError, yaml.YAMLError) as e:
        raise InvalidRequest(f"{path} cannot be read: {e}") from e
    except ValidationError as e:
        raise InvalidRequest(f"{path}: {faults(kind, e)}") from e
