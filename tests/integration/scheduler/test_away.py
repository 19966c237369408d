"""A scheduler whose database is unreachable."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from tests.support.launcher import ROOT
from tests.support.servers import NatsServer

WITHIN_S = 60.0
ATTEMPTS = 8


async def test_scheduler_retries_the_database_and_logs_each_error_once(nats_server: NatsServer, tmp_path: Path) -> None:
    attempts, enough = 0, asyncio.Event()

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal attempts
        attempts += 1
        writer.close()
        if attempts == ATTEMPTS:
            enough.set()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "services.scheduler"),
            env={k: v for k, v in os.environ.items() if not k.startswith("THAW_")}
            | {
                "THAW_HOME": str(tmp_path),
                "THAW_NATS_URL": nats_server.url,
                "THAW_DATABASE_URL": f"postgresql+asyncpg://thaw@127.0.0.1:{port}/none",
            },
            cwd=ROOT,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(WITHIN_S):
            await enough.wait()
            process.send_signal(signal.SIGTERM)
            _, output = await process.communicate()
    assert process.returncode == 0, output.decode()
    reasons = [line["reason"].split("(")[0] for line in map(json.loads, output.splitlines()) if line["message"] == "not leading"]
    assert reasons
    assert len(reasons) == len(set(reasons)), "each kind once"
