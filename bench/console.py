"""Measure the cost of open console pages to a gateway, and how soon a browser shows them.

    python -m bench.console [--models 1000] [--nodes 100] [--pages 10] [--seconds 60]

A real gateway process on a real nats-server; this process stands for the scheduler and answers with
a cluster in which a tenth of the models, and as many instances, change between two readings. With
Chromium it also prints the times of the first paint, as the browser reports them, and of the first
nodes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator

import httpx
import psutil
from playwright.async_api import async_playwright

from shared.contracts import subjects
from shared.contracts.admin import ADMIN_REQUEST, AdminRequest, ClusterView, ModelView, NodeView
from shared.contracts.base import Message
from shared.contracts.model_info import ModelInfo
from shared.contracts.models import ModelCard, ModelSpec
from shared.contracts.node import DeviceStatus, InstanceState, InstanceStatus
from shared.messaging import Mesh
from shared.ports import free_port
from shared.settings import CommonSettings
from tests.support.browser import CHROMIUM
from tests.support.servers import NatsServer

DEVICES = 8
PAINTS = """() => Object.fromEntries(performance.getEntriesByType('paint').map((e) => [e.name, e.startTime]))"""
"""Milliseconds from the navigation to the paints that the browser reports."""
_WORST_TASK = """(seconds) => new Promise((done) => {
  let worst = 0;
  new PerformanceObserver((list) => { for (const e of list.getEntries()) worst = Math.max(worst, e.duration); }).observe({ type: 'longtask' });
  setTimeout(() => done(worst), seconds * 1000);
})"""
"""Milliseconds of the longest task of the page meanwhile; tasks under 50 ms are not reported."""
_OPENINGS = 5


class Cluster:
    """A cluster whose view changes with every reading."""

    def __init__(self, models: int, nodes: int) -> None:
        self.readings = 0
        self.reply_bytes = 0
        info = ModelInfo(
            source="/m", revision="0", architecture="A", model_type="a", task="generate", weights_bytes=1, parameters=1,
            dtype="float32", context_length=2048, kv_bytes_per_token=1, vocab_size=1,
        )  # fmt: skip
        specs = [ModelSpec(name=f"org/model-{n}", source=f"/models/{n}") for n in range(models)]
        self._models = [ModelView(card=ModelCard(spec=spec, info=info, created=0)) for spec in specs]
        self._nodes = [self._node(f"node-{n}", n, specs) for n in range(nodes)]

    @staticmethod
    def _node(name: str, number: int, specs: list[ModelSpec]) -> NodeView:
        devices = tuple(
            DeviceStatus(device_id=f"cuda:{d}", kind="cuda", budget_bytes=80 << 30, reserved_bytes=20 << 30) for d in range(DEVICES)
        )
        instances = tuple(
            InstanceStatus(
                instance_id=f"i-{number}-{d}", plan_id="p", token=1, model=specs[(number * DEVICES + d) % len(specs)].name, generation=1,
                revision="0", device_ids=(f"cuda:{d}",), state=InstanceState.READY,
            )
            for d in range(DEVICES)
        )  # fmt: skip
        return NodeView(node=name, alive=True, devices=devices, instances=instances)

    async def answer(self, request: AdminRequest) -> Message:
        """Answer with the next view."""
        self.readings += 1
        for n in range(self.readings % 10, len(self._models), 10):
            self._models[n] = self._models[n].model_copy(update={"waiting": self.readings})
        for n in range(self.readings % 10, len(self._nodes), 10):
            instances = self._nodes[n].instances
            changed = [i.model_copy(update={"load": i.load.model_copy(update={"active": self.readings})}) for i in instances]
            self._nodes[n] = self._nodes[n].model_copy(update={"instances": tuple(changed)})
        view = ClusterView(scheduler="s", epoch=1, models=tuple(self._models), nodes=tuple(self._nodes))
        self.reply_bytes = len(view.model_dump_json())
        return view


@contextlib.asynccontextmanager
async def gateway(nats_url: str) -> AsyncIterator[tuple[psutil.Process, httpx.AsyncClient]]:
    """Run a gateway process that needs no key."""
    port = free_port()
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "THAW_NATS_URL": nats_url, "THAW_GATEWAY_PORT": str(port), "THAW_HOME": home}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.gateway", env=environment, stderr=asyncio.subprocess.DEVNULL
        )
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                async with asyncio.timeout(60):
                    while not await _is_ready(client):  # noqa: ASYNC110 - the condition is behind HTTP
                        await asyncio.sleep(0.1)
                yield psutil.Process(process.pid), client
        finally:
            process.terminate()
            await process.wait()


async def _is_ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/ready")).is_success
    except httpx.HTTPError:
        return False


async def follow(client: httpx.AsyncClient, received: list[int]) -> None:
    """Read the stream of a page, and count its bytes."""
    async with client.stream("GET", "/ui/events?topics=cluster", timeout=None) as stream:
        async for part in stream.aiter_bytes():
            received.append(len(part))  # noqa: PERF401 - another task reads the list meanwhile


async def measure(process: psutil.Process, seconds: float) -> float:
    """Return the percentage of a core that the process uses."""
    before, started = sum(process.cpu_times()[:2]), time.monotonic()
    await asyncio.sleep(seconds)
    return 100 * (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - started)


async def draw(url: str, seconds: float) -> None:
    """Open the cluster page in a browser, each time with an empty cache, and print its times."""
    if CHROMIUM is None:
        print("no Chromium is installed: no times of a browser")
        return
    first, full, nodes = list[float](), list[float](), list[float]()
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        for opening in range(_OPENINGS):
            page = await browser.new_page()
            await page.goto(f"{url}/ui")
            await page.locator("section.node").first.wait_for()
            nodes.append(await page.evaluate("performance.now()"))
            paints = await page.evaluate(PAINTS)
            first.append(paints["first-paint"])
            full.append(paints["first-contentful-paint"])
            if opening == _OPENINGS - 1:
                worst = await page.evaluate(_WORST_TASK, seconds)
                count = await page.locator("section.node").count()
            await page.close()
        await browser.close()
    middle = _OPENINGS // 2
    print(
        f"browser: first paint after {sorted(first)[middle]:.0f} ms, first content {sorted(full)[middle]:.0f} ms, "
        f"first nodes {sorted(nodes)[middle]:.0f} ms (median of {_OPENINGS} openings)"
    )
    print(
        f"browser: {count} nodes are drawn at first; the longest task of the page in {seconds:.0f} s took {worst:.0f} ms (0: under 50)"
    )


async def run(models: int, nodes: int, pages: int, seconds: float) -> None:
    """Measure a gateway without pages, then with pages."""
    server, cluster, received = NatsServer(), Cluster(models, nodes), list[int]()
    mesh = Mesh(CommonSettings.model_validate({"nats_url": server.url}), "bench")
    try:
        await mesh.start()
        await mesh.respond(subjects.ADMIN, ADMIN_REQUEST, cluster.answer).start()
        async with gateway(server.url) as (process, client):
            idle = await measure(process, seconds / 3)
            async with asyncio.TaskGroup() as group:
                followers = [group.create_task(follow(client, received)) for _ in range(pages)]
                async with asyncio.timeout(120):
                    while len(received) < pages:  # noqa: ASYNC110 - the pages open
                        await asyncio.sleep(0.1)
                first, readings = sum(received), cluster.readings
                busy = await measure(process, seconds)
                for follower in followers:
                    follower.cancel()
            count = cluster.readings - readings
            await draw(str(client.base_url), min(seconds, 20.0))
        print(
            f"{models} models, {nodes} nodes with {DEVICES} instances each; the scheduler's reply has {cluster.reply_bytes / 1e6:.1f} MB"
        )
        print(f"gateway without pages: {idle:.2f} % of a core")
        print(f"gateway with {pages} pages: {busy:.2f} % of a core, a reading every {seconds / max(1, count):.1f} s")
        print(
            f"bytes to a page: {first / pages / 1e3:.0f} kB first, then {(sum(received) - first) / pages / max(1, count) / 1e3:.0f} kB for a change"
        )
    finally:
        await mesh.stop()
        server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--pages", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=60.0)
    asyncio.run(run(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
