"""The meter of memory over time: integrates the nodes' reports, and records them in the ledger.

Each node has a clock in the ledger: the time up to which its memory is recorded. Charges and clock
are written in one transaction. So a leader that ends loses nothing: the next one charges from the
clock on, and a batch that was recorded before its reply was lost is not recorded twice.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from services.scheduler.adapters.ledger import CLOCKS_KEPT_S, HeldBatch, Ledger
from services.scheduler.domain.background_work import BackgroundReading, find_processes, find_uncounted, list_background
from services.scheduler.domain.device_accounts import AccountHistory, AccountName
from services.scheduler.domain.holdings import HOUR_S, Charge, Holding, charge, list_cached, list_holdings
from services.scheduler.domain.state.cluster import ClusterState
from shared.contracts.loader import LoaderStatus
from shared.contracts.node import NodeStatus

log = logging.getLogger(__name__)
FLUSH_PERIOD_S = 10.0
_CACHE = "/dram"
"""Behind a node's name, that of the clock of its cached weights."""
_ACCOUNTS = "/accounts"
"""Name of the clock that has the start of the accounts of device time."""
_DAY_S = 86_400.0
_PLANS_SINCE_S = 3600.0
"""Plans of starts that are looked at: a start that takes longer is charged by the next leader."""


_GIVEN_UP_AFTER_S = 1800.0
"""The owner pays for a start for which no request was recorded within it; a later one shares it."""


@dataclass(slots=True)
class _Node:
    """Charges for the memory of one node.

    Attributes:
        since: The memory is charged, here or in the ledger, up to this time.
    """

    since: float
    boot_id: str = ""
    seq: int = -1
    held: tuple[Holding, ...] | None = None
    opened_at: float = 0.0
    charges: dict[Charge, float] = field(default_factory=dict)
    processes: dict[str, int] = field(default_factory=dict)
    readings: frozenset[BackgroundReading] = frozenset()
    uncounted: set[AccountName] = field(default_factory=set)


