"""The gateway's event loop: the dispatcher, its effects, and all active requests."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from functools import partial

from services.gateway.adapters.batch_store import BatchStore
from services.gateway.adapters.budget_keeper import BudgetKeeper
from services.gateway.adapters.demand_publisher import DemandPublisher
from services.gateway.adapters.engine_client import EngineClient
from services.gateway.adapters.file_store import FileStore
from services.gateway.adapters.held_bodies import HeldBodies
from services.gateway.adapters.idempotency_store import Claim, Entry, ExistingKey, IdempotencyStore
from services.gateway.adapters.key_marker import KeyMarker
from services.gateway.adapters.key_store import KeyStore
from services.gateway.adapters.key_writer import KeyWriter
from services.gateway.adapters.objective_publisher import ObjectivePublisher
from services.gateway.adapters.prompt_length import PromptLengthChecker
from services.gateway.adapters.rate_limiter import RateLimiter
from services.gateway.adapters.request_probe import RequestProbe
from services.gateway.adapters.response_store import ResponseStore
from services.gateway.adapters.tokenizer_files import TokenizerFiles
from services.gateway.adapters.usage_meter import OPEN_INTERVAL_S, UsageMeter
from services.gateway.authorization import Authorizer
from services.gateway.domain.admission import Admission, ByteLimits
from services.gateway.domain.batches.pacing import BATCH_PRIORITY
from services.gateway.domain.catalog import Catalog
from services.gateway.domain.dispatcher import Dispatcher
from services.gateway.domain.engine_request import EngineRequest
from services.gateway.domain.latency_log import LatencyLog
from services.gateway.domain.lora_prefetch import LoraPrefetch, PrefetchTarget
from services.gateway.domain.objectives import ObjectiveCounter, meets_objective
from services.gateway.domain.route_table import Route
from services.gateway.domain.stored_responses import StorageBounds
from services.gateway.domain.ticket import Stage, Ticket
from services.gateway.idempotency.followed import record_followed
from services.gateway.idempotency.idempotent_request import IdempotentRequest
from services.gateway.readiness import Readiness
from services.gateway.requests.active_request import ActiveRequest
from services.gateway.requests.active_view import view_active
from services.gateway.requests.sink import TokenSink
from services.gateway.requests.used import followed_usage, open_usage, usage_record
from services.gateway.settings import GatewaySettings
from services.gateway.telemetry.request_log import RequestLog, RequestOrigin
from shared.contracts.active_requests import MAX_LISTED, RequestsViewed
from shared.contracts.demand import Demand, DemandNoted, LoadFailed
from shared.contracts.latencies import LatenciesViewed
from shared.contracts.models import ModelCard
from shared.contracts.node import InstanceState, NodeChanges, NodeStatus
from shared.errors import AuthenticationFailed, ModelNotFound, ShuttingDown, ThawError
from shared.messaging import Mesh
from shared.messaging.connection import Connection
from shared.node_statuses import NodeStatuses
from shared.tasks import end
from shared.telemetry.tracing import traceparent

TICK_S = 0.1
IDLE_TICK_S = 1.0
PAUSED_S = 1.0
"""A tick this late shows that the process was paused: stopped, or starved of CPU time."""


def byte_limits(settings: GatewaySettings) -> ByteLimits:
    """Read the limits on bytes from the settings."""
    return ByteLimits(settings.max_open_bytes, settings.max_open_bytes_per_key, settings.max_open_bytes_per_model)


def _minute() -> int:
    """Return the present minute of Unix time, by which latencies of several gateways are merged."""
    return int(time.time() // 60)


class Gateway:
    """Own the gateway's state, and implement the dispatcher's `Effects`.

    All methods run on the event loop. Those that are not coroutines never block.
    """

    def __init__(
        self,
        mesh: Mesh,
        settings: GatewaySettings,
        request_log: RequestLog,
        gateway_id: str | None = None,
        *,
        is_exposed: bool = False,
    ) -> None:
        """Create a gateway that has not joined the mesh yet.

        Args:
            gateway_id: Name of the gateway on the mesh; by default a new one.
            is_exposed: Other machines can reach the HTTP endpoint.
        """
        self.id = gateway_id or uuid.uuid4().hex
        self.mesh = mesh
        self.settings = settings
        self.catalog = Catalog()
        self.request_log = request_log
        self.dispatcher = Dispatcher(self.id, self)
        self.engines = EngineClient(mesh, self.id)
        bounds = StorageBounds(settings.responses_per_key, settings.responses_bytes_per_key, settings.responses_ttl)
        self.responses = ResponseStore(mesh, bounds)
        self.files = FileStore(mesh, settings.files_ttl)
        self.batches = BatchStore(mesh, self.files)
        self.idempotency = IdempotencyStore(mesh, self.id, settings.idempotency_ttl, settings.idempotency_bytes)
        key_store = KeyStore(KeyMarker(settings.state / "gateway"))
        key_store.on_removed = self.on_key_removed
        self.closing = asyncio.Event()
        self.readiness = Readiness(mesh, self.catalog, key_store, self.closing, settings.starting_timeout)
        self.key_writer = KeyWriter(mesh, key_store, self.readiness.catch_up_keys)
        self.rate_limits = RateLimiter(mesh, self.id, key_store)
        self.authorizer = Authorizer(settings, key_store, is_exposed=is_exposed)
        self.admission = Admission(byte_limits(settings))
        self.held_admission = Admission(
            ByteLimits(settings.max_held_bytes, settings.max_held_bytes_per_key, settings.max_held_bytes)
        )
        self.bodies = HeldBodies(mesh, self.id, settings.state / "gateway" / "bodies")
        self.prompt_lengths = PromptLengthChecker(TokenizerFiles(mesh, self.dispatcher.routes.nodes))
        self.tasks: list[asyncio.Task[None]] = []
        self._probe = RequestProbe(mesh, self.dispatcher)
        self._demand = DemandPublisher(mesh, self._on_demand_reply, self._on_demand_refused)
        self.objectives = ObjectivePublisher(mesh, ObjectiveCounter(self.id))
        key_usage = self.request_log.metrics.key_usage
        self.usage = UsageMeter(mesh, self.id, settings.state / "gateway" / "usage", key_usage.add)
        self.budgets = BudgetKeeper(mesh, key_store, self.usage.unreported, self.usage.reporting)
        self._statuses = NodeStatuses()
        self._lora_prefetch = LoraPrefetch()
        self._latencies = LatencyLog(_minute())
        self._requests: dict[str, ActiveRequest] = {}
        self._opened = asyncio.Event()
        self._ticket_ids: dict[str, str] = {}
        self._idempotent_tasks: set[asyncio.Task[None]] = set()

    # Requests.

    def open(
        self,
        engine_request: EngineRequest,
        card: ModelCard,
        sink: TokenSink,
        origin: RequestOrigin,
        key: tuple[Claim | ExistingKey, Entry] | None = None,
    ) -> ActiveRequest:
        """Accept a request, and send or queue it.

        Args:
            key: The request's idempotency key as the store has it, and the entry to create if the
                key is deleted meanwhile.
        """
        now = time.monotonic()
        ticket = Ticket(
            id=uuid.uuid4().hex,
            model=card.name,
            arrived_at=origin.arrived_at,
            queue_deadline=now + card.spec.queue.timeout,
            response_timeout_s=card.spec.response_timeout,
            traceparent=traceparent(origin.span),
            queue_timeout_s=card.spec.queue.timeout,
            key=origin.caller.name,
            cost=origin.cost,
            weight=origin.caller.weight,
            priority=origin.priority,
        )
        buffer_limit_bytes = self.settings.stream_buffer_bytes
        request = ActiveRequest(ticket, card, engine_request, sink, self.dispatcher, buffer_limit_bytes)
        request.key_digest, request.received_at = origin.caller.digest, origin.received_at
        if card.spec.slo.is_set and card.spec.base is None and origin.priority > BATCH_PRIORITY:
            request.standing = partial(self.objectives.standing, ticket.model)
        request.meter = partial(self._meter, request, origin)
        self._requests[ticket.id] = request
        self._opened.set()
        self._ticket_ids[origin.request_id] = ticket.id
        if key is None:
            self.dispatcher.on_request(ticket, card.spec.queue.max_waiting, now)
        else:
            self._run_idempotent(request, *key)
        self._prefetch_lora(request)
        return request

    def _run_idempotent(self, request: ActiveRequest, place: Claim | ExistingKey, new_entry: Entry) -> None:
        idempotent = IdempotentRequest(
            self.id,
            self.idempotency,
            self.dispatcher,
            self.engines,
            request,
            place,
            new_entry,
            self.usage.settle,
            partial(self.usage.end, request.ticket.id),
        )
        request.attach_idempotency(idempotent)
        task = asyncio.create_task(idempotent.run(), name="idempotency key")
        self._idempotent_tasks.add(task)
        task.add_done_callback(self._idempotent_tasks.discard)

    def close(self, request: ActiveRequest, origin: RequestOrigin) -> None:
        """Release and log a request whose response is written or abandoned."""
        request.cancel()
        self.engines.forget(request.attempt.id)
        del self._requests[request.ticket.id]
        if self._ticket_ids.get(origin.request_id) == request.ticket.id:
            del self._ticket_ids[origin.request_id]
        is_met = self._judge(request)
        trace = self.request_log.record(request, origin)
        if self._counts_for_objectives(request):
            self._latencies.record(trace, is_met, _minute())

    def _meter(self, request: ActiveRequest, origin: RequestOrigin) -> None:
        """Record the usage of a request, before its client has the end of the response."""
        if (record := usage_record(request, origin.caller.name)) is not None:
            self.budgets.on_record(origin.caller.key, record)
            self.usage.record(record, request.ticket.id)
        elif request.idempotency is not None and (response := request.idempotency.followed) is not None:
            route = self.dispatcher.routes.get(response.instance_id)
            served = route.status if route is not None else None
            self.usage.note_followed(followed_usage(request, origin.caller.name, response, served))
        else:
            self.usage.end(request.ticket.id)

    @staticmethod
    def _counts_for_objectives(request: ActiveRequest) -> bool:
        return not request.response.is_replay and request.ticket.priority > BATCH_PRIORITY

    def render_metrics(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics and their content type, as `Metrics.render` does."""
        self.usage.sum_up()
        return self.request_log.metrics.render(accept)

    def view_latencies(self, model: str) -> LatenciesViewed:
        """Return this gateway's latencies of a model in the last hour."""
        since, minutes = self._latencies.view(model, _minute())
        return LatenciesViewed(gateway=self.id, since=since, minutes=minutes)

    def view_requests(self) -> RequestsViewed:
        """Return the requests that this gateway serves, the oldest first."""
        active = ((request_id, self._requests[ticket_id]) for request_id, ticket_id in self._ticket_ids.items())
        running = [(request_id, request) for request_id, request in active if not request.completion.is_done]
        views = tuple(view_active(request_id, request) for request_id, request in running[:MAX_LISTED])
        return RequestsViewed(gateway=self.id, total=len(running), requests=views)

    def _judge(self, request: ActiveRequest) -> bool | None:
        """Count whether the request met its model's objective; return None if it does not count."""
        if not self._counts_for_objectives(request):
            return None
        stats, completion, arrived_at = request.stats, request.completion, request.ticket.arrived_at
        now = time.monotonic()
        is_met = meets_objective(
            request.card.spec.slo,
            stats.first_token_at - arrived_at if stats.first_token_at is not None else None,
            stats.tpot_s(completion.done_at or now),
            (completion.done_at or now) - arrived_at,
            completion.error,
            has_client_left=completion.has_client_left,
        )
        if is_met is not None:
            self.objectives.count(request.ticket.model, is_met=is_met)
            self.request_log.metrics.record_objective(request.ticket.model, is_met=is_met)
        return is_met

    def request_of_attempt(self, attempt_id: str) -> ActiveRequest | None:
        """Return the active request that an attempt belongs to."""
        return self._requests.get(attempt_id.rpartition("-")[0])

    def ticket_of(self, request_id: str) -> Ticket | None:
        """Return the ticket of an active request by the id that its client knows."""
        request = self._requests.get(self._ticket_ids.get(request_id, ""))
        return request.ticket if request is not None else None

    # Effects of the dispatcher.

    def send(self, ticket: Ticket, route: Route) -> None:
        request = self._requests[ticket.id]
        if request.idempotency is not None:
            request.idempotency.send(route)
            return
        self.engines.forget(request.attempt.id)
        request.begin_attempt(route, time.monotonic())
        self.engines.send(request.infer_message(), request)

    def cancel(self, ticket: Ticket) -> None:
        self.engines.cancel(ticket.instance_id or "", ticket.attempt_id)
        self.engines.forget(self._requests[ticket.id].attempt.id)

    def fail(self, ticket: Ticket, error: ThawError) -> None:
        self._requests[ticket.id].completion.fail(error)

    def probe(self, ticket: Ticket) -> None:
        self._probe.start(ticket)
        self._read_missed_messages(self._requests[ticket.id])

    def on_requeued(self, ticket: Ticket) -> None:
        request = self._requests[ticket.id]
        request.handle_requeue()
        self._prefetch_lora(request)

    def publish_demand(self, demand: Demand) -> None:
        self._demand.publish(demand)

    # Events from the mesh.

    def _on_reconnected(self) -> None:
        """Look for messages that NATS stored or lost while this gateway was not connected."""
        self.dispatcher.on_reconnected(time.monotonic())
        for request in list(self._requests.values()):
            self._read_missed_messages(request)

    @staticmethod
    def _read_missed_messages(request: ActiveRequest) -> None:
        """Read what NATS stored for the request; only idempotent requests have stored messages."""
        if request.idempotency is not None:
            request.idempotency.catch_up()

    async def on_status(self, status: NodeStatus) -> None:
        self._statuses.on_status(status, time.monotonic())
        self._apply_status(status)

    async def on_changes(self, changes: NodeChanges) -> None:
        status = self._statuses.on_changes(changes)
        if status is not None:
            self._apply_status(status, frozenset(i.instance_id for i in changes.instances))

    def _apply_status(self, status: NodeStatus, changed: frozenset[str] | None = None) -> None:
        self.dispatcher.on_status(status, time.monotonic(), changed)
        self._load_adapters(self._lora_prefetch.on_status(status, self.dispatcher.count_waiting))

    async def on_load_failed(self, event: LoadFailed) -> None:
        self.dispatcher.on_load_failed(event, time.monotonic())

    def on_model_removed(self, name: str) -> None:
        error = ModelNotFound(f"The model `{name}` was removed", param="model")
        self.dispatcher.on_model_removed(name, error, time.monotonic())
        # Every instance gets the command: one may have loaded the adapter since its last status.
        if not any(True for _ in self.dispatcher.routes.iter_routes(name)):
            for route in self.dispatcher.routes.iter_all():
                if route.status.state is InstanceState.READY:
                    self.engines.drop_adapter(route.status.instance_id, name)

    def on_key_removed(self, digest: str) -> None:
        """End the requests of an API key that was revoked."""
        for request in list(self._requests.values()):
            if request.key_digest == digest and not request.completion.is_done:
                error = AuthenticationFailed("The API key was revoked while this request was active", should_retry=False)
                self.dispatcher.on_abort(request.ticket, error, time.monotonic())

    def _prefetch_lora(self, request: ActiveRequest) -> None:
        """Load the LoRA adapter of a waiting request on instances that are starting."""
        adapter = request.engine_request.lora_adapter
        if adapter is not None and request.ticket.stage in (Stage.NEW, Stage.QUEUED):
            self._load_adapters(self._lora_prefetch.on_request(request.ticket.model, adapter))

    def _load_adapters(self, targets: list[PrefetchTarget]) -> None:
        for instance_id, adapter in targets:
            self.engines.load_adapter(instance_id, adapter)

    def _on_demand_reply(self, demand: Demand, reply: DemandNoted) -> None:
        self.dispatcher.on_demand_reply(demand.model, reply, time.monotonic())

    def _on_demand_refused(self, demand: Demand, error: ThawError) -> None:
        self.dispatcher.on_load_failed(LoadFailed(model=demand.model, error=error.body()), time.monotonic())

    # Start and shutdown.

    async def run(self, group: asyncio.TaskGroup) -> None:
        """Start the background tasks; the mesh must be connected."""
        await asyncio.to_thread(self.usage.open)
        await self.engines.start()
        await self.bodies.start()
        self.tasks = [
            group.create_task(self.engines.run(), name="publish"),
            group.create_task(self._demand.run(), name="demand"),
            group.create_task(self.objectives.run(), name="objectives"),
            group.create_task(self.usage.run(), name="usage"),
            group.create_task(self._note_open(), name="open usage"),
            group.create_task(self._tick(), name="tick"),
            group.create_task(self.rate_limits.run(), name="rate limits"),
            group.create_task(self.budgets.run(), name="budgets"),
        ]
        if self.usage.unresolved:
            self.tasks.append(group.create_task(record_followed(self.idempotency, self.usage), name="followed responses"))
        self.readiness.has_joined = True

    async def _note_open(self) -> None:
        """Note the device time of open requests at intervals, until cancelled."""
        while True:
            await self._opened.wait()
            await asyncio.sleep(OPEN_INTERVAL_S)
            found = (open_usage(request, request.ticket.key) for request in self._requests.values())
            self.usage.note_open([usage for usage in found if usage is not None])

    async def _tick(self) -> None:
        """Check deadlines until cancelled. Before nodes are lost, NATS has to answer."""
        connection = Connection(self.mesh)
        with self.mesh.on_reconnect(self._on_reconnected):
            while True:
                await self._wait_for_tick()
                is_node_silent = self.dispatcher.routes.has_silent_node(time.monotonic())
                connected_since = await connection.find_start(probe=is_node_silent)
                self.dispatcher.on_tick(time.monotonic(), connected_since)
                self.readiness.on_tick()

    async def _wait_for_tick(self) -> None:
        """Wait until the next check: checks are rare while no request is in flight, to save CPU.

        If the process was paused, the messages of that time are handled before the check.
        """
        began = time.monotonic()
        if self._requests or not self.readiness.is_state_read:
            await asyncio.sleep(TICK_S)
        else:
            self._opened.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._opened.wait(), IDLE_TICK_S)
        if time.monotonic() - began > IDLE_TICK_S + PAUSED_S:
            await asyncio.sleep(IDLE_TICK_S)

    def begin_closing(self) -> None:
        """Refuse new requests; active ones continue."""
        self.closing.set()
        self.dispatcher.on_closing()

    def end_all(self) -> None:
        """Fail the requests that are still active after the drain timeout."""
        for request in list(self._requests.values()):
            if request.completion.is_done:
                continue
            if request.idempotency is not None:
                request.idempotency.release_key(ShuttingDown())
            else:
                self.dispatcher.on_abort(request.ticket, ShuttingDown(), time.monotonic())

    async def settle(self, timeout_s: float) -> None:
        """Wait until the idempotency keys of ended requests record how those ended."""
        if self._idempotent_tasks:
            await asyncio.wait(self._idempotent_tasks, timeout=timeout_s)
        await end(*self._idempotent_tasks)
