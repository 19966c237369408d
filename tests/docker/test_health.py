"""Services report their health, and the check of a container reads the report.

No engine is needed.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from shared.contracts import subjects
from shared.contracts.admin import ClusterView, ViewCluster
from shared.contracts.loader import LoaderStatus
from shared.health import VARIABLE, Check, check_leader, check_migrations, check_status, find_fault, report_health
from shared.messaging import Mesh
from shared.messaging.streams import migrations_bucket
from shared.settings import CommonSettings
from tests.docker.engine import ROOT
from tests.support.mesh_client import connected_mesh
from tests.support.servers import NatsServer

WITHIN_S = 60.0


def check_container(file: Path) -> tuple[int, str]:
    """Run the check of a container; return its exit status and output."""
    environment = {**os.environ, VARIABLE: str(file)}
    done = subprocess.run([str(ROOT / "compose" / "thaw-healthy")], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    return done.returncode, done.stdout


@pytest.fixture
async def mesh(own_nats: NatsServer) -> AsyncIterator[Mesh]:
    async with connected_mesh(own_nats) as mesh:
        yield mesh


async def test_scheduler_is_healthy_while_the_mesh_has_a_leader(mesh: Mesh) -> None:
    async def view(_: ViewCluster) -> ClusterView:
        return ClusterView(scheduler="s", epoch=1)

    leader = mesh.respond(subjects.ADMIN, TypeAdapter(ViewCluster), view)
    await leader.start()
    await mesh.flush()
    assert await find_fault(lambda: check_leader(mesh)) == ""
    await leader.stop()
    await mesh.flush()
    assert "No process answers" in await find_fault(lambda: check_leader(mesh))


async def test_loader_is_healthy_while_its_status_is_received(mesh: Mesh) -> None:
    async def broadcast() -> None:
        while True:
            for _ in range(20):  # more than the check reads
                await mesh.publish(subjects.loader_status("n"), LoaderStatus(node="n", boot_id="b"))
            await asyncio.sleep(0.1)

    publishing = asyncio.create_task(broadcast())
    assert await find_fault(lambda: check_status(mesh, subjects.loader_status("n"))) == ""
    assert "Nothing was received" in await find_fault(lambda: check_status(mesh, subjects.loader_status("other")))
    publishing.cancel()


async def test_checks_leave_no_subscription(mesh: Mesh) -> None:
    """Each would get the whole status, every second."""

    async def broadcast() -> None:
        while True:
            await mesh.publish(subjects.loader_status("n"), LoaderStatus(node="n", boot_id="b"))
            await asyncio.sleep(0.01)

    publishing = asyncio.create_task(broadcast())
    for _ in range(3):
        assert await find_fault(lambda: check_status(mesh, subjects.loader_status("n"))) == ""
    publishing.cancel()
    await mesh.flush()
    received = mesh.nc.stats["in_msgs"]
    await mesh.publish(subjects.loader_status("n"), LoaderStatus(node="n", boot_id="b"))
    await mesh.flush()
    assert mesh.nc.stats["in_msgs"] == received


async def test_a_migrator_is_healthy_while_the_bucket_of_migrations_can_be_read(mesh: Mesh) -> None:
    assert await find_fault(lambda: check_migrations(mesh)) == "The bucket of migrations does not exist yet"
    await migrations_bucket(mesh.nc.jetstream())
    assert await find_fault(lambda: check_migrations(mesh)) == ""


async def test_no_service_is_healthy_without_nats(mesh: Mesh, own_nats: NatsServer) -> None:
    await migrations_bucket(mesh.nc.jetstream())
    checks: list[Check] = [
        lambda: check_leader(mesh),
        lambda: check_status(mesh, subjects.loader_status("n")),
        lambda: check_migrations(mesh),
    ]
    own_nats.kill()
    async with asyncio.timeout(WITHIN_S):
        while mesh.is_connected:  # noqa: ASYNC110 - the condition is in NATS's client
            await asyncio.sleep(0.01)
    assert {await find_fault(check) for check in checks} == {"There is no connection to NATS"}


async def test_mesh_that_has_not_started_is_not_connected() -> None:
    mesh = Mesh(CommonSettings(), "test")
    assert await find_fault(lambda: check_migrations(mesh)) == "There is no connection to NATS"


async def test_fault_is_reported_until_it_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, checks, enough = tmp_path / "health", 0, asyncio.Event()
    monkeypatch.setenv(VARIABLE, str(file))
    monkeypatch.setattr("shared.health._WITHIN_S", WITHIN_S)  # of a busy machine's shell
    seen: list[tuple[int, str]] = []

    async def check() -> str:
        nonlocal checks
        checks += 1
        if checks > 1:  # the report of the last check is written
            seen.append(await asyncio.to_thread(check_container, file))
        if len(seen) == 3:
            enough.set()
        match checks:
            case 1:
                return "not connected"
            case 2:
                raise ValueError("a defect")
            case _:
                return ""

    assert check_container(file)[0] == 1
    reporting = asyncio.create_task(report_health(check, 0.0))
    await asyncio.wait_for(enough.wait(), WITHIN_S)
    reporting.cancel()
    assert seen[:3] == [(1, "not connected\n"), (1, "ValueError: a defect\n"), (0, "")]


def test_service_that_has_not_reported_for_long_is_unhealthy(tmp_path: Path) -> None:
    file = tmp_path / "health"
    status, output = check_container(file)
    assert status == 1
    assert "has not reported its health yet" in output
    file.write_text("")
    assert check_container(file) == (0, "")
    os.utime(file, (time.time() - 60,) * 2)
    status, output = check_container(file)
    assert status == 1
    assert "for 30 s" in output


async def test_nothing_is_reported_outside_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> str:
        raise AssertionError("outside containers no check runs")

    monkeypatch.delenv(VARIABLE, raising=False)
    await report_health(check)
