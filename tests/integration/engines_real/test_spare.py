"""Real vLLM in a spare interpreter with its imports done."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from services.enginehost.runtimes import reaper
from services.nodeagent.engines.direct import DirectLauncher
from services.nodeagent.engines.spares import Spares
from shared.messaging import Mesh
from tests.integration.engines_real.conftest import FAMILY, PATIENCE_S, environment
from tests.support.hosted import MIB, Hosts, hosted_card
from tests.support.servers import NatsServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * PATIENCE_S)]


@pytest.mark.runs("vllm", FAMILY)
async def test_spare_interpreter_becomes_vllm(mesh: Mesh, nats_server: NatsServer, model_directory: Path, tmp_path: Path) -> None:
    settings = {"THAW_NATS_URL": nats_server.url, **environment("vllm")}
    hosts = Hosts(mesh, "real-spare", nats_server.url, tmp_path)
    hosts.patience_s = PATIENCE_S
    await hosts.start()
    spares = Spares(("vllm",), "services.enginehost", tmp_path / "spares.log", settings, rest_s=PATIENCE_S)
    launcher = DirectLauncher("services.enginehost", tmp_path / "specs", "host", spares)
    keeping = asyncio.create_task(launcher.run())
    try:

        async def waiting() -> list[int]:
            return [p.pid for p in psutil.Process().children(recursive=True) if _is_interpreter(p)]

        (interpreter,) = await hosts.eventually(waiting, bool, PATIENCE_S)
        start = hosts.spec(hosted_card(model_directory, "vllm", context=1024), kv_bytes=64 * MIB, **settings)
        pid = await launcher.launch(start)  # received while it imports
        report = await hosts.settled(start.instance_id)
        assert report.state == "ready", report.error
        assert interpreter in {p.pid for p in psutil.Process(pid).children()}
        answer = await hosts.request(start.instance_id, "chat", messages=[{"role": "user", "content": "Hello"}], max_tokens=4)
        assert answer.status == 200
        assert answer.json["usage"]["completion_tokens"] == 4
        os.kill(pid, signal.SIGTERM)
        await hosts.reported(start.instance_id, lambda r: r.state == "stopped")
        assert await launcher.exit_status(pid, PATIENCE_S) == 0

        async def session() -> list[int]:
            return reaper.in_session(interpreter, 0)

        await hosts.eventually(session, lambda left: not left)
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await launcher.close()
        hosts.close()


def _is_interpreter(process: psutil.Process) -> bool:
    """True if a process is a spare interpreter; it may have ended since it was listed."""
    try:
        return any(argument.endswith("preload.py") for argument in process.cmdline())
    except psutil.NoSuchProcess:
        return False
