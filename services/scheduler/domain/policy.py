"""What decisions depend on beside the state: the profile, what the mesh can do, and numbers in seconds."""

from __future__ import annotations

from services.scheduler.domain.policies import thaw
from services.scheduler.domain.policies.port import Capability, Profile
from services.scheduler.domain.values import value
from shared.contracts.demand import DEMAND_LOST_AFTER_S
from shared.contracts.node import NODE_LOST_AFTER_S

LIVE: frozenset[Capability] = frozenset({"sleep", "suspend", "preempt", "migrate"})
"""What the mesh can do beside loading and evicting. An option that needs more is not made."""


@value(frozen=True, slots=True)
class Policy:
    profile: Profile = thaw.PROFILE
    """Its functions choose where the rules (placement.py) leave a choice."""
    capabilities: frozenset[Capability] = LIVE
    preempt_after_s: float = 15.0
    """A model that waited this long may have a serving instance of another one drained."""
    starve_after_s: float = 60.0
    """A model that waited this long goes before every other one and takes what there is, whatever its priority and the profile: so long it may
    be passed over, and no longer."""
    horizon_s: float = 60.0
    """What leaves counts by how likely it is wanted again within this time."""
    min_active_s: float = 2.0
    """An instance that became ready is not evicted before this, while requests for it are still on their way."""
    no_node_timeout_s: float = 30.0
    """Demand waits this long for any node to appear; then its waiters are told."""
    drain_timeout_s: float = 60.0
    """Running requests of a draining instance are ended after this."""
    scale_up_after_s: float = 1.0
    """Demand must exceed the capacity of ready and starting instances this long for one more replica."""
    min_idle_s: float = 1.0
    """The shortest keep-alive: an instance just ready waits this long for the requests that woke it."""
    node_lost_after_s: float = NODE_LOST_AFTER_S
    node_forgotten_after_s: float = 86_400.0
    demand_lost_after_s: float = DEMAND_LOST_AFTER_S
    absence_grace_s: float = 3.0
    """A command may cross a status on its way: only after this does a missing instance count as gone."""
    recovery_window_s: float = 0.5
    """A new leader places nothing before every node it knows was heard, or this has passed."""
    demand_grace_s: float = 3.0
    """A new leader cancels no start before every gateway had the time to repeat its demand."""
    failure_echo_s: float = 2.0
    """Demand older than a failure is ignored this long: those waiters are just being told."""
    busy_cooldown_s: float = 1.0
    """An instance that refused to leave because it is serving is not asked again before this."""
    grant_wait_s: float = 10.0
    """A start or a resumption may go to its node before what leaves there has left, and waits there so long for its bytes; 0: it is sent when
    they are reported free, and refused if they are not."""
    refusal_cooldown_s: float = 1.0
    """A device whose nodeagent refused a reservation is left alone this long."""
    stop_retry_s: float = 5.0
    """A stop that shows no effect in the node's status is sent again after this."""
    rebalance_period_s: float = 0.0
    """Seconds between looks at whether requests should move although nobody asked; 0: never."""
    backoff_first_s: float = 1.0
    backoff_limit_s: float = 30.0
    init_grace_s: float = 30.0
    """A start without progress is ended by its nodeagent after `init_timeout`; this much later by the scheduler, should that fail."""
    stable_after_s: float = 30.0
    """An instance that failed after serving this long does not lengthen the back-off."""

    prefetch: bool = True
    """Weights of models that are likely to be asked for are brought to nodes ahead."""
    park_concurrency: int = 2
    """So many starts for parking run on a node at a time; 0: none at all."""
    park_max_attempts: int = 3
    """A model that could not be parked so often in a row is not tried again before it is changed."""
    park_timeout_s: float = 10.0
    """A node has this long after `ready` to find out whether an instance can be suspended."""
    park_failure_window_s: float = 600.0
    """Failures further apart than this are not in a row."""

    def backoff_s(self, failures: int) -> float:
        """Seconds before `replicas.min` tries again after `failures` failures in a row."""
        return float(min(self.backoff_limit_s, self.backoff_first_s * 2 ** min(max(failures - 1, 0), 16)))
