"""The simulated system: cluster.yaml and models.yaml.

Bytes and bandwidths are in GB (10^9), times in seconds, unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from services.scheduler.domain.policies.port import Capability
from shared.errors import InvalidRequest

GB = 10**9
EVERY_CAPABILITY: frozenset[Capability] = frozenset(("sleep", "suspend", "reuse", "peer_copy", "pipeline", "preempt", "migrate"))
SharedLink = Literal["remote", "ssd", "device", "bus"]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LinkSpeeds(_Strict):
    """GB per second.

    `remote` and `ssd` belong to a node, `device` to each device, `bus` to `bus_devices` neighbours,
    and
    `peer` to a pair of devices.
    """

    remote: float = Field(gt=0)
    ssd: float = Field(gt=0)
    device: float = Field(gt=0, description="Host to one device.")
    bus: float | None = Field(default=None, gt=0, description="What neighbours get together; none: they share nothing.")
    bus_devices: int = Field(default=2, ge=1)
    peer: float | tuple[tuple[float, ...], ...] | None = Field(
        default=None, description="Device to device: one figure, or one for each pair (0: not connected)."
    )
    sequential: frozenset[SharedLink] = Field(
        default=frozenset(), description="These bring one load after the other; the rest share their bandwidth fairly."
    )

    def between(self, source: int, target: int) -> float:
        """Return the bandwidth between two devices; 0: not connected."""
        if isinstance(self.peer, tuple):
            return self.peer[source][target] if max(source, target) < len(self.peer) else 0.0
        return self.peer or 0.0


class NodeGroup(_Strict):
    """`count` identical nodes, called NAME-0, NAME-1 …"""

    name: str = "node"
    count: int = Field(default=1, ge=1)
    kind: str = Field(default="", description="Of its devices; models may be served at another speed there.")
    devices: int = Field(ge=1, description="Of each node.")
    device_gb: float = Field(gt=0)
    dram_gb: float = Field(ge=0, description="Of each node, for weights and snapshots.")
    ssd_gb: float = Field(
        default=0.0,
        ge=0,
        description="Of each node, for weights; filled beforehand with models in their order, round robin over the nodes.",
    )
    links: LinkSpeeds


class Startup(_Strict):
    """Durations of a start besides loading.

    With `prefetch` weights are fetched while the engine starts; with `stream` they go on to the
    device as
    they arrive; with `overlap` libraries load while weights are copied. All three: HydraServe's Eq.
    5;
    none: its Eq. 1.
    """

    container_s: float = Field(default=0.0, ge=0)
    context_s: float = Field(default=0.0, ge=0)
    libraries_s: float = Field(default=0.0, ge=0)
    init_s: float = Field(default=0.0, ge=0, description="From the last byte to an engine that can run.")
    warm_up_s: float = Field(default=0.0, ge=0, description="From then to ready: a first run, and what is measured in it.")
    leave_s: float = Field(default=0.0, ge=0, description="From the last request to proved free memory.")
    restore_s: float = Field(default=0.0, ge=0, description="Of a snapshot, beside its bytes.")
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
    late_execution: bool = Field(default=True, description="With `exclusive`: executing begins with the first bytes (Torpor §4.3).")
    homes: bool = Field(default=False, description="A model belongs to one node, round robin; only there can it be.")
    cache_dram: bool = True
    cache_ssd: bool = True
    ssd_copies: Literal["one", "full"] = Field(
        default="one", description="Of each model on disks, to begin with: one, or as many as the disks of all nodes hold."
    )
    in_dram: bool = Field(default=False, description="Every model begins in the memory of its nodes, as far as they hold it.")
    elastic_kv: bool = Field(
        default=False, description="Memory for the KV cache is taken with each request instead of with the instance (Tangram §3.3)."
    )
    kv_overhead: float = Field(default=0.0, ge=0, description="Share of a token's time that elastic KV adds.")
    merge_gb_per_second: float | None = Field(
        default=None, gt=0, description="Moving what lies in the way of new tensors; none: free."
    )
    merge_share: float = Field(default=1.0, ge=0, le=1, description="Of what lies on the device, how much has to be moved.")
    share_compute: bool = Field(
        default=True, description="Busy instances of one device share it by the memory that they have booked."
    )
    hop_s: float = Field(default=0.0, ge=0, description="t_n of HydraServe: one stage to the next.")
    gather_gb_per_second: float = Field(default=1.0, gt=0, description="KV cache of a pipeline to the stage that stays.")
    window_s: float = Field(default=10.0, gt=0, description="Sliding window of the autoscaler.")
    alpha: float = Field(default=0.5, ge=0, le=1, description="Of the SLO queue, to begin with.")
    alpha_period_s: float = Field(default=10.0, gt=0)
    timeout_s: float = Field(default=300.0, gt=0, description="A request that has waited for so long is given up.")
    failover: Literal["restart", "resume"] = Field(
        default="resume", description="Requests of a node that fails begin anew, or go on."
    )
    message_ms: float = Field(default=1.0, ge=0, description="One way, between any two processes. Only with --mesh.")
    reply_ms: float = Field(
        default=0.0, ge=0, description="Of a TTFT, what messages between gateway and engine take. Only with --mesh."
    )
    gateway_ms: float = Field(
        default=0.0, ge=0, description="From a request's arrival to its demand being on its way. Only with --mesh."
    )
    noticed_s: float = Field(
        default=10.3,
        ge=0,
        description="Until a gateway takes requests back from a node that has fallen silent: it asks after 10 s. Only with --mesh.",
    )
    decision_ms: float = Field(
        default=0.0,
        ge=0,
        description="From hearing of something to sending what follows: the scheduler's transaction. Only with --mesh.",
    )


class Failure(_Strict):
    """A node is down from `at` on, for `seconds`."""

    node: str
    at: float = Field(ge=0)
    seconds: float = Field(gt=0)


class Failures(_Strict):
    events: tuple[Failure, ...] = ()
    mtbf_s: float | None = Field(
        default=None, gt=0, description="Mean time between failures of one node, exponential; drawn by the seed."
    )
    mttr_s: float = Field(default=60.0, gt=0)


class ClusterFile(_Strict):
    nodes: tuple[NodeGroup, ...] = Field(min_length=1)
    runtime: Runtime = Runtime()
    failures: Failures = Failures()

    @model_validator(mode="after")
    def _names(self) -> ClusterFile:
        names = [name for name, _ in self.each()]
        if len(set(names)) < len(names):
            raise ValueError("two groups of nodes have the same name")
        if unknown := {f.node for f in self.failures.events} - set(names):
            raise ValueError(f"failures.events: no node {min(unknown)!r}; there are {', '.join(names[:8])}")
        return self

    def each(self) -> Iterator[tuple[str, NodeGroup]]:
        for group in self.nodes:
            for n in range(group.count):
                yield f"{group.name}-{n}", group


class Fixed(_Strict):
    """A service of the older papers: every request takes the same time, one at a time per instance."""

    kind: Literal["fixed"] = "fixed"
    seconds: float = Field(gt=0)


class Batching(_Strict):
    """A batching engine.

    Prompts are computed one after the other; each running request gets a token every `tpot_ms`,
    plus
    `tpot_ms_more` for each further one.
    """

    kind: Literal["batching"] = "batching"
    prefill_tokens_per_second: float = Field(gt=0)
    prefill_ms: float = Field(
        default=0.0, ge=0, description="Of any prompt, beside its tokens; of a pass, with `prefill_together`."
    )
    prefill_together: bool = Field(
        default=False, description="Prompts that wait are computed in one pass, not one after the other."
    )
    tpot_ms: float = Field(gt=0)
    tpot_ms_more: float = Field(default=0.0, ge=0)
    concurrency: int = Field(default=16, ge=1)


Service = Annotated[Fixed | Batching, Field(discriminator="kind")]


class ModelGroup(_Strict):
    """`copies` identical models, called NAME-0, NAME-1 …; the more popular ones first."""

    name: str
    copies: int = Field(default=1, ge=1)
    weights_gb: float = Field(gt=0)
    kv_gb: float = Field(default=0.0, ge=0, description="Memory beside the weights that an instance books.")
    kv_mb_per_token: float = Field(default=0.0, ge=0, description="Elastic KV, and what a consolidated pipeline gathers.")
    snapshot_gb: float | None = Field(default=None, gt=0, description="Of a suspended instance; none: its weights.")
    service: Service
    services: dict[str, Service] = Field(default_factory=dict, description="By kind of device, where it differs.")
    kinds: frozenset[str] = Field(default=frozenset(), description="Kinds of device it may be on; empty: all.")
    slo_ttft: float = Field(gt=0)
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
        first = e.errors()[0]
        raise InvalidRequest(f"{path}: {'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}") from e
