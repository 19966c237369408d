"""A leader's host vanishes: its lock is free within three seconds, and it notices."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import pytest

from services.scheduler.adapters.database import connect, migrate, plain_url
from tests.support.servers import PostgresServer

log = logging.getLogger(__name__)
WITHIN_S = 3.0
SLACK = 8
"""Factor of the asserted bound, for a busy machine."""
_NUMBERS = itertools.count(1)
"""Of the tests: the names of one are free again some time after its end."""
_LINE_WITHIN_S = 120.0
"""A holder has to import its modules first."""

HOLDER = """
import asyncio, os, sys
from services.scheduler.adapters.database import connect
from services.scheduler.adapters.leadership import leadership
from services.scheduler.adapters.repository import require_epoch

async def main():
    print("waiting", flush=True)
    async with leadership(sys.argv[1]) as term:
        connection = await connect(sys.argv[1]).connect()
        if sys.argv[2] == "commits":
            await require_epoch(connection, term.epoch)
        print("leading", term.epoch, flush=True)
        await term.lost.wait()
        print("lost", flush=True)
        os._exit(0)

asyncio.run(main())
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@dataclass
class Hosts:
    """Hosts in network namespaces.

    Attributes:
        names: The namespaces.
        ports: Their ends on the bridge.
        gateway: The address Postgres listens on.
    """

    names: tuple[str, str]
    ports: tuple[str, str]
    gateway: str

    def unplug(self, which: int) -> None:
        ip("link", "set", self.ports[which], "down")


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if os.geteuid() != 0:
        pytest.skip("needs root: makes network namespaces")
    if shutil.which("ip") is None:
        pytest.skip("needs iproute2's `ip`")
    number = next(_NUMBERS)
    tag = f"{os.getpid() % 10000:04d}{number}"
    subnet = f"10.{200 + os.getpid() % 50}.{(os.getpid() + number) % 250}"
    bridge, names, ports = f"tb{tag}", (f"thaw-a{tag}", f"thaw-b{tag}"), (f"tp{tag}a", f"tp{tag}b")
    try:
        try:
            ip("link", "add", bridge, "type", "bridge")
            ip("addr", "add", f"{subnet}.1/24", "dev", bridge)
            ip("link", "set", bridge, "up")
            for number, (name, port) in enumerate(zip(names, ports, strict=True), start=2):
                ip("netns", "add", name)
                ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
                ip("link", "set", port, "master", bridge, "up")
                ip("-n", name, "addr", "add", f"{subnet}.{number}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "eth0", "up")
        except subprocess.CalledProcessError as e:
            pytest.skip(f"no network namespaces here: {e.stderr.decode().strip()}")
        yield Hosts(names, ports, f"{subnet}.1")
    finally:
        for command in (*(("netns", "del", n) for n in names), ("link", "del", bridge)):
            with contextlib.suppress(subprocess.CalledProcessError):
                ip(*command)


async def holder(host: str, url: str, state: str) -> asyncio.subprocess.Process:
    root = Path(__file__).parents[3]
    return await asyncio.create_subprocess_exec(
        "ip", "netns", "exec", host, sys.executable, "-c", HOLDER, url, state, cwd=root, stdout=asyncio.subprocess.PIPE
    )


async def says(process: asyncio.subprocess.Process, word: str) -> str:
    assert process.stdout is not None
    line = (await asyncio.wait_for(process.stdout.readline(), _LINE_WITHIN_S)).decode()
    assert line.startswith(word), line
    return line


async def idle(url: str) -> None:
    """Wait until the leader's connection is idle: only keepalives detect a lost host."""
    states = (
        "SELECT array_agg(state) FROM pg_stat_activity JOIN pg_locks USING (pid) WHERE granted AND locktype = 'advisory' "
        "AND application_name = 'thaw-scheduler-leadership'"
    )
    connection = await asyncpg.connect(plain_url(url))
    try:
        for _ in range(1000):
            if await connection.fetchval(states) == ["idle"]:
                return
            await asyncio.sleep(0.01)
        raise TimeoutError("the leader's connection is never idle")
    finally:
        await connection.close()


@pytest.mark.root
@pytest.mark.parametrize("state", ["idle", "commits"])
async def test_the_lock_of_a_vanished_host_falls(hosts: Hosts, state: str) -> None:
    """A leader that commits decisions also keeps others from leading under a new epoch."""
    server = await asyncio.to_thread(lambda: PostgresServer(listen="*"))
    processes = []
    try:
        engine = connect(server.url)
        await migrate(engine)
        await engine.dispose()
        url = server.url.replace("127.0.0.1", hosts.gateway).replace("+asyncpg", "")
        for name in hosts.names:
            processes.append(await holder(name, url, state))  # in order: the first one leads
            await says(processes[-1], "waiting")
            if len(processes) == 1:
                await says(processes[0], "leading 1")
        await idle(server.url)
        began = time.monotonic()
        hosts.unplug(0)

        async def taken_over() -> float:
            await says(processes[1], "leading 2")
            return time.monotonic() - began

        async def known() -> float:
            await says(processes[0], "lost")
            return time.monotonic() - began

        taken, knew = await asyncio.gather(taken_over(), known())
        log.info("taken over %.2f s after the host vanished; its leader knew after %.2f s", taken, knew)
        assert max(taken, knew) < WITHIN_S * SLACK
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        await asyncio.to_thread(server.close)
