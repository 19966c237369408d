"""Simulations of the admin API: the recorded requests again, in a process of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest

from services.gateway.adapters import simulation
from services.gateway.authorization import hash_key
from shared.contracts import subjects
from shared.contracts.admin import ADMIN_REQUEST, AdminRequest, ClusterView, ModelView, NodeView
from shared.contracts.base import Message
from shared.contracts.node import DeviceStatus
from tests.integration.gateway.conftest import CARDS, Served, ServeFn, chat, until, until_listed
from tests.support.fake_engine import FakeNode

URL = "/admin/v1/simulations"
_DEVICE = DeviceStatus(device_id="cpu:0", kind="cpu", budget_bytes=10**9, reserved_bytes=0)
VIEW = ClusterView(
    scheduler="s",
    epoch=1,
    policy="thaw",
    models=tuple(ModelView(card=card) for card in CARDS),
    nodes=tuple(NodeView(node=name, alive=alive, devices=(_DEVICE,)) for name, alive in (("x", True), ("y", True), ("z", False))),
)


@pytest.fixture(autouse=True)
async def scheduler(node: FakeNode) -> None:
    async def answer(request: AdminRequest) -> Message:
        return VIEW

    await node.mesh.respond(subjects.ADMIN, ADMIN_REQUEST, answer).start()


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the simulator by a process that reports progress and does not end."""
    monkeypatch.setattr(simulation, "_MODULE", "tests.support.hanging_simulator")


async def events(lines: AsyncIterator[str]) -> AsyncIterator[tuple[str, Any]]:
    name = ""
    async for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


async def simulate(served: Served, **order: Any) -> list[tuple[str, Any]]:
    async with served.http.stream("POST", URL, json=order) as answer:
        assert answer.status_code == 200, await answer.aread()
        return [event async for event in events(answer.aiter_lines())]


async def served_with_requests(served: Served, node: FakeNode) -> None:
    """Send three requests, and wait for their traces."""
    await until_listed(served, CARDS)
    await node.engine("alpha")
    for _ in range(3):
        assert (await served.http.post("/v1/chat/completions", json=chat())).status_code == 200

    async def traced() -> bool:
        return len((await served.http.get("/admin/v1/traces")).json()["traces"]) == 3

    await until(traced)


async def test_recorded_requests_are_simulated_under_policies_and_without_a_node(node: FakeNode, serve: ServeFn) -> None:
    async with serve() as served:
        await served_with_requests(served, node)
        options = (await served.http.get(URL)).json()
        assert (options["installed"], options["policy"], options["nodes"]) == (True, "thaw", ["x", "y"])
        assert {"thaw", "lru"} <= set(options["policies"])
        *progress, (name, result) = await simulate(served, policies=["thaw", "lru"], without="y")
        assert name == "result", result
        assert [data["done"] for _, data in progress] == [0, 1, 2, 3, 4]
        assert result["recorded"]["requests"] == 3
        assert [(r["policy"], r["without"], r["requests"], r["lost"]) for r in result["runs"]] == [
            ("thaw", None, 3, 0), ("lru", None, 3, 0), ("thaw", "y", 3, 0), ("lru", "y", 3, 0),
        ]  # fmt: skip
        assert result["command"] == ("thaw simulate --from-mesh --mesh --last 3600s --latest 2000 --policy thaw,lru --without y")


async def test_errors_say_what_is_missing(node: FakeNode, serve: ServeFn, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve() as served:
        ((name, error),) = await simulate(served)
        assert (name, error["code"]) == ("error", "invalid_request")
        assert "no trace of a request" in error["message"]
        await served_with_requests(served, node)
        name, error = (await simulate(served, without="gone"))[-1]
        assert (name, error["status"]) == ("error", 400)
        assert "'gone'" in error["message"]
        for order, param in (
            ({"policies": ["best"]}, "policies"),
            ({"policies": ["lru", "lru"]}, "policies"),
            ({"last_s": 1}, "last_s"),
            ({"policies": []}, "policies"),
        ):
            answer = await served.http.post(URL, json=order)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), order
        monkeypatch.setattr(simulation, "_MODULE", "simulator_that_is_not_installed")
        assert (await served.http.get(URL)).json()["installed"] is False
        answer = await served.http.post(URL, json={})
        assert answer.status_code == 404
        assert "no simulator" in answer.json()["error"]["message"]


async def test_only_admin_keys_simulate(node: FakeNode, serve: ServeFn) -> None:
    async with serve(admin_key="root") as served:
        body = {"name": "viewer", "scope": "read-only", "sha256": hash_key("view")}
        root, viewer = ({"authorization": f"Bearer {key}"} for key in ("root", "view"))
        assert (await served.http.post("/admin/v1/keys", json=body, headers=root)).status_code == 200
        assert (await served.http.get(URL, headers=viewer)).status_code == 200
        assert (await served.http.post(URL, json={}, headers=viewer)).status_code == 403
        assert (await served.http.post(URL, json={})).status_code == 401


def children() -> set[int]:
    """Return the simulator processes of this one."""
    found = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if any("hanging_simulator" in part for part in child.cmdline()):
                found.add(child.pid)
    return found


@pytest.mark.usefixtures("hanging")
async def test_one_simulation_runs_at_a_time_and_ends_with_its_client(node: FakeNode, serve: ServeFn) -> None:
    async with serve() as served:
        await served_with_requests(served, node)
        async with served.http.stream("POST", URL, json={}) as answer:
            lines = events(answer.aiter_lines())
            assert await anext(lines) == ("progress", {"done": 1, "of": 2})
            assert len(children()) == 1
            second = await served.http.post(URL, json={})
            assert (second.status_code, second.headers["x-should-retry"]) == (409, "false")
            # Requests are served meanwhile.
            assert (await served.http.post("/v1/chat/completions", json=chat())).status_code == 200

        async def next_one_runs() -> bool:
            """The gateway may see the end of the process a moment after this test."""
            if children():
                return False
            async with served.http.stream("POST", URL, json={}) as answer:
                if answer.status_code == 409:
                    return False
                assert answer.status_code == 200
                return (await anext(events(answer.aiter_lines())))[0] == "progress"

        await until(next_one_runs)


@pytest.mark.usefixtures("hanging")
async def test_a_simulation_is_bounded_in_time_and_ends_with_its_gateway(node: FakeNode, serve: ServeFn) -> None:
    async with serve(simulation_timeout=1.0) as served:
        await served_with_requests(served, node)
        name, error = (await simulate(served))[-1]
        assert (name, error["code"]) == ("error", "deadline_exceeded")
        assert children() == set()
    async with serve() as served:
        running = asyncio.create_task(simulate(served))

        async def started() -> bool:
            return bool(children())

        await until(started)
        served.stop.set()
        assert (await running)[-1][1]["code"] == "shutting_down"
        assert await served.task == 0
        assert children() == set()
