"""A NATS cluster of three that loses one server after the other: nothing acknowledged is lost, and service resumes.

The bounds are generous; `-s` prints how long it took (docs/high-availability.md).
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import httpx
import openai
import pytest

from tests.support.mesh import Victim
from tests.support.outcomes import QUESTION, ask
from tests.support.servers import NatsCluster

RESUMED_WITHIN_S = 30.0
TRIED_EVERY_S = 0.1


@dataclass
class Acknowledged:
    """What the mesh has said yes to: answers by Idempotency-Key (id and text), names of API keys and of models."""

    answers: dict[str, tuple[str, str]] = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)
    models: set[str] = field(default_factory=set)


class Writer:
    """Has the mesh acknowledge one thing of each kind, again and again until it does."""

    def __init__(self, mesh: Victim, client: openai.OpenAI) -> None:
        self._mesh = mesh
        self._client = client
        self._numbers = itertools.count()
        self._admin = httpx.Client(
            base_url=f"{mesh.url}/admin/v1", headers={"authorization": f"Bearer {mesh.endpoints['admin_key']}"}, timeout=20
        )
        (self._source,) = (m["spec"]["source"] for m in self._listed("models") if m["spec"]["name"] == "one")
        self.acknowledged = Acknowledged()

    def _listed(self, what: str) -> list[dict[str, object]]:
        found: list[dict[str, object]] = self._admin.get(f"/{what}").raise_for_status().json()[what]
        return found

    def warm(self) -> None:
        ask(self._client)

    def keyed(self) -> None:
        key = f"key-{next(self._numbers)}"
        self.acknowledged.answers[key] = self.answer(key)[:2]

    def answer(self, key: str) -> tuple[str, str, bool]:
        """Id and text of the answer to an Idempotency-Key, and whether it is one that was given before."""
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
        name = f"operator-{next(self._numbers)}"
        body = {"name": name, "scope": "admin", "sha256": os.urandom(32).hex()}
        self._admin.post("/keys", json=body).raise_for_status()
        self.acknowledged.keys.add(name)

    def model(self) -> None:
        name = f"model-{next(self._numbers)}"
        self._admin.post("/models", json={"models": [{"name": name, "source": self._source}]}).raise_for_status()
        self.acknowledged.models.add(name)

    def assert_all_there(self) -> None:
        for key, (id_, text) in self.acknowledged.answers.items():
            assert self.answer(key) == (id_, text, True)
        assert self.acknowledged.keys <= {k["name"] for k in self._listed("keys")}
        served = {m.id for m in self._client.models.list()}
        assert self.acknowledged.models <= served
        assert self.acknowledged.models <= {m["spec"]["name"] for m in self._listed("models")}


def resumed(what: Callable[[], None]) -> float:
    """Seconds until `what` succeeds."""
    begun = time.monotonic()
    while True:
        try:
            what()
        except (openai.APIError, httpx.HTTPError):
            assert time.monotonic() - begun < RESUMED_WITHIN_S, f"{what.__name__} is not possible again"
            time.sleep(TRIED_EVERY_S)
        else:
            return time.monotonic() - begun


class Load(threading.Thread):
    """Streams, one after the other, by the standard client. `broken`: what went wrong with one, none of which may."""

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
                    model="one", messages=[{"role": "user", "content": QUESTION}], max_tokens=200, temperature=0, stream=True
                )
                chunks = list(stream)
            except openai.APIError as e:
                self.broken.append(repr(e))
                continue
            self.texts.add("".join(c.choices[0].delta.content or "" for c in chunks if c.choices))
            self.answered += 1

    def end(self) -> None:
        self._over.set()
        self.join(60)


@pytest.fixture
def cluster() -> Iterator[NatsCluster]:
    cluster = NatsCluster()
    yield cluster
    cluster.close()


@pytest.fixture
def replicated(cluster: NatsCluster) -> Iterator[Victim]:
    victim = Victim(THAW_NATS_URL=cluster.url, THAW_NATS_REPLICAS="3")
    try:
        victim.begin({"one": "test"})
        yield victim
    finally:
        victim.close()


def test_each_server_of_a_nats_cluster_dies_once(cluster: NatsCluster, replicated: Victim) -> None:
    with openai.OpenAI(base_url=f"{replicated.url}/v1", api_key="none", timeout=60) as client:
        writer = Writer(replicated, client)
        steps = (writer.warm, writer.keyed, writer.api_key, writer.model)
        for step in steps:
            step()
        load = Load(client)
        load.start()
        leader = cluster.leader()
        assert leader is not None
        for victim in (leader, *(i for i in range(3) if i != leader)):
            cluster.kill(victim)
            taken = {step.__name__: round(resumed(step), 2) for step in steps}
            print(f"server {victim} killed{' (leader)' if victim == leader else ''}; seconds until again possible: {taken}")
            writer.assert_all_there()
            cluster.start(victim)
        load.end()
        writer.assert_all_there()
        assert load.broken == []
        assert load.answered > 3
        assert len(load.texts) == 1, "every stream is the same answer"
