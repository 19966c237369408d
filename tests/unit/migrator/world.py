"""Engines, a gateway, a bucket and migrators without I/O.

Time and messages advance only when the test says so.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from services.migrator.domain.decide import begin, decide
from services.migrator.domain.events import Answered, Ask, Effect, Ended, Event, Forget, Link, Lost, Refused, Save, Tick
from services.migrator.domain.leases import Leases, find_claimable
from services.migrator.domain.rounds import Speed
from services.migrator.domain.speeds import LearnedSpeeds
from services.migrator.domain.work import Options, Work, base_of
from shared.contracts.base import ErrorBody, Message
from shared.contracts.kv_transfer import KvLayer, KvLayout, KvOffer, KvPart
from shared.contracts.migration import (
    ListRequests,
    MigrationRecord,
    MoveRequest,
    PrepareResume,
    ReadTokens,
    RequestMoved,
    RequestsListed,
    ResumePrepared,
    RunningChoice,
    RunningRequest,
    TokensRead,
)
from shared.errors import (
    Conflict,
    DeadlineExceeded,
    InsufficientMemory,
    NotFound,
    StaleToken,
    ThawError,
    Unreachable,
    UnsupportedParameter,
)

PROMPT = 100


@dataclass
class Request:
    """A request.

    Attributes:
        at: The engine that serves it; None: it has ended.
    """

    name: str
    at: str | None
    tokens: float = 20.0
    fixed: str = ""
    attempt: int = 1
    seen_token: int = 0
    moves: list[str] = field(default_factory=list)
    places: list[str | None] = field(default_factory=list)

    @property
    def attempt_id(self) -> str:
        return f"{self.name}-{self.attempt}"


@dataclass
class Engine:
    name: str
    alive: bool = True
    revision: str = "r1"
    prepared: dict[str, int] = field(default_factory=dict)
    ms_per_token: float = 0.2
    ms_fixed: float = 10.0
    room: bool = True
    prepares: bool = True
    offers: bool = False
    token_bytes: int = 1024
    stages: int = 1
    """Each has an equal part of a token's bytes."""
    ms_per_kib: float = 0.01
    receives: bool = True
    refusal: str = ""
    """Why it cannot receive keys and values."""

    def computes(self, order: PrepareResume) -> int:
        """Return the number of new tokens that the order's time allows."""
        new = max(0, sum(map(len, order.sequences)) - self.prepared.get(order.prepared, 0))
        return min(new, max(1, int(order.within_ms / self.ms_per_token))) if order.within_ms else new

    def receive(self, order: PrepareResume) -> int:
        """Return the tokens whose keys and values it receives."""
        return self.computes(order) if order.kv is not None and self.receives and not self.refusal else 0

    def took_ms(self, tokens: int) -> float:
        return self.ms_per_token * tokens + self.ms_fixed


@dataclass
class Letter:
    """A message in flight."""

    migrator: Migrator
    ask: Ask
    arrives: float
    turn: int

    def answered(self, event: Event) -> None:
        """Return the reply to migrators that still work on the migration."""
        if self.turn == self.migrator.turn:
            self.migrator.receive(event)


