"""Records of migrations that are larger than a NATS message."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shared.contracts.base import Message
from shared.contracts.engine import EngineControl
from shared.contracts.migration import PrepareResume
from shared.errors import EngineFailed
from tests.integration.migrator.conftest import FakeEngine, Site
from tests.support.servers import NatsServer


@pytest.fixture
def own_nats() -> Iterator[NatsServer]:
    """Start a NATS server that takes small messages only."""
    server = NatsServer(max_payload="96kB")
    yield server
    server.close()


class RefusingEngine(FakeEngine):
    """A destination that refuses every request, with another reason of 10 kB each."""

    async def answer(self, message: EngineControl) -> Message:
        if isinstance(message, PrepareResume):
            raise EngineFailed(message.prepared + "x" * 10_000)
        return await super().answer(message)


async def refusing_engine(site: Site, instance_id: str) -> None:
    engine = site.engines[instance_id] = RefusingEngine(site, instance_id)
    await engine.start()


async def test_long_reasons_of_a_failed_migration_are_shortened(site: Site) -> None:
    source = await site.engine("a", *(f"q{n}-1" for n in range(20)))
    await refusing_engine(site, "b")
    site.migrator()
    record = await site.over(await site.order())
    assert record.state == "failed"
    assert [m.outcome for m in record.requests] == ["failed"] * 20
    assert all(0 < len(m.reason) <= 100 for m in record.requests)
    assert record.error is not None
    assert record.error.code == "migration_failed"
    assert len(source.requests) == 20


async def test_migration_whose_record_is_too_large_fails_and_the_next_one_is_done(site: Site) -> None:
    source = await site.engine("a", *(f"q{n}-1" for n in range(360)))
    await refusing_engine(site, "b")
    moving = await site.engine("c", "p-1")
    await site.engine("d")
    site.migrator()
    first = await site.order(1)
    second = await site.order(2, source="c", destination="d")
    record = await site.over(first)
    assert (record.state, record.requests) == ("failed", ())
    assert record.error is not None
    assert record.error.code == "payload_too_large"
    assert len(source.requests) == 360, "those that had not moved stay"
    assert (await site.over(second)).state == "done"
    assert moving.requests == {}
