"""The console's live pages: every part of the cluster, and active requests, in a browser."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.async_api import async_playwright, expect

from services.gateway.domain.console_view import View
from shared.contracts.admin import AddModels, ClusterView, LoaderView, LoadView, ModelView, NodeView
from shared.contracts.loader import DeviceMemory, LinkStatus, ModelUnits
from shared.contracts.node import DeviceStatus, InstanceMemory, InstanceState, InstanceStatus, Suspension
from shared.contracts.phases import Phase
from tests.integration.gateway.conftest import CARDS, Scheduler, ServeFn, chat, until, until_listed
from tests.support.browser import needs_chromium, open_page
from tests.support.fake_engine import FakeNode, card_of


async def test_active_requests_of_all_gateways_are_listed_until_they_end(node: FakeNode, serve: ServeFn, tmp_path: Path) -> None:
    async with serve() as first, serve(home=tmp_path / "second") as second:
        await asyncio.gather(until_listed(first, CARDS), until_listed(second, CARDS))
        async with first.http.stream("GET", "/ui/events?topics=requests", timeout=None) as stream:
            events = (json.loads(line.removeprefix("data: ")) async for line in stream.aiter_lines() if line.startswith("data: "))
            shown: View = (await anext(events))["view"]

            async def until_shown(holds: Callable[[], bool]) -> None:
                async with asyncio.timeout(60):
                    while not holds():
                        for section, records in (await anext(events)).get("changes", {}).items():
                            merged = {**shown[section], **records}
                            shown[section] = {key: record for key, record in merged.items() if record is not None}

            await until_shown(lambda: len(shown["gateways"]) == 2)
            assert shown["active"] == {}
            asked = asyncio.create_task(second.http.post("/v1/chat/completions", json=chat()))
            await until_shown(lambda: bool(shown["active"]))
            ((request_id, active),) = shown["active"].items()
            assert (active["model"], active["endpoint"], active["state"]) == ("alpha", "chat", "waiting")
            assert (active["instance_id"], active["ttft_ms"]) == (None, None)
            assert sum(g["active"] for g in shown["gateways"].values()) == 1
            await node.engine("alpha")
            answer = await asked
            assert (answer.status_code, answer.headers["x-request-id"]) == (200, request_id)
            await until_shown(lambda: not shown["active"] and request_id in shown["requests"])


def busy_view() -> ClusterView:
    """Return a cluster in which weights are shared and flow, and engines are suspended and wait."""
    spec = {"generation": 1, "plan_id": "plan", "token": 1, "device_ids": ("cpu:0",)}
    mib = 2**20

    def instance(model: str, state: InstanceState = InstanceState.READY, **fields: Any) -> InstanceStatus:
        memory = InstanceMemory(weights=200 * mib, private=60 * mib, kv=40 * mib, reserved=300 * mib)
        return InstanceStatus.model_validate(
            {"instance_id": f"i-{model}", "model": model, "revision": model, "state": state, "memory": memory} | spec | fields
        )

    def units(model: str) -> ModelUnits:
        return ModelUnits(model=model, weights_id=model, mapped_bytes=200 * mib, reusable_bytes=0, shared_bytes=80 * mib)

    waiting = instance("hasty", InstanceState.PREPARING, phase=Phase.RESERVE)
    suspended = Suspension(way="cuda", snapshot_bytes=30 * mib, swap_bytes=20 * mib)
    parked = instance("vectors", InstanceState.SUSPENDED, memory=InstanceMemory(reserved=10 * mib), suspension=suspended)
    device = DeviceStatus(
        device_id="cpu:0", kind="cpu", budget_bytes=2048 * mib, reserved_bytes=900 * mib, memory="separate", executor_bytes=50 * mib
    )
    memory = DeviceMemory(
        device_id="cpu:0", total_bytes=2048 * mib, free_bytes=1628 * mib, mapped_bytes=320 * mib, reusable_bytes=100 * mib,
        models=(units("alpha"), units("beta")),
    )  # fmt: skip
    remote = LinkStatus(
        link="remote:hub.example",
        bytes_per_second=8e6,
        queued_bytes=50 * mib,
        loads=1,
        finish_ms=6500,
        moved_bytes=150 * mib,
        models=("hasty",),
    )
    loader = LoaderView(
        dram_budget_bytes=1024 * mib, dram_bytes=256 * mib, ssd_budget_bytes=4096 * mib, ssd_bytes=512 * mib, memory=(memory,),
        links=(remote, LinkStatus(link="ssd:disk0", moved_bytes=7 * mib)),
        loads=(LoadView(model="hasty", total_bytes=200 * mib, loaded_bytes=100 * mib, fetched_bytes=120 * mib, on_devices={"cpu:0": 90 * mib}),),
    )  # fmt: skip
    instances = (instance("alpha"), instance("beta"), waiting, parked)
    node = NodeView(
        node="node-0",
        alive=True,
        loader_alive=True,
        devices=(device,),
        instances=instances,
        loader=loader,
        snapshot_budget_bytes=999 * mib,
    )
    models = tuple(
        ModelView(
            card=card_of(name, source="https://hub.example/hasty" if name == "hasty" else "/models/m"),
            waiting=name == "beta",
            error=error,
        )
        for name, error in (("alpha", None), ("beta", None), ("hasty", None), ("vectors", None), ("lost", "The files are gone"))
    )
    others = tuple(NodeView(node=f"node-{n}", alive=True) for n in range(1, 40))
    return ClusterView(scheduler="s", epoch=1, models=models, nodes=(node, *others))


@needs_chromium
async def test_every_part_of_the_cluster_page_says_what_it_is_and_what_can_be_done(
    node: FakeNode, scheduler: Scheduler, serve: ServeFn
) -> None:
    scheduler.view = busy_view()
    async with serve() as served, async_playwright() as playwright:
        await until_listed(served, CARDS)
        browser, page = await open_page(playwright)
        await page.goto(f"{served.base}/ui")
        card = page.get_by_role("region", name="Node node-0")
        details = page.get_by_role("complementary", name="Details")
        bar = card.get_by_role("toolbar", name=re.compile("^Memory of cpu:0"))
        # By keyboard: Tab reaches the bar from the device, the arrow keys go through its parts.
        await card.get_by_role("button", name="Device cpu:0").focus()
        await page.keyboard.press("Enter")
        await expect(details).to_contain_text(re.compile(r"Shared by models\s*80.0 MiB"))
        await expect(details.get_by_role("row", name=re.compile("^alpha"))).to_contain_text("80.0 MiB")
        await page.keyboard.press("Tab")
        reported = []
        for _ in range(await bar.get_by_role("button").count()):
            await page.keyboard.press("Enter")
            part = await page.evaluate("document.activeElement.getAttribute('aria-label')")
            heading = await details.get_by_role("heading").inner_text()
            reported.append((part, heading, await details.locator(".notice b").inner_text()))
            await page.keyboard.press("ArrowRight")
        ready = [
            (f"{name}: {kind}: {size} MiB", name, kind)
            for name in ("alpha", "beta")
            for kind, size in (
                ("weights", "120.0"),
                ("KV cache in use", "40.0"),
                ("other memory of the engine", "20.0"),
                ("rest", "40.0"),
            )
        ]
        ready = [(a.replace("rest", "reserved, not in use"), b, c.replace("rest", "reserved, not in use")) for a, b, c in ready]
        assert reported == [
            *ready,
            ("hasty: waits for memory: 300.0 MiB", "hasty", "waits for memory"),
            ("vectors: left by suspended engines: 10.0 MiB", "vectors", "left by suspended engines"),
            ("shared weights: 80.0 MiB", "Device cpu:0", "shared weights"),
            ("executor: 50.0 MiB", "Device cpu:0", "executor"),
            ("reusable weights: 100.0 MiB", "Device cpu:0", "reusable weights"),
            ("free: 1.0 GiB", "Device cpu:0", "free"),
        ]
        # A suspended engine: host memory and swap apart.
        await card.get_by_role("button", name=re.compile("^vectors 30.0 MiB in host memory, 20.0 MiB in swap")).click()
        await expect(details).to_contain_text("30.0 MiB in host memory, 20.0 MiB in swap")
        # What flows: which load, from where to where, bytes and rate.
        flow = card.get_by_role("group", name="Load of hasty on node-0")
        text = "hasty from https://hub.example/hasty to the memory of node-0 over remote:hub.example: 100.0 MiB of 200.0 MiB"
        await expect(flow).to_contain_text(text)
        await expect(flow).to_contain_text("120.0 MiB received 7.6 MiB/s 90.0 MiB on cpu:0")
        await card.get_by_role("button", name="remote:hub.example").click()
        for text in (
            r"From\s*hub.example",
            r"To\s*the memory of node-0",
            r"Moved\s*150.0 MiB",
            r"Done in\s*6.50 s",
            r"Models\s*hasty",
        ):
            await expect(details).to_contain_text(re.compile(text))
        await card.get_by_role("button", name="node-0", exact=True).click()
        await expect(details).to_contain_text(re.compile(r"host memory\s*256.0 MiB of 1.0 GiB"))
        await expect(details).to_contain_text(re.compile(r"on disk\s*512.0 MiB of 4.0 GiB"))
        await details.get_by_role("button", name="ssd:disk0").click()
        await expect(details).to_contain_text("Nothing flows now")
        # Models that wait or failed.
        await page.get_by_role("region", name="Waiting or failed models").get_by_role("button", name="lost").click()
        await expect(details).to_contain_text("The files are gone")
        await expect(details.get_by_role("link", name="The last decision")).to_have_attribute("href", "#/explain/lost")
        # Only some of many nodes are drawn; the filter finds them by name and by model.
        await expect(page.locator("section.node")).to_have_count(25)
        await page.get_by_role("button", name="Show 15 more nodes").click()
        await expect(page.locator("section.node")).to_have_count(40)
        await page.get_by_label("Find a node").fill("hasty")
        await expect(page.locator("section.node")).to_have_count(1)
        await card.get_by_role("button", name=re.compile("^alpha ready")).click()
        await details.get_by_role("button", name="Pin alpha").click()
        await until_asked(scheduler, "add_models")
        (order,) = (request for request in scheduler.asked if isinstance(request, AddModels))
        assert [(spec.name, spec.pin) for spec in order.specs] == [("alpha", True)]
        # The link to a model opens its details.
        await details.get_by_role("link", name="alpha").click()
        await expect(page.get_by_role("complementary", name="Details").get_by_role("heading")).to_have_text("alpha")
        await browser.close()


async def until_asked(scheduler: Scheduler, kind: str) -> None:
    async def asked() -> bool:
        return any(request.kind == kind for request in scheduler.asked)

    await until(asked)


@needs_chromium
async def test_a_request_appears_by_itself_and_leaves_when_it_ends(node: FakeNode, scheduler: Scheduler, serve: ServeFn) -> None:
    async with serve() as served, async_playwright() as playwright:
        await until_listed(served, CARDS)
        browser, page = await open_page(playwright)
        await page.goto(f"{served.base}/ui#/requests")
        live = page.get_by_role("region", name="Running and waiting requests", exact=True)
        await expect(live).to_contain_text("0 requests at 1 gateway")
        asked = asyncio.create_task(served.http.post("/v1/chat/completions", json=chat()))
        row = live.get_by_role("row", name=re.compile("alpha"))
        await expect(row).to_contain_text(re.compile("waiting.*waits for an instance"))
        await node.engine("alpha")
        request_id = (await asked).headers["x-request-id"]
        await expect(row).to_be_hidden()
        await expect(page.get_by_role("link", name=request_id[:16])).to_be_visible()
        await browser.close()
