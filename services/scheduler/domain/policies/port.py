"""The interface of policies: plain frozen values, the same live and simulated.

A policy never reads a clock, a random generator or the cluster's state: its caller (the scheduler's
`decide`, or the simulator) builds the views. Times are seconds, sizes bytes, bandwidths bytes per
second. Device keys are "node/device".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from hashlib import blake2b
from typing import Literal, Protocol

from services.scheduler.domain.cost.cost import Clearing, Cost, Way
from services.scheduler.domain.values import value

Capability = Literal["sleep", "suspend", "reuse", "peer_copy", "pipeline", "preempt", "migrate", "template"]
"""Capabilities of the executing side besides loading and evicting idle instances."""


@value(frozen=True, slots=True)
class Ask:
    """A model that needs an instance.

    Attributes:
        waited_s: Seconds that its longest-waiting request has waited.
        is_heavy: Swapping slows it down (Torpor §4.4).
    """

    model: str
    need_bytes: int
    waited_s: float
    requests: int = 1
    request_id: str = ""
    deadline_s: float | None = None
    slo_ttft_s: float | None = None
    """Objective for the first token, in seconds from arrival; None: no objective."""
    slo_tpot_s: float | None = None
    """Objective for each further token, in seconds."""
    priority: int = 0
    request_priority: int = 0
    """The highest priority of its waiting requests."""
    share_s: float = 0.0
    """Device-seconds that the key with the least has received, of the keys whose requests wait."""
    is_heavy: bool = False
    is_extra: bool = False
    """One more replica, which no request needs."""
    exec_s: float = 0.0
    """Expected time of one of its requests on a device."""
    prompt_tokens: int = 0
    output_tokens: float = 0.0
    start_s: float = 0.0
    """Seconds that a start takes at least, on a free device; 0: unknown."""
    missing_workers: int = 1
    """Instances that the model lacks, this one included."""


@value(frozen=True, slots=True)
class MigrationTarget:
    """A destination for a resident's requests.

    Attributes:
        device: A device; for a resident on several devices a node ("node/"), whose placement
            chooses them.
        total_s: Seconds to load the model there (0 if it is there) and to resume the requests.
            Migrations to devices of one node load one after another.
        free_bytes: Free bytes on each device.
    """

    device: str
    total_s: float
    free_bytes: int

    @property
    def node(self) -> str:
        return self.device.rsplit("/", 1)[0]


@value(frozen=True, slots=True)
class Resident:
    """An instance, or reusable weights, that hold memory of a device.

    `state` "weights": what a stopped instance left for the next one (Tangram's reuse store).
    """

    key: str
    model: str
    nbytes: int
    state: Literal["serving", "idle", "parked", "starting", "leaving", "weights"]
    last_used: float = 0.0
    ready_at: float = 0.0
    active: int = 0
    queued: int = 0
    priority: int = 0
    is_heavy: bool = False
    sensitivity: float = 1.0
    """alpha of Tangram §4.2: the weight of a second of this model's latency."""
    miss_probability: float = 1.0
    """p of Tangram §4.2: the probability of a miss after eviction."""
    reuse_probability: float | None = None
    """Probability of use before it would stop anyway, within a minute; None: `miss_probability`."""
    reload_s: float = 0.0
    """Seconds to have it back: bytes over the slowest link, or the restore of its snapshot."""
    delay_s: float | None = None
    """Seconds by which eviction delays its next request; None: `reload_s`.

    Less where requests execute while the weights arrive (Torpor §4.3).
    """
    resume_s: float | None = None
    """Seconds to migrate its requests: a·(t_in + t_out) + b (ServerlessLLM §6.2), or None."""
    moves: tuple[MigrationTarget, ...] = ()
    """All known migration targets."""
    remaining_s: float = 0.0
    """Expected seconds until its requests are finished."""
    replicas: int = 1
    """Number of devices with the model."""
    requests_per_s: float = 0.0
    """Expected requests per second for its model; 0: unknown."""
    protected_reason: str = ""
    """The reason why the instance must stay; empty: it may be a victim."""


@value(frozen=True, slots=True)
class DeviceView:
    key: str
    node: str
    budget_bytes: int
    free_bytes: int
    free_soon_bytes: int = 0
    """Free once the stopping instances are gone, `free_bytes` included."""
    residents: tuple[Resident, ...] = ()
    running: int = 0
    """Requests that execute on it."""
    neighbour_loads: Literal["none", "light", "heavy"] = "none"
    """Loads over the bus that it shares with its neighbour."""
    has_failed: bool = False
    """The model has just failed here."""
    kv_lacking_bytes: int = 0
    """Bytes that its KV caches want beyond the pages that they have and can get."""


@value(frozen=True, slots=True)
class Clearance:
    """The way in which `freed_bytes` of a device become free, and its cost.

    Attributes:
        how: The way of clearing.
        victims: Keys of residents.
        freed_bytes: Bytes that become free.
        delay_s: Seconds until they are free.
        penalty_s: The policy's own measure, by which options of one device are compared: seconds of
            others' time, or expected reload cost.
    """

    how: Clearing
    victims: tuple[str, ...] = ()
    freed_bytes: int = 0
    delay_s: float = 0.0
    penalty_s: float = 0.0
    moves: Mapping[str, str] = field(default_factory=dict)
    """With `migrate`: the destination of each victim's requests."""


NOTHING_TO_CLEAR = Clearance("none")


@value(frozen=True, slots=True)
class Option:
    """One way to make the model ready on one device set.

    Attributes:
        cost: Includes the clearing.
    """

    devices: tuple[DeviceView, ...]
    way: Way
    cost: Cost
    clearance: Clearance = NOTHING_TO_CLEAR
    resident_bytes: int = 0
    """S' of Tangram §4.4: bytes of the model that are there already."""
    source: str = ""
    """The tier or device that the bytes come from."""
    stages: int = 1
    full_workers: int = 1
    """Parameters s and w of a pipeline in HydraServe's Algorithm 1."""
    tpot_s: float = 0.0
    sharing: int = 0
    """Instances that would share its devices (HydraServe §4.1)."""

    @property
    def key(self) -> tuple[str, ...]:
        return (self.devices[0].key,) if len(self.devices) == 1 else tuple([d.key for d in self.devices])

    @property
    def free_bytes(self) -> int:
        return self.devices[0].free_bytes if len(self.devices) == 1 else min([d.free_bytes for d in self.devices])


@value(frozen=True, slots=True)
class Usage:
    """A function's past against its objective (Torpor §5).

    Attributes:
        total: Number of requests.
        met: Number of requests within the objective.
        percentile: Share of the requests that must be within the objective.
    """

    model: str
    total: int = 0
    met: int = 0
    percentile: float = 0.98


@value(frozen=True, slots=True)
class Demand:
    """The load of a model's instances.

    Attributes:
        window_requests: Arrivals in the last sliding window.
        peak_requests: Arrivals in the fullest recent window.
    """

    model: str
    waiting: int
    running: int
    live: int
    capacity: int
    """Requests that one instance runs at once."""
    window_requests: int = 0
    min_replicas: int = 0
    max_replicas: int = 1
    peak_requests: int = 0


class Order(Protocol):
    """Returns the asks in the order in which they are placed."""

    def __call__(self, asks: Sequence[Ask], book: Mapping[str, Usage], alpha: float) -> list[Ask]: ...


class Clear(Protocol):
    """Returns the victims that free `short` more bytes of `device`; None: too few."""

    def __call__(self, ask: Ask, device: DeviceView, short: int, now: float) -> Clearance | None: ...


class Choose(Protocol):
    """Chooses an option."""

    def __call__(self, ask: Ask, options: Sequence[Option], seed: str) -> Option | None:
        """Return the chosen option; None: wait.

        Args:
            ask: The request for a placement.
            options: The options.
            seed: For random policies: a function of the plan.
        """
        ...


class Keep(Protocol):
    """Decides how long an idle instance stays."""

    def __call__(self, keep_alive: float, load_s: float) -> float:
        """Return the seconds that an idle instance stays; -1: until evicted.

        Args:
            keep_alive: The model's setting.
            load_s: Seconds that loading it took.
        """
        ...


class Scale(Protocol):
    """Returns how many instances the model should have now."""

    def __call__(self, demand: Demand) -> int: ...


@value(frozen=True, slots=True)
class Profile:
    """A named policy.

    Attributes:
        uses: The capabilities that it uses where the mesh has them.
    """

    name: str
    order: Order
    clear: Clear
    choose: Choose
    keep: Keep
    scale: Scale
    uses: frozenset[Capability] = frozenset()
    slo_queue: bool = False
    """Alpha of the SLO queue adapts (Torpor, Appendix A.3)."""
    about: str = ""


def draw_number(seed: str, *parts: str) -> float:
    """Return a number in [0, 1) that depends on the arguments only."""
    digest = blake2b("\0".join((seed, *parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
