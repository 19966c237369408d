"""Messages to the leader, turned into events for its loop, and their answers."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

from pydantic import Field, TypeAdapter

from services.scheduler.adapters import clock
from services.scheduler.adapters.database import DATABASE_ERRORS
from services.scheduler.adapters.held_memory import HeldMemory
from services.scheduler.adapters.ledger import Ledger
from services.scheduler.adapters.migrations import Migrations
from services.scheduler.adapters.repository import Repository, StaleEpoch
from services.scheduler.adapters.spending import Spending
from services.scheduler.domain.admin.commands import check_names, check_sources, check_unchanged, needs_inspection
from services.scheduler.domain.effects import ReplyTo
from services.scheduler.domain.events import (
    AddModelsRequested,
    ChangeNodeRequested,
    DemandReceived,
    Event,
    LoaderStatusReceived,
    MigrationRequested,
    NodeStatusReceived,
    ObjectivesReported,
    PullCancelRequested,
    PullRequested,
    RemoveModelRequested,
    SleepRequested,
    WaiterCancelled,
    WakeRequested,
)
from services.scheduler.domain.policy import Policy
from services.scheduler.domain.suspensions import SuspensionStep, SuspensionWatch
from services.scheduler.explain import Explainer
from services.scheduler.loop import SchedulerLoop
from services.scheduler.views import view
from shared.contracts import subjects
from shared.contracts.admin import (
    ADMIN_REQUEST,
    AddModels,
    AdminRequest,
    CancelPulls,
    ChangeNode,
    ExplainPlan,
    Migrate,
    MigrationsViewed,
    PullModel,
    RemoveModel,
    SleepModel,
    ViewCluster,
    ViewMigrations,
    WakeModel,
)
from shared.contracts.base import ErrorBody, Message
from shared.contracts.demand import Demand
from shared.contracts.loader import Inspected, InspectModel, LoaderStatus
from shared.contracts.model_info import ModelInfo
from shared.contracts.models import ModelSpec
from shared.contracts.node import InstanceState, NodeChanges, NodeStatus
from shared.contracts.objectives import ReportObjectives
from shared.contracts.usage import ReportUsage, ViewSpending, ViewUsage
from shared.errors import DeadlineExceeded, InvalidRequest, NotFound, Unavailable, Unreachable, from_body
from shared.messaging import Mesh, Responder
from shared.messaging.responders import CONCURRENT_HANDLERS
from shared.node_statuses import NodeStatuses

log = logging.getLogger(__name__)
DEMAND: TypeAdapter[Demand] = TypeAdapter(Demand)
USAGE: TypeAdapter[ReportUsage | ViewSpending] = TypeAdapter(Annotated[ReportUsage | ViewSpending, Field(discriminator="kind")])
OBJECTIVES: TypeAdapter[ReportObjectives] = TypeAdapter(ReportObjectives)
MAX_CHANGES = 1024
"""Admin requests that may wait at a time, as for a model to be ready; further ones are refused."""
Change = AddModels | RemoveModel | WakeModel | SleepModel | PullModel | CancelPulls | ChangeNode | Migrate
View = ExplainPlan | ViewMigrations | ViewUsage | ViewCluster
_FIND_LOADER_S = 10.0
_INSPECT_AGAIN_MS = 10_000
"""A repeated inspection waits for the one in progress."""


@contextmanager
def _database_errors_as_unavailable(what: str) -> Iterator[None]:
    try:
        yield
    except (*DATABASE_ERRORS, StaleEpoch) as e:
        raise Unavailable(f"{what} cannot be used now ({type(e).__name__}). Try again", should_retry=True) from e


class Handlers:
    """The message handlers of one term."""

    def __init__(
        self,
        mesh: Mesh,
        loop: SchedulerLoop,
        repository: Repository,
        ledger: Ledger,
        policy: Policy,
        name: str,
        migrations: Migrations,
        held: HeldMemory,
        on_suspension: Callable[[SuspensionStep], None],
    ) -> None:
        self._mesh = mesh
        self._loop = loop
        self._repository = repository
        self._ledger = ledger
        self.spending = Spending(ledger)
        self._held = held
        self._statuses = NodeStatuses()
        self._suspensions = SuspensionWatch()
        self._on_suspension = on_suspension
        self._policy = policy
        self._name = name
        self._explainer = Explainer(mesh, loop.state, repository, policy, migrations)
        self._migrations = migrations
        self._numbers = itertools.count(1)
        self._waiting: dict[str, asyncio.Future[Message]] = {}
        self._changes = 0
        self._over = False
        self._responders: list[Responder] = []

    async def start(self) -> None:
        """Subscribe to node status first, then to requests."""
        self._responders = [
            self._mesh.listen(subjects.ALL_NODE_STATUS, NodeStatus, self._node_status),
            self._mesh.listen(subjects.ALL_NODE_CHANGES, NodeChanges, self._node_changes),
            self._mesh.listen(subjects.ALL_LOADER_STATUS, LoaderStatus, self._loader_status),
            self._mesh.respond(subjects.DEMAND, DEMAND, self._demand, concurrent=True),
            self._mesh.respond(subjects.OBJECTIVES, OBJECTIVES, self._objectives, concurrent=True),
            self._mesh.respond(subjects.USAGE, USAGE, self._usage),
            self._mesh.respond(subjects.ADMIN, ADMIN_REQUEST, self._admin, concurrent=True, most=MAX_CHANGES + CONCURRENT_HANDLERS),
        ]
        for responder in self._responders:
            await responder.start()
        await self._mesh.flush()

    async def stop(self) -> None:
        """Stop listening; pending requests get a retryable error."""
        self._over = True
        error = Unavailable("This scheduler is no longer the leader. Try again", retry_after_ms=500, should_retry=True)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
        await asyncio.gather(*(responder.stop() for responder in self._responders))

    def reply(self, effect: ReplyTo) -> None:
        future = self._waiting.get(effect.waiter)
        if future is None or future.done():
            return
        if isinstance(effect.answer, ErrorBody):
            future.set_exception(from_body(effect.answer))
        else:
            future.set_result(effect.answer)

    def forget_node(self, node: str) -> None:
        """Remove what the handlers keep of a node that is gone."""
        self._suspensions.forget(node)
        self._held.forget(node)

    async def _ask(self, event: Callable[[str], Event]) -> Message:
        """Post an event that names a waiter, and return its answer."""
        if self._over:
            raise Unavailable("This scheduler is no longer the leader. Try again", retry_after_ms=500, should_retry=True)
        waiter = f"w{next(self._numbers)}"
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = future
        try:
            self._loop.post(event(waiter))
            return await future
        finally:
            del self._waiting[waiter]
            if future.cancelled():
                self._loop.post(WaiterCancelled(clock.now(), waiter))

    async def _node_status(self, status: NodeStatus) -> None:
        now = clock.now()
        self._statuses.on_status(status, now)
        self._measure(status, now)
        self._loop.post(NodeStatusReceived(now, status))

    async def _node_changes(self, changes: NodeChanges) -> None:
        now = clock.now()
        status = self._statuses.on_changes(changes)
        if status is not None:
            self._measure(status, now)
            self._loop.post(NodeStatusReceived(now, status, frozenset(i.instance_id for i in changes.instances)))

    def _measure(self, status: NodeStatus, now: float) -> None:
        """Charge what the node holds, and record its suspensions, which decide nothing."""
        self._held.on_status(status, now)
        for step in self._suspensions.on_status(status):
            self._on_suspension(step)

    async def _loader_status(self, status: LoaderStatus) -> None:
        now = clock.now()
        self._held.on_loader_status(status, now)
        self._loop.post(LoaderStatusReceived(now, status))

    async def _demand(self, demand: Demand) -> Message:
        at = clock.now()
        return await self._ask(lambda waiter: DemandReceived(at, demand, waiter))

    async def _objectives(self, report: ReportObjectives) -> Message:
        at = clock.now()
        return await self._ask(lambda waiter: ObjectivesReported(at, report, waiter))

    async def _usage(self, request: ReportUsage | ViewSpending) -> Message:
        """Record usage, or sum up what keys spent.

        The ledger is no part of the cluster's state, and takes no decision. Requests are served one
        after the other, so that sums and records do not overlap.
        """
        if self._over:
            raise Unavailable("This scheduler is no longer the leader. Try again", retry_after_ms=500, should_retry=True)
        with _database_errors_as_unavailable("The ledger"):
            if isinstance(request, ViewSpending):
                return await self.spending.view(request, clock.hour())
            return await self.spending.record(self._loop.state.epoch, request, clock.hour())

    async def _admin(self, request: AdminRequest) -> Message:
        """Answer a request of an operator.

        Some wait for minutes. Their number is limited below that of all requests that are handled
        at a time, so that they never keep a view from being answered.
        """
        if isinstance(request, View):
            return await self._view(request)
        if self._changes >= MAX_CHANGES:
            raise Unavailable(
                f"{self._changes} requests of operators wait for the scheduler. Try again later",
                retry_after_ms=1_000,
                should_retry=True,
            )
        self._changes += 1
        try:
            return await self._change(request)
        finally:
            self._changes -= 1

    async def _view(self, request: View) -> Message:
        match request:
            case ExplainPlan():
                with _database_errors_as_unavailable("The database"):
                    return await self._explainer.explain(request)
            case ViewMigrations(migration_id=migration_id, limit=limit):
                return MigrationsViewed(migrations=self._migrations.list_latest(migration_id, limit))
            case ViewUsage():
                with _database_errors_as_unavailable("The ledger"):
                    return await self._ledger.view(request)
            case ViewCluster(brief=brief):
                return view(self._loop.state, self._name, clock.now(), self._policy, brief=brief)

    async def _change(self, request: Change) -> Message:
        at = clock.now()
        match request:
            case AddModels():
                return await self._add(request)
            case RemoveModel(name=name, with_adapters=too):
                return await self._ask(lambda w: RemoveModelRequested(at, w, name, too))
            case WakeModel(name=name):
                return await self._ask(lambda w: WakeRequested(at, w, name))
            case SleepModel(name=name):
                return await self._ask(lambda w: SleepRequested(at, w, name))
            case PullModel(name=name, options=options):
                return await self._ask(lambda w: PullRequested(at, w, name, options.node, options.tier, request.request_id))
            case CancelPulls(name=name, node=place, tier=tier):
                return await self._ask(lambda w: PullCancelRequested(at, w, name, place, tier))
            case ChangeNode(node=node, action=action):
                return await self._ask(lambda w: ChangeNodeRequested(at, w, node, action))
            case Migrate():
                return await self._migrate(request)

    async def _migrate(self, request: Migrate) -> Message:
        if (request.request_id is None) == (request.instance_id is None):
            raise InvalidRequest("The request names no source. Give a request_id or an instance_id")
        source, name = request.instance_id, request.request_id
        if name is not None:
            found = await self._migrations.find_request(name)
            name = found.request_id if found is not None else name
            serving = [
                i.instance_id
                for i in self._loop.state.instances.values()
                if i.state in (InstanceState.READY, InstanceState.DRAINING)
            ]
            source = found.instance_id if found is not None else await self._migrations.find(name, serving)
        if source is None:
            raise NotFound(f"No engine serves request {request.request_id!r} now; it may be over", param="request_id")
        at, instance_id = clock.now(), source
        to = (request.node or "", request.device or "")
        return await self._ask(lambda w: MigrationRequested(at, w, instance_id, name, *to, request.wait))

    async def _add(self, request: AddModels) -> Message:
        """Have a loader read the files of new models, then register all models or none.

        With `request.reread` the loader reads the files of all models. A known model then stays as
        it is while its source is unreachable.
        """
        check_unchanged(self._loop.state, request.before)
        check_names(self._loop.state, request.specs, request.prune)
        check_sources(self._loop.state, request.specs, request.replace)
        infos = {}
        needed = needs_inspection(self._loop.state, request.specs)
        for spec in request.specs if request.reread else needed:
            try:
                infos[spec.name] = await self._inspect(spec, request.deadline_ms)
            except Unavailable as e:
                if spec in needed:
                    raise
                log.warning("failed to read a model's files again", extra={"model": spec.name, "error": e.message})
        at = clock.now()
        return await self._ask(
            lambda w: AddModelsRequested(at, w, request.specs, infos, request.prune, request.replace, request.before)
        )

    async def _inspect(self, spec: ModelSpec, deadline_ms: int) -> ModelInfo:
        missing: Exception | None = None
        for node in await self._loaders():
            try:
                return await self._inspect_on(node, spec, min(InspectModel.usual_ms(), deadline_ms))
            except (Unreachable, DeadlineExceeded) as e:
                missing = e
        raise Unavailable(f"No loader could read {spec.public_source} for {spec.name}", should_retry=True) from missing

    async def _inspect_on(self, node: str, spec: ModelSpec, deadline_ms: int) -> ModelInfo:
        """Ask one loader, again after a short time: NATS may have lost the request or its reply."""
        ends = clock.now() + deadline_ms / 1e3
        while True:
            left_ms = max(1, int((ends - clock.now()) * 1e3))
            command = InspectModel(spec=spec, deadline_ms=min(_INSPECT_AGAIN_MS, left_ms))
            try:
                return (await self._mesh.request(subjects.loader_command(node), command, Inspected)).info
            except DeadlineExceeded:
                if left_ms <= _INSPECT_AGAIN_MS:
                    raise

    async def _loaders(self) -> list[str]:
        """Return the nodes with a live loader, after waiting a short time for the first."""
        deadline = clock.now() + _FIND_LOADER_S
        while True:
            now = clock.now()
            state = self._loop.state
            alive = [n for n in sorted(state.loaders) if state.is_loader_alive(n, now, self._policy.node_lost_after_s)]
            if alive:
                return alive
            if now >= deadline:
                raise Unavailable(
                    "No node is alive to read the model's files; start one with `thaw up`, or python -m services.loader",
                    should_retry=True,
                )
            self._loop.loader_status_received.clear()
            try:
                await asyncio.wait_for(self._loop.loader_status_received.wait(), deadline - now)
            except TimeoutError:
                continue
