"""Faults of replicated servers.

A NATS cluster of three loses each server in turn, and PostgreSQL's synchronous standby is promoted.
No acknowledged write is lost, and service resumes.

The bounds are generous; `--log-cli-level=warning` shows the times (docs/high-availability.md).
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import httpx
import openai
import pytest

from tests.support.launcher import until
from tests.support.mesh import Victim
from tests.support.outcomes import QUESTION, ask
from tests.support.paced_zygote import slowed_by
from tests.support.servers import NatsCluster, PostgresServer, StandbyServer
from tests.support.sizes import size

log = logging.getLogger(__name__)
RESUMED_WITHIN_S = 120.0
TRIED_EVERY_S = 0.1
WRITTEN_EVERY_S = 0.5
TOKENS, STEP_S = size((70, 0.06), (200, 0.02))
"""The engines wait so long before each step: streams last, and hardly cost CPU time."""


@dataclass
class Acknowledged:
    """Writes that the mesh acknowledged.

    Responses by Idempotency-Key (id and text), names of API keys, of revoked ones and of models.
    """

    answers: dict[str, tuple[str, str]] = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)
    revoked: set[str] = field(default_factory=set)
    models: set[str] = field(default_factory=set)

    def counts(self) -> dict[str, int]:
        return {kind: len(writes) for kind, writes in vars(self).items()}


class Writer:
    """Repeats one write of each kind until the mesh acknowledges it."""

    def __init__(self, mesh: Victim, client: openai.OpenAI) -> None:
        self._mesh = mesh
        self._client = client
        self._numbers = itertools.count()
        self._admin = httpx.Client(
            base_url=f"{mesh.url}/admin/v1", headers={"authorization": f"Bearer {mesh.endpoints['admin_key']}"}, timeout=120
        )
        self._source = str(mesh.home / "models" / "one")
        self.acknowledged = Acknowledged()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._admin.close()

    def warm(self) -> None:
        ask(self._client)

    def cold(self) -> None:
        ask(self._client, "two")

    def keyed(self) -> None:
        key = f"key-{next(self._numbers)}"
        self.acknowledged.answers[key] = self.answer(key)[:2]

    def answer(self, key: str) -> tuple[str, str, bool]:
        """Return id and text of the key's response, and whether it is a replay."""
        raw = self._client.chat.completions.with_raw_response.create(
            model="one",
            messages=[{"role": "user", "content": QUESTION}],
            max_tokens=8,
            temperature=0,
            extra_headers={"idempotency-key": key},
        )
        answer = raw.parse()
        return answer.id, answer.choices[0].message.content or "", raw.headers.get("idempotent-replayed") == "true"

    def api_key(self) -> None:
        self.acknowledged.keys.add(self._create_key())

    def revoked_key(self) -> None:
        name = self._create_key()
        self._admin.delete(f"/keys/{name}").raise_for_status()
        self.acknowledged.revoked.add(name)

    def _create_key(self) -> str:
        name = f"operator-{next(self._numbers)}"
        body = {"name": name, "scope": "admin", "sha256": os.urandom(32).hex()}
        self._admin.post("/keys", json=body).raise_for_status()
        return name

    def model(self) -> None:
        name = f"model-{next(self._numbers)}"
        self._admin.post("/models", json={"specs": [{"name": name, "source": self._source}]}).raise_for_status()
        self.acknowledged.models.add(name)

    def assert_all_there(self) -> None:
        for key, (id_, text) in list(self.acknowledged.answers.items()):
            assert self.answer(key) == (id_, text, True)
        created, revoked = set(self.acknowledged.keys), set(self.acknowledged.revoked)
        names = {k["name"] for k in self._admin.get("/keys").raise_for_status().json()["keys"]}
        assert created <= names
        assert not revoked & names
        self.served()

    def served(self) -> None:
        """Return when the gateway knows every model.

        Its watch reports new models; the gateway reopens the watch when that server is gone.
        """
        wanted = set(self.acknowledged.models)
        until(lambda: wanted <= {m.id for m in self._client.models.list()}, RESUMED_WITHIN_S, "models are served")


def resumed(what: Callable[[], None]) -> float:
    """Return the seconds until `what` succeeds."""
    begun = time.monotonic()
    while True:
        try:
            what()
        except (openai.APIError, httpx.HTTPError):
            assert time.monotonic() - begun < RESUMED_WITHIN_S, f"{what.__name__} is not possible again"
            time.sleep(TRIED_EVERY_S)
        else:
            return time.monotonic() - begun


class Writing:
    """Writes of every kind that continue inside the block, each kind in its own thread.

    Attributes:
        refused: Number of writes that failed, by kind; they may have been done or not.
    """

    def __init__(self, writer: Writer) -> None:
        steps = (writer.keyed, writer.api_key, writer.revoked_key, writer.model)
        self.refused = dict.fromkeys((step.__name__ for step in steps), 0)
        self._latest = dict.fromkeys(self.refused, 0.0)
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._repeat, args=(step,), daemon=True) for step in steps]

    def _repeat(self, step: Callable[[], None]) -> None:
        while not self._over.wait(WRITTEN_EVERY_S):
            began = time.monotonic()
            try:
                step()
            except (openai.APIError, httpx.HTTPError):
                self.refused[step.__name__] += 1
            else:
                self._latest[step.__name__] = began

    def resume(self) -> None:
        """Return when a write of each kind that began after this call is acknowledged."""
        begun = time.monotonic()

        def missing() -> list[str]:
            return [kind for kind, at in self._latest.items() if at < begun]

        until(lambda: not missing(), RESUMED_WITHIN_S, lambda: f"writes of these kinds are acknowledged: {missing()}")

    def __enter__(self) -> Writing:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(150)