class HeldMemory:
    """The meter of one term."""

    def __init__(self, ledger: Ledger, state: ClusterState, epoch: int, longest_s: float) -> None:
        """Create a meter.

        Args:
            ledger: Where charges are recorded.
            state: The leader's state: since when instances exist, and whose models they are of.
            epoch: The leader's epoch.
            longest_s: The longest pause between the reports of a living node.
        """
        self._ledger = ledger
        self._state = state
        self._epoch = epoch
        self._longest_s = longest_s
        self._nodes: dict[str, _Node] = {}
        self._clocks: dict[str, float] = {}
        """By node: the time up to which its memory is recorded, when the term began or since the
        node is gone.
        """
        self._gone: set[str] = set()
        """Nodes that are removed once their charges are taken."""
        self._pending: tuple[HeldBatch, ...] = ()
        self._readings: dict[tuple[str, str], BackgroundReading] = {}
        """New readings of background work, which are not recorded yet."""
        self._older: set[str] = set()
        """Engines older than the accounts. Found when read: the state forgets instances."""
        self._accounts = AccountHistory()
        self._plans_since_s = 24 * _PLANS_SINCE_S
        self._day = 0
        """The day, since 1970, in which unchanged readings were asked for again."""

    async def load(self) -> None:
        """Read the clocks. Call it once, before the first report."""
        self._clocks = await self._ledger.read_held_clocks()

    def on_status(self, status: NodeStatus, now: float) -> None:
        """Charge the time since the node's last report."""
        node = self._find(status.node, now)
        if node.boot_id == status.boot_id and status.seq < node.seq:
            return
        node.processes = find_processes(status, node.processes)
        readings = frozenset(list_background(status, node.processes))
        news = readings - node.readings
        self._older.update(engine for engine in {r.engine for r in news} if self._is_older(engine))
        self._readings |= {(r.engine, r.plan_id): r for r in news}
        node.readings, node.uncounted = readings, find_uncounted(status)
        self._advance(node, list_holdings(status), now)
        node.boot_id, node.seq = status.boot_id, status.seq

    def on_loader_status(self, status: LoaderStatus, now: float) -> None:
        """Charge the time of a node's cached weights since its loader's last status."""
        self._advance(self._find(f"{status.node}{_CACHE}", now), list_cached(status), now)

    def forget(self, node: str) -> None:
        """Remove a node that is gone, once what was charged is recorded.

        If it reports again, its memory is charged from its clock on, as by the next leader.
        """
        self._gone |= self._nodes.keys() & {node, f"{node}{_CACHE}"}

    def _find(self, name: str, now: float) -> _Node:
        self._gone.discard(name)
        node = self._nodes.get(name)
        if node is None:
            since = min(now, self._clocks.get(name, now))
            node = self._nodes[name] = _Node(since, opened_at=since)
        return node

    def _advance(self, node: _Node, held: tuple[Holding, ...], now: float) -> None:
        # The first report of a term stands for the time without a leader, too.
        before = node.held if node.held is not None else held
        for what, amount in charge(before, held, (node.since, now), self._known_since, self._longest_s).items():
            node.charges[what] = node.charges.get(what, 0.0) + amount
        node.since, node.held = max(now, node.since), held

    def _known_since(self, instance_id: str) -> float:
        since = self._sent_at(instance_id)
        return since if since is not None else 0.0

    def _sent_at(self, instance_id: str) -> float | None:
        instance = self._state.instances.get(instance_id)
        return instance.sent_at if instance is not None else None

    async def flush(self, now: float) -> None:
        """Record what was charged since the last time; a batch that failed goes first.

        Starts that no request asked for are charged to the owners of their models. What starts took
        from others, and what engines worked for no request, is recorded.

        Raises:
            StaleEpoch: Another leader was elected.
            SQLAlchemyError: The database failed. The next call repeats the batch.
        """
        if not self._pending:
            self._pending = self._take()
            self._remove_gone(now)
        self._repeat_readings(int(now // _DAY_S))
        if self._pending:
            await self._ledger.record_held(self._epoch, self._pending)
            self._pending = ()
        if readings := self._readings:
            self._readings = {}
            try:
                hour = int(now // HOUR_S)
                await self._ledger.record_background(self._epoch, tuple(readings.values()), hour, self._owner, self._older)
            except BaseException:
                self._readings = readings | self._readings
                raise
        await self._settle_accounts(now)
        await self._ledger.record_starts(self._epoch, now - self._plans_since_s, self._owner, now - _GIVEN_UP_AFTER_S)
        self._plans_since_s = _PLANS_SINCE_S

    async def _settle_accounts(self, now: float) -> None:
        uncounted = set[AccountName]().union(*(node.uncounted for node in self._nodes.values()))
        settled, hour = self._accounts.find_settled(now), int(now // HOUR_S)
        self._accounts.add(now, await self._ledger.settle_accounts(self._epoch, settled, uncounted, hour, self._owner))

    def _is_older(self, engine: str) -> bool:
        """True if the instance, named with its process, is older than the accounts."""
        since = self._sent_at(engine.rpartition("/")[0])
        return since is not None and since < self._clocks.get(_ACCOUNTS, 0.0)

    def _take(self) -> tuple[HeldBatch, ...]:
        batches = []
        for name, node in self._nodes.items():
            if node.since > node.opened_at:
                batches.append(HeldBatch(name, node.opened_at, node.since, self._rows(node.charges)))
                node.opened_at, node.charges = node.since, {}
        return tuple(batches)

    def _remove_gone(self, now: float) -> None:
        """Remove the nodes that are gone, whose charges have been taken."""
        if not self._gone:
            return
        for name in self._gone:
            self._clocks[name] = self._nodes.pop(name).since
        self._gone.clear()
        self._clocks = {name: at for name, at in self._clocks.items() if name == _ACCOUNTS or at >= now - CLOCKS_KEPT_S}

    def _repeat_readings(self, day: int) -> None:
        """Let the next statuses record unchanged readings again, once a day.

        The ledger forgets a reading that is old. The next one of that engine would count from zero.
        """
        if day != self._day:
            self._day = day
            for node in self._nodes.values():
                node.readings = frozenset()

    def _rows(self, charges: dict[Charge, float]) -> dict[tuple[int, str, str, str], float]:
        rows: dict[tuple[int, str, str, str], float] = {}
        by_revision = self._group_models() if any(kind == "cache" for _, _, kind in charges) else {}
        for (hour, holder, kind), amount in charges.items():
            models = by_revision.get(holder, [""]) if kind == "cache" else [holder]
            for model in models:
                row = (hour, self._owner(model), model, kind)
                rows[row] = rows.get(row, 0.0) + amount / len(models)
        return rows

    def _group_models(self) -> dict[str, list[str]]:
        """Return the models by the revision of their weights."""
        found: dict[str, list[str]] = {}
        for model in self._state.models.values():
            found.setdefault(model.card.info.revision, []).append(model.key)
        return found

    def _owner(self, model: str) -> str:
        known = self._state.models.get(model)
        return known.card.spec.owner if known is not None else ""
