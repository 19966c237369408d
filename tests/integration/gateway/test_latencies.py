"""The admin API's latencies of a model, added up over gateways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.gateway.authorization import hash_key
from shared.contracts.latencies import LatencyHistory
from tests.integration.gateway.conftest import Served, ServeFn, chat, until_listed, until_running
from tests.support.fake_engine import FakeNode, card_of
from tests.support.nats_accounts import NatsAccount

CARDS = (card_of("judged", slo={"ttft": 60.0}, aliases=("j",)), card_of("late", slo={"ttft": 1e-6}), card_of("plain"))


@pytest.fixture
async def node(own_nats: NatsAccount) -> AsyncIterator[FakeNode]:
    found = FakeNode(own_nats.url)
    await found.start(*CARDS)
    yield found
    await found.stop()


async def read(served: Served, model: str, query: str = "") -> LatencyHistory:
    answer = await served.http.get(f"/admin/v1/models/{model}/latencies{query}")
    assert answer.status_code == 200, answer.text
    return LatencyHistory.model_validate(answer.json())


async def ask(served: Served, model: str) -> float:
    """Send a request, and return the time to its first token as its trace has it."""
    answer = await served.http.post("/v1/chat/completions", json=chat(model))
    assert answer.status_code == 200, answer.text
    return sum(float(part.partition("dur=")[2]) for part in answer.headers["server-timing"].split(", "))


def in_bin_of(ms: float, *, rounded_by: float) -> object:
    """Match the middle of a time's bin; bins are an eighth of a doubling wide.

    Args:
        rounded_by: Milliseconds by which `ms` may differ from the time that was counted.
    """
    return pytest.approx(ms, rel=0.0, abs=0.045 * (ms + rounded_by) + rounded_by)


async def test_latencies_of_all_gateways_add_up(node: FakeNode, serve: ServeFn, tmp_path: Path) -> None:
    async with serve() as first, serve(home=tmp_path / "second") as second:
        await asyncio.gather(until_listed(first, CARDS), until_listed(second, CARDS))
        cold = asyncio.create_task(ask(first, "judged"))
        await node.until_demand(lambda: any(d.model == "judged" for d in node.demand))
        await node.engine("judged")
        ttft_ms = await cold
        await until_running(second, "judged")
        warm = [await ask(served, "judged") for served in (first, second, second)]
        for served in (first, second):
            found = await read(served, "judged")
            assert found.gateways == 2
            assert (found.whole.cold.requests, found.whole.warm.requests) == (1, 3)
            assert found.whole.cold.p50_ms == in_bin_of(ttft_ms, rounded_by=0.3)
            assert found.whole.warm.p99_ms == in_bin_of(max(warm), rounded_by=0.3)
            assert (found.whole.judged, found.whole.met) == (4, 4)
            assert sum(found.whole.phases_ms.values()) == pytest.approx(ttft_ms, rel=0.01, abs=0.2)
            cold_phases, warm_phases = found.whole.cold_phases, found.whole.warm_phases
            assert {phase: p.p99_ms for phase, p in cold_phases.items()} == {
                phase: in_bin_of(ms, rounded_by=0.05) for phase, ms in found.whole.phases_ms.items()
            }
            assert max(p.requests for p in warm_phases.values()) == 3
            assert sum(p.judged for p in found.points) == 4
            assert len(found.points) == 12
        await node.engine("late")
        await until_running(second, "late")
        await ask(second, "late")
        late = (await read(first, "late", "?step=60")).whole
        assert (late.judged, late.met, late.warm.requests) == (1, 0, 1)
        assert (await read(second, "plain")).whole.judged == 0
        assert (await read(second, "j")).model == "judged", "an alias is its model"


async def test_read_only_keys_may_read_and_errors_name_the_parameter(node: FakeNode, serve: ServeFn) -> None:
    async with serve(admin_key="root", api_keys=hash_key("user")) as served:
        root = {"authorization": "Bearer root"}
        body = {"name": "viewer", "scope": "read-only", "sha256": hash_key("view")}
        assert (await served.http.post("/admin/v1/keys", json=body, headers=root)).status_code == 200
        url = "/admin/v1/models/plain/latencies"
        for key, status in (("view", 200), ("root", 200), ("user", 401), ("wrong", 401)):
            assert (await served.http.get(url, headers={"authorization": f"Bearer {key}"})).status_code == status, key
        for query, status in (("?step=7", 400), ("?step=0", 400), ("?step=x", 400)):
            answer = await served.http.get(url + query, headers=root)
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, "step"), query
        assert (await served.http.get("/admin/v1/models/none/latencies", headers=root)).status_code == 404