class Load(threading.Thread):
    """Consecutive streams of the standard client.

    Attributes:
        broken: Faults of the streams; must stay empty.
    """

    def __init__(self, client: openai.OpenAI) -> None:
        super().__init__(daemon=True)
        self._client = client
        self._over = threading.Event()
        self.texts: set[str] = set()
        self.answered = 0
        self.broken: list[str] = []

    def run(self) -> None:
        while not self._over.is_set():
            try:
                stream = self._client.chat.completions.create(
                    model="one", messages=[{"role": "user", "content": QUESTION}], max_tokens=TOKENS, temperature=0, stream=True
                )
                chunks = list(stream)
            except openai.APIError as e:
                self.broken.append(repr(e))
                continue
            self.texts.add("".join(c.choices[0].delta.content or "" for c in chunks if c.choices))
            self.answered += 1

    def __enter__(self) -> Load:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join(180)

    def assert_undisturbed(self) -> None:
        assert self.broken == []
        assert self.answered
        assert len(self.texts) == 1, "every stream is the same answer"


def standard_client(mesh: Victim) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none", timeout=120)


@pytest.fixture
def cluster() -> Iterator[NatsCluster]:
    cluster = NatsCluster()
    yield cluster
    cluster.close()


@pytest.fixture
def replicated(cluster: NatsCluster) -> Iterator[Victim]:
    victim = Victim(THAW_NATS_URL=cluster.url, THAW_NATS_REPLICAS="3", **slowed_by(STEP_S))
    try:
        victim.begin()
        yield victim
    finally:
        victim.close()


@pytest.mark.slow
def test_acknowledged_writes_survive_the_death_of_each_nats_server(cluster: NatsCluster, replicated: Victim) -> None:
    with standard_client(replicated) as client, Writer(replicated, client) as writer:
        steps = (writer.warm, writer.keyed, writer.api_key, writer.model, writer.served)
        for step in steps:
            step()
        leader = cluster.await_leader()
        with Load(client) as load, Writing(writer) as writing:
            for victim in (leader, *(i for i in range(3) if i != leader)):
                writing.resume()
                cluster.kill(victim)
                taken = {step.__name__: round(resumed(step), 2) for step in steps}
                log.warning("server %d killed%s; seconds until again possible: %s", victim, " (leader)" * (victim == leader), taken)
                writing.resume()
                writer.assert_all_there()
                cluster.start(victim)
        log.warning("acknowledged: %s; refused: %s", writer.acknowledged.counts(), writing.refused)
        writer.assert_all_there()
        load.assert_undisturbed()


@pytest.fixture
def primary() -> Iterator[PostgresServer]:
    server = PostgresServer(durable=True)
    yield server
    server.close()


@pytest.fixture
def standby(primary: PostgresServer) -> Iterator[StandbyServer]:
    if not (primary.bin / "pg_basebackup").exists():
        pytest.skip("these PostgreSQL programs have no pg_basebackup: a standby cannot be made with them")
    server = StandbyServer(primary)
    yield server
    server.close()


@pytest.fixture
def failing_over(primary: PostgresServer, standby: StandbyServer) -> Iterator[Victim]:
    hosts = f"127.0.0.1:{primary.port},127.0.0.1:{standby.port}"
    victim = Victim(THAW_DATABASE_URL=f"postgresql://postgres@{hosts}/postgres", **slowed_by(STEP_S))
    try:
        victim.begin()
        yield victim
    finally:
        victim.close()


@pytest.mark.slow
def test_a_standby_of_postgres_is_promoted(primary: PostgresServer, standby: StandbyServer, failing_over: Victim) -> None:
    with standard_client(failing_over) as client, Writer(failing_over, client) as writer:
        writer.warm()
        with Load(client) as load, Writing(writer) as writing:
            writing.resume()
            plans, epoch = ids(primary, "plan_id", "plans"), int(primary.sql("SELECT epoch FROM leadership"))
            primary.kill()
            until(lambda: writing.refused["model"] > 0, what="a registration is refused")
            writer.warm()
            standby.promote()
            taken = {step.__name__: round(resumed(step), 2) for step in (writer.warm, writer.model, writer.cold)}
            log.warning("promoted; seconds from then until again possible: %s", taken)
            writing.resume()
        log.warning("acknowledged: %s; refused: %s", writer.acknowledged.counts(), writing.refused)
        writer.assert_all_there()
        load.assert_undisturbed()
        assert writer.acknowledged.models <= ids(standby, "name", "models")
        assert plans
        assert plans <= ids(standby, "plan_id", "plans")
        assert int(standby.sql("SELECT epoch FROM leadership")) > epoch, "the new leader's commands are newer than the old one's"


def ids(server: PostgresServer, column: str, table: str) -> set[str]:
    return set(server.sql(f"SELECT {column} FROM {table}").split())
