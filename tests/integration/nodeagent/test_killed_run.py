"""A killed test run, or program with its own mesh, leaves no engine process."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.integration.nodeagent.harness import gone

RUN = """
import asyncio, json, sys
from pathlib import Path
from shared.contracts.node import InstanceState
from tests.integration.nodeagent.harness import running_node, start_command
from tests.support.hosted import fake_card
from tests.support.reaping import tie_to_this_process
from tests.support.servers import NatsServer

async def run():
    tie_to_this_process()
    server = NatsServer()
    async with running_node(server.url, Path(sys.argv[1]), THAW_DEVICES="cpu:0=2GiB") as node:
        await start_command(node, "i1", fake_card("--fork", "--ignore-term"))
        pids = (await node.reaches("i1", InstanceState.READY)).pids
        print(json.dumps([server.process.pid, node.process.pid, *pids]), flush=True)
        await asyncio.Event().wait()

asyncio.run(run())
"""


async def test_killed_run_leaves_no_process(tmp_path: Path) -> None:
    """A killed run leaves no process.

    It had a server, an agent, the engine's host, the engine, and its fork in another session.
    """
    run = subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path)], stdout=subprocess.PIPE, env=os.environ)  # noqa: ASYNC220
    assert run.stdout is not None
    try:
        pids = json.loads(await asyncio.to_thread(run.stdout.readline))
        assert len(pids) == 5
    finally:
        run.kill()
        run.wait()
        run.stdout.close()
    for pid in pids:
        assert await gone(pid), pid
