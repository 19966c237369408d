"""Each process with its credentials of compose/ can do its work, and nothing more."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from nats.aio.msg import Msg

from shared.contracts import subjects
from shared.contracts.channels import CHANNELS
from shared.messaging.mesh import flush
from shared.ports import free_port
from tests.docker.guarded import NODES, Guarded
from tests.support.launcher import ROOT, until
from tests.support.paced_zygote import Pace
from thaw.demo.models import make_demo_model
from thaw.secrets import SERVICES, node_user

UNUSED = "thaw.v1.unused"
USERS = (*SERVICES, *map(node_user, NODES))
ALL_ROLES = {*SERVICES, "node"}
MAY_PUBLISH = {
    "demand": {"gateway"},
    "objectives": {"gateway"},
    "usage": {"gateway"},
    "admin": {"gateway", "scheduler"},
    "loadFailed": {"scheduler"},
    "statusWanted": {"gateway", "scheduler"},
    "nodeCommand": {"scheduler"},
    "nodeLogs": {"gateway"},
    "nodeStatus": {"node"},
    "nodeChanges": {"node"},
    "engineReport": {"node"},
    "loaderCommand": {"scheduler", "node"},
    "loaderFiles": {"gateway"},
    "loaderStatus": {"node"},
    "infer": {"gateway"},
    "engineControl": ALL_ROLES,
    "executorControl": {"node"},
    "stageAddress": {"node"},
    "replies": {"node"},
    "bodyParts": {"node"},
    "gatewayControl": {"migrator"},
    "gatewayPresent": {"gateway"},
    "gatewayLimits": {"gateway"},
    "viewLatencies": {"gateway"},
    "viewRequests": {"gateway"},
    "findRequest": {"scheduler"},
    "migrations": {"scheduler", "migrator"},
    "requestTrace": {"gateway"},
    "keyChanged": {"gateway"},
    "loadTrace": {"scheduler"},
}
MAY_HEAR = {
    "demand": {"scheduler"},
    "objectives": {"scheduler"},
    "usage": {"scheduler"},
    "admin": {"scheduler"},
    "loadFailed": {"gateway"},
    "statusWanted": {"node"},
    "nodeCommand": {"node"},
    "nodeLogs": {"node"},
    "nodeStatus": {"gateway", "scheduler", "node"},
    "nodeChanges": {"gateway", "scheduler"},
    "engineReport": {"node"},
    "loaderCommand": {"node"},
    "loaderFiles": {"node"},
    "loaderStatus": {"scheduler", "node"},
    "infer": {"node"},
    "engineControl": {"node"},
    "executorControl": {"node"},
    "stageAddress": {"node"},
    "replies": {"gateway"},
    "bodyParts": {"gateway"},
    "gatewayControl": {"gateway"},
    "gatewayPresent": {"gateway"},
    "gatewayLimits": {"gateway"},
    "viewLatencies": {"gateway"},
    "viewRequests": {"gateway"},
    "findRequest": {"gateway"},
    "migrations": set(),  # over JetStream's own inboxes
    "requestTrace": set(),
    "keyChanged": set(),
    "loadTrace": set(),
}


async def _refused(guarded: Guarded, user: str, node: str, hear: bool) -> set[str]:
    """Return the channels that the server refuses to a user.

    Args:
        node: The owner of the channels.
    """
    values = {"node": subjects.token(node), "instance": subjects.instance_id(1, node), "executor": subjects.executor_id(1, node)}
    addresses = {re.sub(r"\{(\w+)\}", lambda v: values.get(v[1], "x"), c.address): c.name for c in CHANNELS}
    refusals: list[str] = []
    async with guarded.client(user) as (client, errors):
        for address in (*addresses, UNUSED):
            await (client.subscribe(address) if hear else client.publish(address, b"{}"))
        while not refusals or UNUSED not in refusals[-1]:  # refusals arrive in the order of the refused operations
            refusals.append(await asyncio.wait_for(errors.get(), 60))
    return {name for address, name in addresses.items() if any(f'"{address.lower()}"' in words for words in refusals)}


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize(("hear", "allowed"), [(False, MAY_PUBLISH), (True, MAY_HEAR)], ids=["publishes", "hears"])
async def test_channels_are_open_only_to_roles_that_need_them(
    guarded: Guarded, user: str, node: str, hear: bool, allowed: dict[str, set[str]]
) -> None:
    """Only services that need a channel can use it.

    A node can use no channel of another node.
    """
    assert allowed.keys() == {channel.name for channel in CHANNELS}
    role = user if user in SERVICES else "node"
    of_nodes = {c.name for c in CHANNELS if any(owned in c.address for owned in ("{node}", "{instance}", "{executor}"))}
    closed = of_nodes if role == "node" and user != node_user(node) else set()
    assert await _refused(guarded, user, node, hear) == closed | {name for name, roles in allowed.items() if role not in roles}


async def test_a_node_reads_bodies_that_a_gateway_holds(guarded: Guarded) -> None:
    async with guarded.client("gateway") as (gateway, _), guarded.client(node_user(NODES[0])) as (node, _):

        async def answer(message: Msg) -> None:
            await message.respond(b"part of " + message.data)

        await gateway.subscribe(subjects.body_parts("g"), cb=answer)
        await flush(gateway)
        for name in (b"one", b"another"):
            assert (await node.request(subjects.body_parts("g"), name, timeout=60)).data == b"part of " + name


async def test_the_scheduler_answers_after_it_has_reported_its_progress(guarded: Guarded) -> None:
    async with guarded.client("gateway") as (gateway, _), guarded.client("scheduler") as (scheduler, refused):

        async def answer(message: Msg) -> None:
            for _ in range(300):  # a wake of ten minutes reports so often
                await message.respond(b"working")
            await message.respond(b"done")

        await scheduler.subscribe(subjects.ADMIN, cb=answer)
        await flush(scheduler)
        inbox = gateway.new_inbox()
        replies = await gateway.subscribe(inbox)
        await gateway.publish(subjects.ADMIN, b"wake", reply=inbox)
        for _ in range(300):
            assert (await replies.next_msg(timeout=60)).data == b"working"
        assert (await replies.next_msg(timeout=60)).data == b"done"
        assert refused.empty()


async def test_nodes_receive_loader_status_of_others_only_if_copying_is_enabled(
    guarded: Guarded, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert "loaderStatus" in await _refused(guarded, "node-node-1", "node-0", True)
    with contextlib.closing(Guarded(tmp_path_factory.mktemp("nats"), peers=True)) as sharing:
        refused = await _refused(sharing, "node-node-1", "node-0", True)
        assert refused == await _refused(guarded, "node-node-1", "node-0", True) - {"loaderStatus"}
        assert "loaderStatus" in await _refused(sharing, "node-node-1", "node-0", False)


async def test_nodes_are_added_and_removed_while_nats_runs(tmp_path_factory: pytest.TempPathFactory) -> None:
    with contextlib.closing(Guarded(tmp_path_factory.mktemp("nats"))) as server:
        kept = server.urls["gateway"]
        server.add_nodes("node-0", "far-1")
        assert server.urls["gateway"] == kept
        async with server.client("gateway") as (gateway, _):
            server.reload()
            await _until_enters(server, "node-far-1", True)
            assert gateway.is_connected
            assert gateway.stats["reconnects"] == 0
            url = server.urls["node-far-1"]
            server.add_nodes("node-0")
            server.urls["node-far-1"] = url
            server.reload()
            await _until_enters(server, "node-far-1", False)


async def _until_enters(server: Guarded, user: str, wanted: bool) -> None:
    deadline = time.monotonic() + 60
    while await _enters(server.urls[user]) is not wanted:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def _enters(url: str) -> bool | None:
    """Return whether the server lets a user in; None if it closed the connection, as it may while
    it reloads.
    """
    at = urlsplit(url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    try:
        options = json.dumps({"verbose": False, "user": at.username, "pass": at.password})
        writer.write(f"CONNECT {options}\r\nPING\r\n".encode())
        await asyncio.wait_for(reader.readline(), 60)  # INFO
        answer = await asyncio.wait_for(reader.readline(), 60)
    except ConnectionError:
        return None
    finally:
        writer.close()
    if not answer:
        return None
    assert answer.startswith((b"PONG", b"-ERR 'Authorization Violation'")), answer
    return answer.startswith(b"PONG")


class Site:
    """A mesh whose services have credentials of their own, with one log directory."""

    def __init__(self, guarded: Guarded, home: Path, database_url: str, pace: Pace) -> None:
        self.home, self._urls = home, guarded.urls
        self.port = free_port()
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}", headers={"authorization": "Bearer root"}, timeout=180, trust_env=False
        )
        self._processes: list[subprocess.Popen[bytes]] = []
        self._start("scheduler", "scheduler", THAW_DATABASE_URL=database_url)
        self._start("migrator", "migrator", **pace.environment)
        self._start("gateway", "gateway", THAW_GATEWAY_PORT=str(self.port), THAW_ADMIN_KEY="root")
        for node in NODES:
            on = {
                "THAW_NODE": node,
                "THAW_DEVICES": "cpu:0=1GiB",
                "THAW_ENGINE_THREADS": "1",
                "THAW_SUSPEND": "off",
                **pace.environment,
            }
            self._start("loader", node_user(node), THAW_PEERS="false", **on)
            self._start("nodeagent", node_user(node), **on)

    def _start(self, service: str, user: str, **environment: str) -> None:
        own = {k: v for k, v in os.environ.items() if not k.startswith("THAW_")}
        own |= {"THAW_HOME": str(self.home), "THAW_NATS_URL": self._urls[user], "PYTHONPATH": str(ROOT), **environment}
        with (self.home / f"{service}.{environment.get('THAW_NODE', '')}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen([sys.executable, "-m", f"services.{service}"], env=own, stdout=log, stderr=log, cwd=self.home)
            )

    def ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            answer = self.http.get("/admin/v1/cluster")
            return answer.is_success and len([n for n in answer.json()["nodes"] if n["devices"] and n["loader_alive"]]) == 2
        return False

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        answer = self.http.request(method, path, json=body, headers=headers)
        assert answer.is_success, answer.text
        return answer.json() if answer.content else None

    def close(self) -> str:
        """Return the logs of all processes, including engines."""
        self.http.close()
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            process.wait(120)
        return "\n".join(log.read_text(errors="replace") for log in sorted(self.home.rglob("*.log")))


@pytest.fixture
def pace(tmp_path: Path) -> Pace:
    """Return the pace of the site's engines."""
    return Pace(tmp_path)


