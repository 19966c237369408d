"""The inputs of decisions besides the state: profile, capabilities, and durations."""

from __future__ import annotations

from services.scheduler.domain.policies import thaw
from services.scheduler.domain.policies.port import Capability, Profile
from services.scheduler.domain.values import value
from shared.contracts.demand import DEMAND_LOST_AFTER_S
from shared.contracts.node import NODE_LOST_AFTER_S

LIVE: frozenset[Capability] = frozenset({"sleep", "suspend", "reuse", "peer_copy", "pipeline", "preempt", "migrate", "template"})
"""Capabilities of the mesh besides loading and evicting. Options that need others are not offered.
"""


@value(frozen=True, slots=True)
class Policy:
    profile: Profile = thaw.PROFILE
    """The functions for choices that the placement rules (placement/place.py) leave open."""
    capabilities: frozenset[Capability] = LIVE
    preempt_after_s: float = 15.0
    """After this wait a serving instance of another model may be drained."""
    starve_after_s: float = 60.0
    """After this wait a model goes before all others, whatever its priority and the profile."""
    horizon_s: float = 60.0
    """A victim's cost counts by the odds that it is used again within this time."""
    min_active_s: float = 2.0
    """Minimum life of a ready instance: the requests that started it are on their way."""
    no_node_timeout_s: float = 30.0
    """Demand waits this long for any node; then its requests fail."""
    drain_timeout_s: float = 60.0
    """Running requests of a draining instance are ended after this."""
    scale_up_after_s: float = 1.0
    """Demand must exceed the capacity of ready and starting instances this long for one more
    replica.
    """
    min_idle_s: float = 1.0
    """The shortest keep-alive: a new instance waits this long for the requests that woke it."""
    node_lost_after_s: float = NODE_LOST_AFTER_S
    node_forgotten_after_s: float = 86_400.0
    demand_lost_after_s: float = DEMAND_LOST_AFTER_S
    absence_grace_s: float = 3.0
    """A command may cross a status: only after this does a missing instance count as gone."""
    recovery_window_s: float = 0.5
    """A new leader places nothing before every known node has reported, or this has passed."""
    demand_grace_s: float = 3.0
    """A new leader cancels no start before every gateway had time to repeat its demand."""
    failure_echo_s: float = 2.0
    """Demand older than a failure is ignored this long: its requests are being failed."""
    busy_cooldown_s: float = 1.0
    """An instance that refused to stop because it serves is not asked again before this."""
    grant_wait_s: float = 10.0
    """Seconds that a start may wait on its node for memory of instances that stop there; with 0 it
    is sent once that is free.
    """
    refusal_cooldown_s: float = 1.0
    """A device whose nodeagent refused a reservation is not used for this long."""
    stop_retry_s: float = 5.0
    """A stop without effect in the node's status is sent again after this."""
    stuck_after_s: float = 120.0
    """An instance that still holds memory this long after its drain timeout, or after its failure,
    counts as one that stays: nothing waits for its memory any more.
    """
    rebalance_period_s: float = 0.0
    """Period of the background rebalancing; 0: never."""
    consolidate: bool = True
    """Make one instance of a pipeline group that the scheduler chose (ADR 0062)."""
    consolidate_after_s: float = 2.0
    """A group serves this long first: the requests that started it are on their way."""
    backoff_first_s: float = 1.0
    backoff_limit_s: float = 30.0
    init_grace_s: float = 30.0
    """Grace after `init_timeout`, then the scheduler ends a start that its nodeagent did not."""
    stable_after_s: float = 30.0
    """An instance that fails after serving this long does not lengthen the back-off."""

    prefetch: bool = True
    """Prefetch the weights of models that are likely to be requested."""
    park_concurrency: int = 2
    """Concurrent starts for parking on one node; 0: none."""
    park_max_attempts: int = 3
    """After this many failures in a row a model is not parked again before it changes."""
    park_timeout_s: float = 10.0
    """Time that a node has after `ready` to find out whether it can suspend an instance."""
    park_failure_window_s: float = 600.0
    """Failures further apart than this do not count as in a row."""

    def backoff_s(self, failures: int) -> float:
        """Return the seconds before `replicas.min` retries after `failures` failures in a row."""
        return float(min(self.backoff_limit_s, self.backoff_first_s * 2 ** min(max(failures - 1, 0), 16)))
