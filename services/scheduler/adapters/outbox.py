"""The effects port: everything that the scheduler sends leaves here.

Commands to a node go through one lane, in order and one at a time, because a nodeagent refuses a
token that is older than one it has seen. If a node does not answer, its lane waits for the node's
next status, for `patience` seconds in all. A request that waits for an answer of a nodeagent that
has been replaced is sent again at once: the same command twice has one effect. A lane ends with its
last job.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial

from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.errors import NoStreamResponseError

from services.scheduler.adapters import clock
from services.scheduler.adapters.catalog import Catalog
from services.scheduler.adapters.load_traces import SCHEDULER, LoadTraces
from services.scheduler.adapters.migrations import Migrations
from services.scheduler.domain.effects import (
    CancelMigration,
    DeleteCatalog,
    Effect,
    ForgetNode,
    LoadEnded,
    LoadStarted,
    OrderMigration,
    PublishLoadFailed,
    PutCatalog,
    ReplyTo,
    SendCancelPrefetch,
    SendExpectation,
    SendPrefetch,
    SendPrepare,
    SendRelease,
    SendResume,
    SendStart,
    SendStop,
    SendSuspend,
    StepDown,
)
from services.scheduler.domain.events import CommandAccepted, Event, StartRefused, StopRefused
from shared.contracts import subjects
from shared.contracts.base import Done, Message
from shared.contracts.demand import LoadFailed
from shared.contracts.loader import WeightsReleased
from shared.contracts.models import ModelCard
from shared.contracts.node import ResumeInstance, StartInstance
from shared.contracts.phases import Phase, PhaseSpan
from shared.contracts.stages import Stage
from shared.contracts.traces import LoadTrace
from shared.errors import DeadlineExceeded, StoreFull, ThawError, Unreachable
from shared.messaging import Mesh
from shared.messaging.connection import PROBE_WITHIN_S
from shared.messaging.streams import ensure_trace_stream
from shared.tasks import end
from shared.telemetry.logs import LogRateLimit

log = logging.getLogger(__name__)
Job = Callable[[], Awaitable[None]]
_RETRY_S = 0.25
_WAITED_S = 0.1
"""A plan made this long after its demand arrived had to wait for something."""
MAX_TRACES = 1000
"""Traces that may wait for JetStream; beyond them the oldest are dropped."""


@dataclass
class _Lane:
    jobs: deque[Job]
    task: asyncio.Task[None]


class Outbox:
    """Carries out effects.

    `post` receives the results of commands; `reply` answers requests. `is_wanted` is False for
    a start or resumption that waited until its instance was given up: it must not reach its node.
    `forget_node` removes what else is kept of a node that is gone.

    Attributes:
        dropped_traces: Load traces that were not published.
    """

    def __init__(
        self,
        mesh: Mesh,
        js: JetStreamContext,
        catalog: Catalog,
        loads: LoadTraces,
        post: Callable[[Event], None],
        reply: Callable[[ReplyTo], None],
        patience: float,
        migrations: Migrations,
        is_wanted: Callable[[StartInstance | ResumeInstance], bool],
        forget_node: Callable[[str], None],
    ) -> None:
        self._mesh = mesh
        self._js = js
        self._catalog = catalog
        self._loads = loads
        self._post = post
        self._reply = reply
        self._patience = patience
        self._migrations = migrations
        self._is_wanted = is_wanted
        self._forget_node = forget_node
        self.dropped_traces = 0
        self._failures = LogRateLimit()
        self._group_key = secrets.token_bytes(32)
        """Secrets of groups derive from it: all starts of a group leave from this process."""
        self._lanes: dict[str, _Lane] = {}
        self._status_events: dict[str, asyncio.Event] = {}
        self._agents: dict[str, str] = {}
        """By node: the boot id of its latest nodeagent."""
        self._attempts: dict[str, asyncio.Task[None]] = {}
        """By node: the request that waits for an answer of that nodeagent."""

    def reconcile(self, cards: Iterable[ModelCard]) -> None:
        """Bring the catalogue in line with the database, before any later change of it."""
        self._lane("catalogue", partial(self._retry_write, partial(self._catalog.reconcile, list(cards))))

    def check_catalogue(self) -> None:
        """Write the catalogue again if JetStream has lost it, unless it is being written."""
        if "catalogue" not in self._lanes:
            self._lane("catalogue", partial(self._retry_write, self._catalog.check))

    def node_reported(self, node: str, boot_id: str) -> None:
        """Let the node's lane retry: its nodeagent, of that `boot_id`, has sent a status."""
        if (event := self._status_events.pop(node, None)) is not None:
            event.set()
        known, self._agents[node] = self._agents.get(node, boot_id), boot_id
        if known != boot_id and (attempt := self._attempts.get(node)) is not None:
            attempt.cancel()

    def carry_out(self, effects: Iterable[Effect], committed_at: float) -> None:
        """Queue `effects`, whose changes were committed at `committed_at`; return at once."""
        catalogued = False
        refused: list[StoreFull] = []
        for effect in effects:
            match effect:
                case SendStart() | SendResume():
                    self._lane(f"agent {effect.node}", self._start_job(effect, committed_at))
                case SendStop() | SendSuspend():
                    self._lane(f"agent {effect.node}", self._stop_job(effect))
                case SendPrepare() | SendRelease() | SendPrefetch() | SendCancelPrefetch() | SendExpectation():
                    self._lane(f"loader {effect.node}", self._loader_job(effect))
                case PublishLoadFailed(event):
                    self._lane("events", partial(self._publish_failure, event))
                case LoadEnded():
                    self._publish_trace(self._loads.record_ended(effect))
                case OrderMigration(record):
                    self._lane("migrations", partial(self._migrations.order, record))
                case CancelMigration(record, error):
                    # A lane of its own: behind orders it would wait until the bucket answers again.
                    self._lane(f"cancel {record.migration_id}", partial(self._migrations.call_off, record, error))
                case PutCatalog(card):
                    catalogued = True
                    self._lane("catalogue", partial(self._put_card, card, refused))
                case DeleteCatalog(name):
                    catalogued = True
                    self._lane("catalogue", partial(self._retry_write, partial(self._catalog.delete, name)))
                case ReplyTo() if catalogued:
                    self._lane("catalogue", partial(self._reply_job, effect, refused))
                    refused = []
                case ReplyTo():
                    self._reply(effect)
                case ForgetNode(node):
                    self._agents.pop(node, None)
                    self._forget_node(node)
                case LoadStarted() | StepDown():
                    pass  # carried out by the loop, before the commit

    async def close(self) -> None:
        """Stop every lane; the next leader sends what is left."""
        await end(*(lane.task for lane in self._lanes.values()))

    def _lane(self, name: str, job: Job) -> None:
        lane = self._lanes.get(name)
        if lane is None:
            jobs: deque[Job] = deque()
            lane = self._lanes[name] = _Lane(jobs, asyncio.create_task(self._work(name, jobs), name=f"lane {name}"))
        lane.jobs.append(job)

    async def _work(self, name: str, jobs: deque[Job]) -> None:
        try:
            while jobs:
                job = jobs.popleft()
                try:
                    await job()
                except Exception:  # a failed job must not end its lane
                    log.exception("failed to carry out an effect", extra={"lane": name})
        finally:
            del self._lanes[name]

    def _start_job(self, effect: SendStart | SendResume, committed_at: float) -> Job:
        async def start() -> None:
            command = effect.command
            if not self._is_wanted(command):
                log.info("a start is not sent: its instance was given up", extra={"instance_id": command.instance_id})
                return
            parent = command.traceparent or self._loads.parent(command.instance_id)
            if isinstance(effect, SendStart) and isinstance(command, StartInstance):
                command = command.model_copy(update={"stage": self._stage(effect)})
            try:
                await self._send_with_retries(
                    effect.node,
                    lambda: self._mesh.request(
                        subjects.node_command(effect.node),
                        command.model_copy(update={"traceparent": parent, "phases": _list_earlier_phases(effect, committed_at)}),
                        Done,
                    ),
                    lambda: self._is_wanted(command),
                )
            except ThawError as e:
                log.warning("start command refused", extra={"instance_id": command.instance_id, "error": e.message})
                self._post(StartRefused(clock.now(), command.instance_id, e.body()))
            except Exception as e:  # a start that is never answered would be expected for ever
                log.exception("failed to send a start command", extra={"instance_id": command.instance_id})
                error = ThawError(f"{type(e).__name__} while its start was sent: {e}")
                self._post(StartRefused(clock.now(), command.instance_id, error.body()))
            else:
                self._post(CommandAccepted(clock.now(), command.instance_id))

        return start

    def _stage(self, effect: SendStart) -> Stage | None:
        """Return the stage that a start is for, with the secret of its group."""
        if effect.place is None or effect.layers is None:
            return None
        place, key = effect.place, effect.place.first
        secret = hmac.new(self._group_key, key.encode(), "sha256").hexdigest()
        group = hmac.new(self._group_key, b"id" + key.encode(), "sha256").hexdigest()[:16]
        return Stage(group_id=group, index=place.index, count=place.count, layers=effect.layers, secret=secret, first=key)

    def _stop_job(self, effect: SendStop | SendSuspend) -> Job:
        async def stop() -> None:
            subject = subjects.node_command(effect.node)
            try:
                await self._send_with_retries(effect.node, lambda: self._mesh.request(subject, effect.command, Done))
            except ThawError as e:
                self._post(StopRefused(clock.now(), effect.command.instance_id, e.body()))

        return stop

    def _loader_job(self, effect: SendPrepare | SendRelease | SendPrefetch | SendCancelPrefetch | SendExpectation) -> Job:
        async def send() -> None:
            subject = subjects.loader_command(effect.node)
            try:
                if isinstance(effect, SendRelease):
                    await self._mesh.request(subject, effect.command, WeightsReleased)
                    return
                if isinstance(effect, SendPrefetch | SendCancelPrefetch | SendExpectation):
                    await self._mesh.request(subject, effect.command, Done)
                    return
                command = effect.command
                parent = command.traceparent or self._loads.parent(command.instance_id)
                await self._mesh.request(subject, command.model_copy(update={"traceparent": parent}), Done)
            except ThawError as e:
                # Only a head start is lost: the engine asks its loader itself, and the nodeagent
                # reports failures.
                log.info("loader command failed", extra={"node": effect.node, "error": e.message})

        return send

    async def _publish_failure(self, event: LoadFailed) -> None:
        """Publish a failed load, unless NATS is away and too much waits to be sent."""
        try:
            await self._mesh.publish(subjects.LOAD_FAILED, event)
        except NatsError as e:
            if self._failures.allows("events"):
                log.warning("failed to publish a failed load", extra={"model": event.model, "error": repr(e)})

    def _publish_trace(self, trace: LoadTrace) -> None:
        """Queue a trace for publication; drop the oldest if too many wait."""
        lane = self._lanes.get("traces")
        if lane is not None and len(lane.jobs) >= MAX_TRACES:
            lane.jobs.popleft()
            self._drop_trace("too many wait for JetStream")
        self._lane("traces", self._trace_job(trace))

    def _drop_trace(self, reason: str) -> None:
        self.dropped_traces += 1
        if self._failures.allows("traces"):
            log.warning("failed to publish a load trace", extra={"error": reason, "dropped": self.dropped_traces})

    def _trace_job(self, trace: LoadTrace) -> Job:
        async def publish() -> None:
            try:
                await self._store_trace(subjects.load_trace(trace.plan_id), trace.model_dump_json().encode())
                self._failures.reset("traces")
            except (NatsError, TimeoutError) as e:
                self._drop_trace(repr(e))

        return publish

    async def _store_trace(self, subject: str, data: bytes) -> None:
        """Publish a trace; create its stream again if JetStream has lost it."""
        try:
            await self._js.publish(subject, data, timeout=5)
        except NoStreamResponseError:
            await ensure_trace_stream(self._js, self._mesh.replicas)
            await self._js.publish(subject, data, timeout=5)

    async def _put_card(self, card: ModelCard, refused: list[StoreFull]) -> None:
        """Write a card; a full catalogue is reported to the operator who registered the model."""
        try:
            await self._retry_write(partial(self._catalog.put, card))
        except StoreFull as e:
            log.error("failed to write a model to the catalogue", extra={"model": card.name, "error": e.message})
            refused.append(e)

    async def _retry_write(self, write: Job) -> None:
        """Write to the catalogue, with retries while JetStream does not answer.

        The next leader reconciles what is left.
        """
        while True:
            try:
                await write()
                self._failures.reset("catalogue")
                return
            except (NatsError, TimeoutError) as e:
                if self._failures.allows("catalogue"):
                    log.warning("failed to write the catalogue; retrying", extra={"error": repr(e)})
                await asyncio.sleep(_RETRY_S)

    async def _reply_job(self, effect: ReplyTo, refused: list[StoreFull]) -> None:
        self._reply(ReplyTo(effect.waiter, refused[0].body()) if refused else effect)

    async def _send_with_retries(
        self, node: str, send: Callable[[], Awaitable[Message]], is_wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Send until the node answers, retrying at each of its messages.

        The time in which the connection to NATS is lost is not counted against the node.

        Raises:
            ThawError: The node refused the command, or it did not answer in time.
        """
        deadline, reconnections = clock.now() + self._patience, self._mesh.reconnections
        while True:
            try:
                await self._attempt(node, send)
                return
            except (Unreachable, DeadlineExceeded):
                if not is_wanted():
                    raise
                if clock.now() >= deadline:
                    if self._mesh.reconnections == reconnections and await self._mesh.probe(PROBE_WITHIN_S):
                        raise
                    deadline, reconnections = clock.now() + self._patience, self._mesh.reconnections
            event = self._status_events.setdefault(node, asyncio.Event())
            try:
                await asyncio.wait_for(event.wait(), _RETRY_S)
            except TimeoutError:
                continue
            finally:
                self._status_events.pop(node, None)

    async def _attempt(self, node: str, send: Callable[[], Awaitable[Message]]) -> None:
        """Send once.

        Raises:
            Unreachable: There is no connection, or the nodeagent was replaced before it answered.
            ThawError: As the node replied.
        """

        async def request() -> None:
            await send()

        attempt = self._attempts[node] = asyncio.create_task(request(), name=f"command to {node}")
        try:
            await asyncio.wait((attempt,))
        finally:
            attempt.cancel()
            del self._attempts[node]
        if attempt.cancelled():
            raise Unreachable(f"The nodeagent of {node} was replaced before it answered")
        try:
            attempt.result()
        except NatsError as e:
            raise Unreachable(f"NATS is unreachable: {e}") from e


def _list_earlier_phases(effect: SendStart | SendResume, committed_at: float) -> tuple[PhaseSpan, ...]:
    """Return the phases before the start, relative to now: schedule, and reserve."""
    sent = clock.now()
    spans = []

    def add(phase: Phase, start: float, end: float) -> None:
        if end > start:
            spans.append(PhaseSpan(phase=phase, start_ms=(start - sent) * 1e3, duration_ms=(end - start) * 1e3, process=SCHEDULER))

    deciding_since = effect.requested_at
    if effect.planned_at - effect.requested_at > _WAITED_S:
        add(Phase.RESERVE, effect.requested_at, effect.planned_at)
        deciding_since = effect.planned_at
    if effect.claimed:
        add(Phase.SCHEDULE, deciding_since, effect.planned_at)
        add(Phase.RESERVE, effect.planned_at, committed_at)
        deciding_since = committed_at
    add(Phase.SCHEDULE, deciding_since, sent)
    return tuple(spans)