@pytest.fixture
def site(guarded: Guarded, tmp_path_factory: pytest.TempPathFactory, database_url: str, pace: Pace) -> Iterator[Site]:
    site = Site(guarded, tmp_path_factory.mktemp("home"), database_url, pace)
    try:
        until(site.ready, within=300, what="both nodes are there")
        yield site
    finally:
        assert "permissions violation" not in site.close().lower()


@pytest.mark.timeout(1200)
def test_no_operation_of_a_mesh_is_refused(site: Site, pace: Pace) -> None:
    make_demo_model(site.home / "m", "test")
    spec = {"name": "m", "source": str(site.home / "m"), "keep_alive": -1}
    asked = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
    assert site.ask("POST", "/admin/v1/models", {"specs": [spec]})["added"] == ["m"]
    until(lambda: site.http.get("/v1/models/m").is_success, what="the gateway knows the model")
    site.ask("POST", "/v1/chat/completions", asked)
    for _ in range(2):
        site.ask("POST", "/v1/chat/completions", asked, **{"Idempotency-Key": "k"})
    _move_a_stream(site, asked, pace)
    until(lambda: site.http.get("/admin/v1/traces/last").is_success, what="a trace is written")
    site.ask("POST", "/admin/v1/models/m/wake")
    site.ask("GET", "/admin/v1/explain?model=m")
    assert site.ask("GET", "/admin/v1/nodes/node-0/logs")["node"] == "node-0"
    site.ask("POST", "/admin/v1/models/m/sleep")
    site.ask("POST", "/admin/v1/nodes/node-0/drain")
    site.ask("POST", "/v1/chat/completions", asked)
    _run_a_batch(site, asked)
    site.ask("POST", "/admin/v1/keys", {"name": "someone", "sha256": "0" * 64})
    site.ask("DELETE", "/admin/v1/keys/someone")
    site.ask("DELETE", "/admin/v1/models/m")


