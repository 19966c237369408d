"""Plans of client requests, and every operator request, over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from shared.contracts.admin import PlanExplained
from shared.contracts.models import Slo
from shared.contracts.node import InstanceState
from tests.integration.gateway.conftest import Served, chat
from tests.integration.scheduler.conftest import Site, spec
from tests.integration.scheduler.serving import ServingNode, gateway, serving_node
from tests.support.fake_engine import hang, speak
from tests.support.fake_node import MIB
from thaw.cli.app import main

URL, ADMIN = "/v1/chat/completions", "/admin/v1"


@pytest.fixture
async def node(site: Site) -> ServingNode:
    """Start a node with room for two models."""
    return await serving_node(site, budget=700 * MIB)


@pytest.fixture
async def served(site: Site, node: ServingNode) -> AsyncIterator[Served]:
    site.scheduler(preempt_after=60.0)
    await site.add(spec("a"), spec("b"), spec("c"), spec("held", pin=True))
    async with gateway(site) as served:
        yield served


async def explained(served: Served, **query: str) -> PlanExplained:
    answer = await served.http.get(f"{ADMIN}/explain", params=query)
    assert answer.status_code == 200, answer.text
    return PlanExplained.model_validate(answer.json())


async def known(served: Served, request_id: str) -> PlanExplained:
    """Return the plan of an ended request, once its trace is written and the plan has ended.

    An engine may respond before the scheduler has recorded that it is ready.
    """
    async with asyncio.timeout(60):
        while True:
            found = (await served.http.get(f"{ADMIN}/explain", params={"request": request_id})).json()
            if found.get("request") and found["plan"]["outcome"] != "pending":
                return PlanExplained.model_validate(found)
            await asyncio.sleep(0.02)


async def busy(site: Site, node: ServingNode, *models: str) -> None:
    """Wait until the scheduler knows that these instances serve."""
    await node.publish()

    async def reported() -> bool:
        (shown,) = (await site.view()).nodes
        return {i.model for i in shown.instances if i.load.active} >= set(models)

    await site.until(reported)


async def post_named(served: Served, monkeypatch: pytest.MonkeyPatch, request_id: str, model: str) -> asyncio.Task[httpx.Response]:
    """Request `model` with an id that is known before the response.

    The gateway, which assigns ids, runs in this process.
    """
    taken = asyncio.Event()

    def give() -> str:
        taken.set()
        monkeypatch.undo()
        return request_id

    monkeypatch.setattr("services.gateway.http.middleware.request_id.new_request_id", give)
    task = asyncio.create_task(served.http.post(URL, json=chat(model)))
    await taken.wait()
    return task


async def test_request_is_explained_by_the_plan_it_waited_for(served: Served, node: ServingNode) -> None:
    answer = await served.http.post(URL, json=chat("a"))
    assert answer.status_code == 200
    (start,) = node.starts("a")
    found = await known(served, answer.headers["x-request-id"])
    assert (found.plan.plan_id, found.plan.instance_id, found.plan.outcome) == (start.plan_id, start.instance_id, "ready")
    assert found.request is not None
    assert (found.request.load_plan_id, found.request.cold, found.running) == (start.plan_id, True, None)
    chosen = found.plan.chosen
    assert chosen is not None
    assert chosen.model_copy(update={"took_ms": None}) in found.plan.candidates
    assert (chosen.node, chosen.device_ids, chosen.excluded) == ("node-0", start.device_ids, None)
    assert chosen.predicted_ms is not None
    assert sum(chosen.predicted.values()) >= chosen.predicted_ms > 0
    assert chosen.error_ms == pytest.approx((chosen.took_ms or 0) - chosen.predicted_ms)
    assert {"schedule", "load"} <= found.plan.measured_phases.keys()
    warm = await served.http.post(URL, json=chat("a"))
    assert warm.status_code == 200
    again = await known(served, warm.headers["x-request-id"])
    assert again.plan.plan_id == start.plan_id, "the plan that started what it met"
    assert again.request is not None
    assert not again.request.cold
    assert len(node.starts()) == 1


async def test_unfinished_request_is_explained_by_its_instance_or_obstacle(
    site: Site, served: Served, node: ServingNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running request is explained by its instance, a waiting one by its obstacle."""
    node.behaviour = hang
    running = await post_named(served, monkeypatch, "runs", "a")
    await site.until(lambda: any(e.requests for e in node.engines.values()))
    more = asyncio.create_task(served.http.post(URL, json=chat("held")))
    await site.until(lambda: all(any(e.model == m and e.requests for e in node.engines.values()) for m in ("a", "held")))
    (start,) = node.starts("a")
    found = await explained(served, request="runs")
    assert found.running is not None
    assert (found.running.request_id, found.running.model, found.running.instance_id) == ("runs", "a", start.instance_id)
    assert (found.plan.plan_id, found.request) == (start.plan_id, None)
    await busy(site, node, "a", "held")
    waiting = await post_named(served, monkeypatch, "waits", "c")

    async def queued() -> bool:
        return (await served.http.get(f"{ADMIN}/explain", params={"about": "waits"})).status_code == 200

    await site.until(queued)
    held_up = await explained(served, about="waits")
    assert held_up.running is not None
    assert (held_up.running.model, held_up.running.instance_id) == ("c", None)
    assert held_up.plan.way == "wait"
    assert held_up.queue is not None
    assert (held_up.queue.position, held_up.queue.waiting) == (1, 1)
    assert [bool(c.excluded) for c in held_up.plan.candidates] == [True], "the one device, and why not"
    for task in (running, more, waiting):
        task.cancel()
    await asyncio.gather(running, more, waiting, return_exceptions=True)


