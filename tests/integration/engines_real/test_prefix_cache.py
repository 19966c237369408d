"""The prefix cache of a real vLLM, of which each API key has its own part."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from services.enginehost.drivers.cache_salt import cache_salt
from shared.contracts import subjects
from shared.contracts.inference import FairShare
from shared.contracts.migration import PrepareResume, ResumePrepared
from shared.messaging import Mesh
from tests.integration.engines_real.conftest import PATIENCE_S, RealEngine, listening
from tests.support.hosted import Hosts
from tests.support.servers import NatsServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * PATIENCE_S)]
_HITS = re.compile(rb"^vllm:prefix_cache_hits_total\{.*\} ([0-9.e+]+)$", re.MULTILINE)
_numbers = itertools.count(1)


class Cache:
    """Counts how many tokens of a prompt a request finds in the engine's cache."""

    def __init__(self, hosts: Hosts, instance: str) -> None:
        self.hosts = hosts
        self.instance = instance

    async def _total(self) -> float:
        found = _HITS.search((await self.hosts.request_route(self.instance, "/metrics", "GET")).body)
        assert found is not None
        return float(found[1])

    async def hits(self, prompt: list[int], flow: str, **fields: Any) -> float:
        before = await self._total()
        asked: dict[str, Any] = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
        done = await self.hosts.request(self.instance, "completion", share=FairShare(flow=flow), **asked)
        assert done.status == 200, done.body
        return await self._total() - before


@pytest.fixture
async def cache(mesh: Mesh, nats_server: NatsServer, vllm: RealEngine) -> Cache:
    return Cache(await listening(mesh, nats_server.url, vllm), vllm.instance)


@pytest.fixture
def prompt() -> list[int]:
    """Return a prompt that no other test sends, of several blocks."""
    number = next(_numbers)
    return [300 + (number + i * number) % 1000 for i in range(500)]


async def test_key_finds_only_its_own_prefixes(cache: Cache, prompt: list[int]) -> None:
    assert await cache.hits(prompt, "a") == 0
    assert await cache.hits(prompt, "a") > 0
    assert await cache.hits(prompt, "b") == 0
    assert await cache.hits(prompt, "") == 0
    assert await cache.hits(prompt, "a", cache_salt="mine") == 0
    assert await cache.hits(prompt, "b", cache_salt=cache_salt("a", None)) == 0, "a client cannot name another key's part"


async def test_prefixes_prepared_for_a_migration_are_found_by_their_key(cache: Cache, mesh: Mesh, prompt: list[int]) -> None:
    order = PrepareResume(prepared="p", revision="r1", sequences=(tuple(prompt),), cache_salt=cache_salt("a", None))
    assert (await mesh.request(subjects.engine_control(cache.instance), order, ResumePrepared)).tokens == len(prompt)
    assert await cache.hits(prompt, "b") == 0
    assert await cache.hits(prompt, "a") > 0


async def test_salt_that_is_no_text_is_an_invalid_request(cache: Cache, mesh: Mesh) -> None:
    done = await cache.hosts.request(
        cache.instance, "completion", share=FairShare(flow="a"), prompt="Hi", max_tokens=1, cache_salt=7
    )
    assert done.status == 400
