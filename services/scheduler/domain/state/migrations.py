"""Migration orders and times as the leader knows them.

The bucket of migrations has the orders that migrators may execute; a new leader reads it.
"""

from __future__ import annotations

from services.scheduler.domain.cost.learned import Parameter
from services.scheduler.domain.values import value
from shared.contracts.migration import MigrationRecord

DEFAULT_TOKEN_S = 0.0005
"""Prior of a in a·tokens + b: recomputing two thousand tokens takes a second."""
DEFAULT_FIXED_S = 0.02
"""Prior of b."""


@value(frozen=True, slots=True)
class Migration:
    """An order to move the requests of an instance.

    Attributes:
        node: The requested destination; empty: any. Likewise `device`.
        destination: The instance that was found or started for it.
        record: The order as last reported.
        waiting_reason: The reason why the order waits, or is being cancelled.
        attended_at: Time on this leader's clock at which `record` last changed, a migrator was last
            known to be busy with another order, or this order's cancellation was last sent: the
            latest of them.
    """

    migration_id: str
    model: str
    source: str
    since: float
    reason: str
    request_id: str | None = None
    node: str = ""
    device: str = ""
    destination: str = ""
    waiter: str | None = None
    wait: bool = True
    plan_id: str | None = None
    record: MigrationRecord | None = None
    waiting_reason: str = ""
    attended_at: float = 0.0

    @property
    def key(self) -> str:
        return self.migration_id

    @property
    def is_whole_instance(self) -> bool:
        return self.request_id is None

    @property
    def is_ordered(self) -> bool:
        return self.record is not None


@value(frozen=True, slots=True)
class PairTimes:
    """Learned times of migrations from one node to another; None: not measured for them."""

    source: str
    destination: str
    per_token: Parameter | None = None
    fixed: Parameter | None = None


@value(frozen=True, slots=True)
class MigrationTimes:
    """Learned times of one model: seconds for each recomputed token (a), and for each round (b).

    Attributes:
        pairs: The times of pairs of nodes, the newest last.
    """

    model: str
    per_token: Parameter = Parameter(DEFAULT_TOKEN_S)
    fixed: Parameter = Parameter(DEFAULT_FIXED_S)
    pairs: tuple[PairTimes, ...] = ()

    @property
    def key(self) -> str:
        return self.model

    @property
    def is_known(self) -> bool:
        return self.per_token.count > 0

    def find_pair(self, source: str, destination: str) -> PairTimes:
        """Return what was measured for a pair of nodes, which may be nothing."""
        for pair in self.pairs:
            if (pair.source, pair.destination) == (source, destination):
                return pair
        return PairTimes(source, destination)

    def find_between(self, source: str, destination: str) -> MigrationTimes:
        """Return the times for a pair of nodes.

        Values that were not measured for the pair are those of the model.
        """
        pair = self.find_pair(source, destination)
        return MigrationTimes(self.model, pair.per_token or self.per_token, pair.fixed or self.fixed)