async def test_thaw_explain_shows_the_instance_of_a_running_request(
    site: Site, served: Served, node: ServingNode, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    node.behaviour = hang
    running = await post_named(served, monkeypatch, "runs", "a")
    await site.until(lambda: any(e.requests for e in node.engines.values()))
    (start,) = node.starts("a")
    monkeypatch.setenv("THAW_URL", served.base)
    assert await asyncio.to_thread(main, ["explain", "runs", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["plan_id"], document["running"]["instance_id"]) == (start.plan_id, start.instance_id)
    assert await asyncio.to_thread(main, ["explain", "runs"]) == 0
    assert f"request runs for a: runs on {start.instance_id}" in " ".join(capsys.readouterr().out.split())
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_what_if_query_is_answered_and_changes_nothing(site: Site, served: Served, node: ServingNode) -> None:
    node.behaviour = hang
    tasks = [asyncio.create_task(served.http.post(URL, json=chat(m))) for m in ("a", "held")]
    await site.until(lambda: all(any(e.model == m and e.requests for e in node.engines.values()) for m in ("a", "held")))
    await busy(site, node, "a", "held")
    tasks.append(asyncio.create_task(served.http.post(URL, json=chat("c"))))
    bigger: dict[str, Any] = {"kind": "add_node", "node": "big", "devices": 1, "nbytes": 900 * MIB}

    async def answered() -> bool:
        answer = await served.http.post(f"{ADMIN}/explain", json={"about": "c", "what_if": [bigger]})
        assert answer.status_code == 200, answer.text
        found = PlanExplained.model_validate(answer.json())
        return bool(found.assumed) and found.plan.chosen is not None and found.plan.chosen.node == "big"

    await site.until(answered)
    assert {n.node for n in (await site.view()).nodes} == {"node-0"}
    assert not node.starts("c")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_each_admin_route_reaches_the_scheduler(site: Site, served: Served, node: ServingNode) -> None:
    http = served.http

    async def post(path: str, status: int = 200, **body: Any) -> dict[str, Any]:
        answer = await http.post(f"{ADMIN}/{path}", json=body) if body else await http.post(f"{ADMIN}/{path}")
        assert answer.status_code == status, f"{path}: {answer.text}"
        found: dict[str, Any] = answer.json()
        return found

    woken = await post("models/a/wake")
    assert woken["instance_id"] in node.instances
    cluster = (await http.get(f"{ADMIN}/cluster")).json()
    assert {m["card"]["spec"]["name"] for m in cluster["models"]} == {"a", "b", "c", "held"}
    assert (await explained(served, plan=woken["plan_id"])).plan.instance_id == woken["instance_id"]
    assert (await explained(served, about="a")).plan.plan_id == woken["plan_id"]
    assert (await post("explain", model="a"))["plan"]["plan_id"] == woken["plan_id"]
    missing = await http.get(f"{ADMIN}/explain", params={"request": "nobody's"})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    for action, cordoned in (("cordon", True), ("uncordon", False), ("drain", True), ("uncordon", False)):
        await post(f"nodes/node-0/{action}")
        (shown,) = (await http.get(f"{ADMIN}/cluster")).json()["nodes"]
        assert (shown["cordoned"], action) == (cordoned, action)
    assert (await post("nodes/none/cordon", 404))["error"]["code"] == "not_found"
    await site.until(lambda: not node.of("a"))  # drained, it was idle
    assert (await http.get(f"{ADMIN}/migrations")).json()["migrations"] == []
    assert (await http.get(f"{ADMIN}/migrations/none")).json()["migrations"] == []
    assert (await http.get(f"{ADMIN}/migrations", params={"limit": "0"})).status_code == 400
    assert (await post("migrations", 404, request_id="nobody's"))["error"]["code"] == "not_found"
    assert (await post("migrations", 400, wait=False))["error"]["code"] == "invalid_request"
    await post("models/a/wake")
    slept = await post("models/a/sleep")
    assert len(slept["instances"]) == 1
    assert (await http.delete(f"{ADMIN}/models/b")).status_code == 200
    assert "b" not in {m.card.name for m in (await site.view()).models}


async def test_a_surge_is_met_by_the_requests_of_the_last_window_too(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A surge is sized by the requests of the last window too.

    HydraServe §6.1, live: nine requests at once on an instance that runs four and is given eight.
    Waiting and running requests need three instances; with the nine expected in the next window
    they need five.
    """
    # No second passes between the arrivals and the decision, however slow the machine is.
    monkeypatch.setattr("services.gateway.domain.arrivals.ARRIVALS_WINDOW_S", 3600.0)
    node = await serving_node(site, budget=3000 * MIB, behaviour=hang)
    site.scheduler()
    await site.add(spec("m", max_concurrency=4, replicas={"min": 0, "max": 8}))
    async with gateway(site) as served:
        node.behaviour = speak
        assert (await served.http.post(URL, json=chat("m"))).status_code == 200
        next(iter(node.engines.values())).behaviour = hang
        node.hold_starts = asyncio.Event()
        await asyncio.sleep(0)
        asked = [asyncio.create_task(served.http.post(URL, json=chat("m"))) for _ in range(9)]
        await site.until(lambda: len(node.starts("m")) == 5)
        states = [i.state for i in node.of("m")]
        assert states.count(InstanceState.READY) == 1
        node.behaviour = speak
        node.hold_starts.set()
        await site.until(lambda: asked[-1].done() or any(t.done() for t in asked))
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    assert len(node.starts("m")) == 5


async def test_objectives_of_served_requests_survive_a_change_of_leader(
    site: Site, node: ServingNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.adapters.objective_publisher.REPORT_INTERVAL_S", 0.01)
    first = site.scheduler()
    await site.add(spec("fast", slo=Slo(ttft=600)), spec("slow", slo=Slo(ttft=1e-6)), spec("without"))
    expected = {"fast": (2, 2), "slow": (1, 0)}

    async def counted() -> bool:
        return await objectives(site) == expected

    async with gateway(site) as served:
        for model in ("fast", "slow", "without", "fast"):
            assert (await served.http.post(URL, json=chat(model))).status_code == 200
        await site.until(counted)
    ((stop, _),) = site.schedulers
    stop.set()
    await first
    site.scheduler()
    assert await objectives(site) == expected


async def objectives(site: Site) -> dict[str, tuple[int, int]]:
    return {m.card.name: (m.objective.total, m.objective.met) for m in (await site.view()).models if m.objective is not None}