def _run_a_batch(site: Site, asked: dict[str, Any]) -> None:
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": asked}
    uploaded = site.http.post("/v1/files", data={"purpose": "batch"}, files={"file": json.dumps(line).encode()})
    assert uploaded.is_success, uploaded.text
    file_id = uploaded.json()["id"]
    batch = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch_id = site.ask("POST", "/v1/batches", batch)["id"]
    until(lambda: site.ask("GET", f"/v1/batches/{batch_id}")["status"] == "completed", what="the batch has ended")
    site.ask("DELETE", f"/v1/files/{file_id}")


def _move_a_stream(site: Site, asked: dict[str, Any], pace: Pace) -> None:
    """Migrate a stream to the other node while a client reads it."""
    ((here, instance),) = [
        (n["node"], i["instance_id"]) for n in site.ask("GET", "/admin/v1/cluster")["nodes"] for i in n["instances"]
    ]
    (elsewhere,) = set(NODES) - {here}
    with contextlib.ExitStack() as slow:
        slow.enter_context(pace.slowed())
        with site.http.stream("POST", "/v1/chat/completions", json=asked | {"stream": True, "max_tokens": 900}) as answer:
            lines = answer.iter_lines()
            next(lines)
            order = {"instance_id": instance, "node": elsewhere, "wait": True}
            moved = site.ask("POST", "/admin/v1/migrations", order)["migrations"]
            slow.close()
            assert [line for line in lines if line][-1] == "data: [DONE]"
    assert [m["state"] for m in moved] == ["done"]
