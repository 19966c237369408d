"""Pure decisions: `decide(state, event, now, policy)` says what changes and what is to be sent; nothing here does I/O or reads a clock."""

from services.scheduler.domain.decide import Decision, decide
from services.scheduler.domain.state.cluster import ClusterState

__all__ = ["ClusterState", "Decision", "decide"]
