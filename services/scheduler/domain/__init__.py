"""Pure scheduling decisions, without I/O and without a clock.

`decide(state, event, now, policy)` returns the changes of the state and the effects to carry out.
"""

from services.scheduler.domain.decide import Decision, decide
from services.scheduler.domain.state.cluster import ClusterState

__all__ = ["ClusterState", "Decision", "decide"]
