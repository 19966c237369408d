"""The gateway's one loop: the dispatcher, its effects, and every request that is open."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid

from services.gateway.adapters.demand_publisher import DemandSender
from services.gateway.adapters.engine_client import Engines
from services.gateway.adapters.idempotency_store import Claim, Entry, Found, IdempotencyStore
from services.gateway.adapters.key_marker import KeyMarker
from services.gateway.adapters.key_store import KeyStore
from services.gateway.adapters.prompt_length import Lengths
from services.gateway.adapters.request_probe import Inquiries
from services.gateway.adapters.tokenizer_files import ModelFiles
from services.gateway.authorization import Keys
from services.gateway.domain.admission import Admission, ByteLimits
from services.gateway.domain.catalog import Catalog
from services.gateway.domain.dispatcher import Dispatcher
from services.gateway.domain.engine_request import Ask
from services.gateway.domain.lora_prefetch import EarlyAdapters, Told
from services.gateway.domain.request_limits import Bounds
from services.gateway.domain.ticket import Stage, Ticket
from services.gateway.idempotency.idempotent_request import Keyed
from services.gateway.requests.active_request import Exchange
from services.gateway.requests.sink import Sink
from services.gateway.settings import GatewaySettings
from services.gateway.telemetry.request_log import Origin, Recorder
from shared.contracts.demand import Demand, DemandNoted, LoadFailed
from shared.contracts.models import ModelCard
from shared.contracts.node import InstanceState, NodeStatus
from shared.errors import ModelNotFound, ShuttingDown, ThawError, Unavailable
from shared.messaging import Mesh
from shared.tasks import end
from shared.telemetry.tracing import traceparent

TICK_S = 0.1
_STARTING_RETRY_MS = 1_000
_ADMIN_WAIT_S = 2.0


def bounds_of(settings: GatewaySettings) -> Bounds:
    return Bounds(
        prompts=settings.max_prompts,
        choices=settings.max_choices,
        messages=settings.max_messages,
        content_parts=settings.max_content_parts,
        tools=settings.max_tools,
        stops=settings.max_stops,
        biases=settings.max_logit_biases,
    )


def byte_limits_of(settings: GatewaySettings) -> ByteLimits:
    return ByteLimits(settings.max_open_bytes, settings.max_open_bytes_per_key, settings.max_open_bytes_per_model)


class Gateway:
    """Implements the dispatcher's `Effects`. All methods run on the event loop; none of them waits."""

    def __init__(
        self, mesh: Mesh, settings: GatewaySettings, recorder: Recorder, gateway_id: str | None = None, *, exposed: bool = False
    ) -> None:
        """`exposed`: whether other machines can reach the endpoint."""
        self.id = gateway_id or uuid.uuid4().hex
        self.mesh = mesh
        self.settings = settings
        self.catalog = Catalog()
        self.recorder = recorder
        self.dispatcher = Dispatcher(self.id, self)
        self.engines = Engines(mesh, self.id)
        self._inquiries = Inquiries(mesh, self.dispatcher)
        self.idempotency = IdempotencyStore(mesh, self.id, settings.idempotency_ttl, settings.idempotency_bytes)
        self.keys = Keys(settings, KeyStore(mesh, KeyMarker(settings.state / "gateway")), exposed=exposed)
        self.bounds = bounds_of(settings)
        self.admission = Admission(byte_limits_of(settings))
        self.lengths = Lengths(ModelFiles(mesh, self.dispatcher.routes.nodes))
        self._demand = DemandSender(mesh, self._on_noted, self._on_hopeless)
        self._early = EarlyAdapters()
        self._open: dict[str, Exchange] = {}
        self._named: dict[str, str] = {}
        self._keyed: dict[str, Keyed] = {}
        self._keyed_tasks: set[asyncio.Task[None]] = set()
        self.tasks: list[asyncio.Task[None]] = []
        self.joined = False
        self.closing = False
        self.closes = asyncio.Event()
        self._informed = asyncio.Event()

    # Requests.

    def open(
        self, ask: Ask, card: ModelCard, sink: Sink, origin: Origin, key: tuple[Claim | Found, Entry] | None = None
    ) -> Exchange:
        """Take a request on. `key`: where its Idempotency-Key stands, and the entry to make if that is forgotten."""
        now = time.monotonic()
        ticket = Ticket(
            id=uuid.uuid4().hex,
            model=card.name,
            arrived=origin.arrived,
            queue_deadline=now + card.spec.queue.timeout,
            response_timeout=card.spec.response_timeout,
            traceparent=traceparent(origin.span),
            queue_timeout=card.spec.queue.timeout,
        )
        limit = self.settings.stream_buffer_bytes
        exchange = Exchange(ticket, card, ask, sink, self.dispatcher, limit)
        self._open[ticket.id] = exchange
        self._named[origin.request_id] = ticket.id
        if key is None:
            self.dispatcher.on_request(ticket, card.spec.queue.max_waiting, now)
            self._want_adapter(exchange)
            return exchange
        keyed = Keyed(self.id, self.idempotency, self.dispatcher, self.engines, exchange, *key)
        exchange.key = self._keyed[ticket.id] = keyed
        self._want_adapter(exchange)
        task = asyncio.create_task(keyed.run(), name="idempotency key")
        self._keyed_tasks.add(task)
        task.add_done_callback(self._keyed_tasks.discard)
        return exchange

    def close(self, exchange: Exchange, origin: Origin) -> None:
        """The answer is out, or will not be wanted. Records what happened."""
        exchange.leave()
        self.engines.forget(exchange)
        del self._open[exchange.ticket.id]
        if self._named.get(origin.request_id) == exchange.ticket.id:
            del self._named[origin.request_id]
        self._keyed.pop(exchange.ticket.id, None)
        self.recorder.record(exchange, origin)

    def exchange_of(self, attempt_id: str) -> Exchange | None:
        """The open request that an engine knows (or knew) by that name."""
        return self._open.get(attempt_id.rpartition("-")[0])

    def ticket_named(self, request_id: str) -> Ticket | None:
        """The open request that its client knows by that id."""
        exchange = self._open.get(self._named.get(request_id, ""))
        return exchange.ticket if exchange is not None else None

    # Effects.

    def send(self, ticket: Ticket) -> None:
        if (keyed := self._keyed.get(ticket.id)) is not None:
            keyed.send()
        else:
            self.engines.send(self._open[ticket.id])

    def cancel(self, ticket: Ticket) -> None:
        exchange = self._open[ticket.id]
        self.engines.cancel(exchange)
        self.engines.forget(exchange)

    def fail(self, ticket: Ticket, error: ThawError) -> None:
        self._open[ticket.id].fail(error)

    def inquire(self, ticket: Ticket) -> None:
        self._inquiries.ask(ticket)

    def requeued(self, ticket: Ticket) -> None:
        self._open[ticket.id].requeued()
        self._want_adapter(self._open[ticket.id])

    def demand(self, demand: Demand) -> None:
        self._demand.tell(demand)

    # Events from the mesh.

    async def on_status(self, status: NodeStatus) -> None:
        self.dispatcher.on_status(status, time.monotonic())
        self._tell_of_adapters(self._early.heard(status, self.dispatcher.waiting))

    async def on_load_failed(self, event: LoadFailed) -> None:
        self.dispatcher.on_load_failed(event, time.monotonic())

    def on_model_removed(self, name: str) -> None:
        error = ModelNotFound(f"The model `{name}` was removed", param="model")
        self.dispatcher.on_model_removed(name, error, time.monotonic())
        # Whatever instances have told of their adapters: one may have loaded it since. Where it is not loaded this is harmless.
        if not any(True for _ in self.dispatcher.routes.of(name)):
            for route in self.dispatcher.routes.all():
                if route.status.state is InstanceState.READY:
                    self.engines.drop_adapter(route.status.instance_id, name)

    def _want_adapter(self, exchange: Exchange) -> None:
        """An adapter comes beside its base, where that is under way."""
        adapter = exchange.ask.adapter
        if adapter is not None and exchange.ticket.stage in (Stage.NEW, Stage.QUEUED):
            self._tell_of_adapters(self._early.want(exchange.ticket.model, adapter))

    def _tell_of_adapters(self, told: list[Told]) -> None:
        for instance_id, adapter in told:
            self.engines.load_adapter(instance_id, adapter)

    def _on_noted(self, demand: Demand, noted: DemandNoted) -> None:
        self.dispatcher.on_noted(demand.model, noted, time.monotonic())

    def _on_hopeless(self, demand: Demand, error: ThawError) -> None:
        self.dispatcher.on_load_failed(LoadFailed(model=demand.model, error=error.body()), time.monotonic())

    # Its life.

    async def tick(self) -> None:
        """Deadlines, until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            self.dispatcher.on_tick(time.monotonic())
            if self._knows("/v1/"):
                self._informed.set()

    def faults(self) -> list[str]:
        """Why requests are not taken now; empty: they are."""
        if not self.joined:
            return ["not connected to NATS yet"]
        wrong = {
            "stopping": self.closing,
            "not connected to NATS": not self.mesh.nc.is_connected,
            "the catalogue has not been read": not self.catalog.complete,
            "the API keys have not been read": not self.keys.store.complete,
        }
        return [fault for fault, so in wrong.items() if so]

    async def require_knowledge(self, path: str) -> None:
        """Wait for what must be read from the mesh before `path` can be answered: models, and who may do what.

        Raises `Unavailable` if it does not come: a gateway that has just been restarted must not use up its clients' few retries.
        """
        if self._knows(path):
            return
        wait_s = self.settings.starting_timeout
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._informed.wait(), min(wait_s, _ADMIN_WAIT_S) if path.startswith("/admin/") else wait_s)
        if not self._knows(path):
            faults = ", ".join(self.faults())
            raise Unavailable(f"The gateway is starting: {faults}", retry_after_ms=_STARTING_RETRY_MS, should_retry=True)

    def _knows(self, path: str) -> bool:
        if path.startswith("/admin/"):
            return self.joined and self.keys.store.complete
        return not path.startswith("/v1/") or (self.joined and self.keys.store.complete and self.catalog.complete)

    async def run(self, group: asyncio.TaskGroup) -> None:
        await self.engines.start()
        self.tasks = [
            group.create_task(self.engines.run(), name="publish"),
            group.create_task(self._demand.run(), name="demand"),
            group.create_task(self.tick(), name="tick"),
        ]
        self.joined = True

    def begin_closing(self) -> None:
        """Take no new request; those here go on."""
        self.closing = True
        self.closes.set()
        self.dispatcher.on_closing()

    def end_all(self) -> None:
        """The time to finish is over: end what is left with an error."""
        for exchange in list(self._open.values()):
            if exchange.ended:
                continue
            if (keyed := self._keyed.get(exchange.ticket.id)) is not None:
                keyed.hand_over(ShuttingDown())
            else:
                self.dispatcher.on_broken(exchange.ticket, ShuttingDown(), time.monotonic())

    async def settle(self, within: float) -> None:
        """Let the last requests with Idempotency-Keys write down how they ended."""
        if self._keyed_tasks:
            await asyncio.wait(self._keyed_tasks, timeout=within)
        await end(*self._keyed_tasks)
