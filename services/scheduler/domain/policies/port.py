"""What a policy sees and what it says: plain frozen values, the same for the live cluster and the simulator.

A policy never reads a clock, a random generator or the cluster's state. Views are made by whoever asks it (the scheduler's `decide`, or the
simulator); times are seconds, sizes bytes, bandwidths bytes per second. Device keys are "node/device".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from hashlib import blake2b
from typing import Literal, Protocol

from services.scheduler.domain.cost.cost import Clearing, Cost, Way
from services.scheduler.domain.values import value

Capability = Literal["sleep", "suspend", "reuse", "peer_copy", "pipeline", "preempt", "migrate"]
"""What the executing side can do beside loading and evicting idle instances. A policy is not offered what is not there."""


@value(frozen=True, slots=True)
class Ask:
    """A model that wants an instance. `waited`: by its longest waiting request; `heavy`: swapping it in slows it down (Torpor §4.4)."""

    model: str
    need_bytes: int
    waited_s: float
    requests: int = 1
    request_id: str = ""
    deadline_s: float | None = None
    slo_ttft_s: float | None = None
    """Seconds from arrival within which the first token is wanted; None: no objective."""
    slo_tpot_s: float | None = None
    """Seconds for each further token."""
    priority: int = 0
    is_heavy: bool = False
    is_extra: bool = False
    """One more replica, which nobody needs to be served at all."""
    exec_s: float = 0.0
    """Expected time of one of its requests on a device."""
    prompt_tokens: int = 0
    output_tokens: float = 0.0


@value(frozen=True, slots=True)
class MigrationTarget:
    """Somewhere that a resident's requests could go on.

    Attributes:
        device: A device; for a resident on several devices a node ("node/"), whose placement chooses them.
        seconds: To load it there (0 if it is there already) and to take its requests over. Moves to devices of one node are loaded
            one after another.
        free: Bytes that are free there, on each device.
    """

    device: str
    total_s: float
    free_bytes: int

    @property
    def node(self) -> str:
        return self.device.rsplit("/", 1)[0]


@value(frozen=True, slots=True)
class Resident:
    """Something that holds memory of a device. `weights`: what an ended instance left for the next one (Tangram's reuse store)."""

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
    """alpha of Tangram §4.2: what a second of this model's latency counts."""
    miss_probability: float = 1.0
    """p of Tangram §4.2: how likely it is to be missed."""
    reuse_probability: float | None = None
    """How likely it is wanted again before it would have left anyway, or within a minute if that is sooner; None: `miss`."""
    reload_s: float = 0.0
    """Seconds to have it back by its soonest way: bytes over the slowest link passed, or its snapshot's restore."""
    delay_s: float | None = None
    """Seconds by which its next request would be served later for its absence; None: all of `reload_s`. Less where requests execute behind
    the bytes that come (Torpor §4.3)."""
    resume_s: float | None = None
    """Seconds to move what it serves elsewhere, a·(t_in + t_out) + b (ServerlessLLM §6.2); None: it cannot move."""
    move_to: str = ""
    """The device that `resume_s` is for."""
    moves: tuple[MigrationTarget, ...] = ()
    """All the devices that it could move to, where more than one is known."""
    remaining_s: float = 0.0
    """Expected seconds until what it serves is done."""
    replicas: int = 1
    """On how many devices the model is."""
    protected_reason: str = ""
    """Why it must not be touched; empty: it may."""


@value(frozen=True, slots=True)
class DeviceView:
    key: str
    node: str
    budget_bytes: int
    free_bytes: int
    free_soon_bytes: int = 0
    """What will be free once those that are leaving have left, `free` included."""
    residents: tuple[Resident, ...] = ()
    running: int = 0
    """Requests that execute on it now."""
    neighbour_loads: Literal["none", "light", "heavy"] = "none"
    """What comes over the bus that it shares with its neighbour."""
    has_failed: bool = False
    """The model has just failed here."""


@value(frozen=True, slots=True)
class Clearance:
    """What makes `freed` bytes of a device free: who goes, how, and what that costs: seconds until the bytes are there, and a penalty
    in the policy's own measure (seconds of others' time, expected reload cost …) by which options of one device are compared."""

    how: Clearing
    victims: tuple[str, ...] = ()
    freed_bytes: int = 0
    delay_s: float = 0.0
    penalty_s: float = 0.0
    moves: Mapping[str, str] = field(default_factory=dict)
    """With `migrate`: the device that each victim's requests go to."""


NOTHING_TO_CLEAR = Clearance("none")


@value(frozen=True, slots=True)
class Option:
    """One way for the model to become ready on one device set, with the device views it was made from. `cost` includes the clearing."""

    devices: tuple[DeviceView, ...]
    way: Way
    cost: Cost
    clearance: Clearance = NOTHING_TO_CLEAR
    resident_bytes: int = 0
    """S' of Tangram §4.4: bytes of it that are there already."""
    source: str = ""
    """The tier or device that the bytes come from."""
    stages: int = 1
    full_workers: int = 1
    """Of a pipeline: s and w of HydraServe's Algorithm 1."""
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
    """A model's (function's) past against its objective: `total` requests, `met` in time, `percentile` the share that must be (Torpor §5)."""

    model: str
    total: int = 0
    met: int = 0
    percentile: float = 0.98


@value(frozen=True, slots=True)
class Demand:
    """What a model's instances have to do. `window`: requests that came in the last sliding window; `peak`: most in a window lately."""

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
    """In which order asks are considered."""

    def __call__(self, asks: Sequence[Ask], book: Mapping[str, Usage], alpha: float) -> list[Ask]: ...


class Clear(Protocol):
    """Who leaves `device` so that `short` more bytes are free; None: not enough may leave."""

    def __call__(self, ask: Ask, device: DeviceView, short: int, now: float) -> Clearance | None: ...


class Choose(Protocol):
    """Which option is taken; None: it waits. `seed`: for policies that draw, a function of the plan alone."""

    def __call__(self, ask: Ask, options: Sequence[Option], seed: str) -> Option | None: ...


class Keep(Protocol):
    """Seconds that an idle instance stays, by its own setting (-1: until evicted) and the time that loading it took."""

    def __call__(self, keep_alive: float, load_s: float) -> float: ...


class Scale(Protocol):
    """How many instances the model should have now."""

    def __call__(self, demand: Demand) -> int: ...


@value(frozen=True, slots=True)
class Profile:
    """A named composition. `uses`: the capabilities that it takes advantage of where the executing side has them."""

    name: str
    order: Order
    clear: Clear
    choose: Choose
    keep: Keep
    scale: Scale
    uses: frozenset[Capability] = frozenset()
    slo_queue: bool = False
    """Alpha of the SLO queue adapts (Torpor Appendix A.3)."""
    about: str = ""


def drawn(seed: str, *parts: str) -> float:
    """A number in [0, 1) that depends on nothing but its arguments."""
    digest = blake2b("\0".join((seed, *parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