@dataclass
class Migrator:
    name: str
    world: World
    alive: bool = True
    leases: Leases = field(default_factory=Leases)
    work: Work | None = None
    migration_id: str = ""
    revision: int = 0
    unsaved: MigrationRecord | None = None
    ended: list[Ended] = field(default_factory=list)
    learned: LearnedSpeeds | None = None
    """Speeds that it keeps from one migration for the next; None: none."""
    turn: int = 0
    """Number of migrations taken up so far.

    Replies to an earlier one's requests are dropped, as its tasks have ended.
    """

    def poll(self) -> None:
        """Read the bucket, write changes, and take up migrations without an owner."""
        world = self.world
        if not self.alive:
            return
        self.leases.replace([record for record, _ in world.bucket.values()], world.now)
        self.write()
        if self.work is not None:
            record, _ = world.bucket.get(self.migration_id, (None, 0))
            if record is None or record.state == "cancelled":
                self.receive(Lost(over=True))
            elif record.owner != self.name and not record.over:
                self.receive(Lost())
        if self.work is None and (free := find_claimable(self.leases, world.now)) is not None:
            claimed = free.model_copy(update={"owner": self.name, "beats": free.beats + 1})
            self.migration_id, self.turn = free.migration_id, self.turn + 1
            self.revision = world.put(claimed)
            known = (Speed(0.2, 10.0),) if self.learned is None else (self.learned.recompute(claimed), self.learned.link(claimed))
            self.work, effects = begin(claimed, self.name, known[0], world.options, world.now, *known[1:])
            self.carry_out(effects)

    def receive(self, event: Event) -> None:
        if self.alive and self.work is not None:
            self.work, effects = decide(self.work, event, self.world.now)
            self.carry_out(effects)

    def carry_out(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            match effect:
                case Save(record):
                    self.unsaved = record
                case Ask():
                    self.world.letters.append(Letter(self, effect, self.world.now + self.world.takes(effect), self.turn))
                case Forget(instance_id, message):
                    self.world.engines[instance_id].prepared.pop(message.prepared, None)
                case Ended():
                    self.ended.append(effect)
                    if not effect.lost:
                        self.write()
                    if self.learned is not None and self.work is not None:
                        self.learned.keep(self.work.record, self.work.speed, self.work.link)
                    self.work, self.unsaved = None, None
                case Link():
                    pass

    def write(self) -> None:
        if self.unsaved is None or not self.world.connected:
            return
        record, revision = self.world.bucket.get(self.migration_id, (None, 0))
        if record is not None and revision == self.revision:
            self.revision = self.world.put(self.unsaved)
        self.unsaved = None


@dataclass
class World:
    """A world with sources a and b.

    The gateway resumes requests on c if they lost their engine.
    """

    options: Options = Options(at_once=2, pause_ms=50.0)
    now: float = 1000.0
    rate: float = 50.0
    connected: bool = True
    gateway_alive: bool = True
    requests: dict[str, Request] = field(default_factory=dict)
    letters: list[Letter] = field(default_factory=list)
    bucket: dict[str, tuple[MigrationRecord, int]] = field(default_factory=dict)
    revisions: int = 0

    def __post_init__(self) -> None:
        self.engines = {name: Engine(name) for name in "abc"}
        self.migrators: list[Migrator] = []

    # State

    def migrator(self) -> Migrator:
        made = Migrator(f"m{len(self.migrators)}", self)
        self.migrators.append(made)
        return made

    def request(self, at: str = "a", **more: object) -> Request:
        made = Request(f"q{len(self.requests)}", at, **more)  # type: ignore[arg-type]  # the test's own keywords
        self.requests[made.name] = made
        return made

    def order(
        self,
        request: Request | None = None,
        source: str = "a",
        destination: str = "b",
        revision: str = "r1",
        at_most: int | None = None,
    ) -> MigrationRecord:
        number = len(self.bucket) + 1
        record = MigrationRecord(
            migration_id=f"m-{number}",
            token=number,
            model="m",
            revision=revision,
            source_instance=source,
            source_node=f"node-{source}",
            instance_id=destination,
            node=f"node-{destination}",
            request_id=request.name if request else None,
            at_most=at_most,
            created=self.now,
        )
        self.put(record)
        return record

    def put(self, record: MigrationRecord) -> int:
        self.revisions += 1
        self.bucket[record.migration_id] = (record, self.revisions)
        return self.revisions

    def record(self, order: MigrationRecord) -> MigrationRecord:
        return self.bucket[order.migration_id][0]

    def migrate(self, request: Request | None = None) -> MigrationRecord:
        """Run an order with one migrator; return its outcome."""
        self.migrator()
        order = self.order(request)
        self.settle()
        return self.record(order)

    def cancel(self, order: MigrationRecord) -> None:
        self.put(self.record(order).model_copy(update={"state": "cancelled"}))

    # Events

    def takes(self, ask: Ask) -> float:
        if isinstance(ask.message, PrepareResume):
            engine = self.engines[ask.address]
            if received := engine.receive(ask.message):
                return self.link_ms(engine, received) / 1e3
            return engine.took_ms(engine.computes(ask.message)) / 1e3
        return 0.001

    def link_ms(self, engine: Engine, tokens: int) -> float:
        return 2.0 + engine.ms_per_kib * tokens * engine.token_bytes / 1024

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for request in self.requests.values():
            if request.at is not None:
                request.tokens += seconds * self.rate

    def kill(self, engine: str) -> None:
        """Kill an engine.

        Its gateway resumes its requests elsewhere; its memory is gone.
        """
        self.engines[engine].alive = False
        self.engines[engine].prepared.clear()
        for request in self.requests.values():
            if request.at == engine:
                self.resume(request, next((e.name for e in reversed(self.engines.values()) if e.alive), None))

    def resume(self, request: Request, at: str | None) -> None:
        request.at = at
        request.places.append(at)
        request.attempt += 1

    def deliver(self, letter: Letter) -> None:
        """Deliver a message and execute it; return its reply to migrators that still wait."""
        self.letters.remove(letter)
        event: Event
        try:
            if not self.connected:
                raise Unreachable("nobody")
            event = Answered(letter.ask.key, self._do(letter.ask))
        except ThawError as e:
            event = Refused(letter.ask.key, e.body())
        letter.answered(event)

    def lose(self, letter: Letter, *, done: bool) -> None:
        """Lose the request (or, with `done`, only its reply) in a restart."""
        self.letters.remove(letter)
        if done:
            with contextlib.suppress(ThawError):
                self._do(letter.ask)
        letter.answered(Refused(letter.ask.key, DeadlineExceeded("no answer").body()))

    def step(self) -> None:
        """Advance to the next spontaneous event."""
        due = min(self.letters, key=lambda each: each.arrives, default=None)
        until = min(due.arrives if due else self.now + 0.1, self.now + 0.1)
        self.pass_time(max(0.0, until - self.now))
        if due is not None and due.arrives <= self.now:
            self.deliver(due)
        for migrator in self.migrators:
            migrator.poll()
            migrator.receive(Tick())

    def settle(self, steps: int = 2000) -> None:
        """Advance until no event is left."""
        for _ in range(steps):
            if not self.letters and all(record.over for record, _ in self.bucket.values()):
                return
            self.step()
        raise AssertionError(f"not settled: {[r for r, _ in self.bucket.values()]}")

    # Engines and gateway

    def _do(self, ask: Ask) -> Message:
        match ask.message:
            case MoveRequest():
                return self._move(ask.message)
            case _:
                engine = self.engines[ask.address]
                if not engine.alive:
                    raise Unreachable("nobody")
                return self._engine(engine, ask.message)

    def _engine(self, engine: Engine, message: Message) -> Message:
        here = {r.attempt_id: r for r in self.requests.values() if r.at == engine.name}
        match message:
            case ListRequests():
                return RequestsListed(requests=tuple(map(self._running, here.values())))
            case ReadTokens(request_id=name):
                if name not in here:
                    raise NotFound("over")
                made = RunningChoice(token_ids=tuple(range(int(here[name].tokens))))
                prompt = (tuple(range(PROMPT)),)
                return TokensRead(
                    running=self._running(here[name]),
                    prompt_token_ids=prompt,
                    choices=(made,),
                    cache_salt=f"salt of {name}",
                    kv=offer_of(engine) if message.offer_kv and engine.offers else None,
                )
            case PrepareResume():
                if message.revision != engine.revision:
                    raise Conflict("another revision")
                if not engine.prepares:
                    raise UnsupportedParameter("by its own cache")
                if not engine.room:
                    raise InsufficientMemory("no room")
                new, total = engine.computes(message), sum(map(len, message.sequences))
                received = engine.receive(message)
                done = engine.prepared[message.prepared] = engine.prepared.get(message.prepared, 0) + new
                if received:
                    took = self.link_ms(engine, received)
                    nbytes = received * engine.token_bytes
                    return ResumePrepared(
                        tokens=0, took_ms=took, left=total - done, kv_tokens=received, kv_bytes=nbytes, kv_ms=took
                    )
                reason = engine.refusal if message.kv is not None else ""
                return ResumePrepared(tokens=new, took_ms=engine.took_ms(new), left=total - done, kv_reason=reason)
        raise AssertionError(message)

    def _running(self, r: Request) -> RunningRequest:
        return RunningRequest(
            request_id=r.attempt_id,
            gateway_id="g",
            prompt_tokens=PROMPT,
            generated_tokens=int(r.tokens),
            tokens_per_second=self.rate,
            fixed=r.fixed,
        )

    def _move(self, m: MoveRequest) -> Message:
        if not self.gateway_alive:
            raise Unreachable("no gateway")
        request = self.requests[base_of(m.request_id)]
        if request.at is None:
            raise NotFound("over")
        if m.token < request.seen_token:
            raise StaleToken("a newer one")
        request.seen_token = m.token
        if request.at != m.source_instance:
            raise Conflict("it is not there")
        destination = self.engines[m.instance_id]
        destination.prepared.pop(m.prepared, None)
        if not destination.alive:
            self.resume(request, m.source_instance)
            raise ErrorOfInstance(ErrorBody(code="engine_failed", message="the destination is gone"))
        request.moves.append(m.instance_id)
        self.resume(request, m.instance_id)
        return RequestMoved(instance_id=m.instance_id, tokens=int(request.tokens), pause_ms=12.0)


def offer_of(engine: Engine) -> KvOffer:
    heads = engine.token_bytes // 16 // engine.stages
    layouts = [
        KvLayout(dtype="float32", itemsize=4, layers=(KvLayer(layer=i, heads=heads, head_size=2),)) for i in range(engine.stages)
    ]
    later = tuple(KvPart(host="h", port=1, layout=layout) for layout in layouts[1:])
    return KvOffer(host="h", port=1, ticket="0" * 32, secret="s" * 43, layout=layouts[0], later=later)


class ErrorOfInstance(ThawError):
    def __init__(self, body: ErrorBody) -> None:
        super().__init__(body.message)
