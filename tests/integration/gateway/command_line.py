"""The command line, run against a gateway of the test."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from tests.integration.gateway.conftest import Served


async def thaw(served: Served, *arguments: str) -> tuple[int | None, Any]:
    """Run the command line against a gateway; return its status and its document."""
    status, out = await _run(served, *arguments, "--json")
    return status, json.loads(out)


async def output_of(served: Served, *arguments: str) -> str:
    """Return the output of a command in one line."""
    return " ".join((await _run(served, *arguments))[1].split())


async def _run(served: Served, *arguments: str) -> tuple[int | None, str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("THAW_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "thaw.cli.app",
        *arguments,
        env=environment | {"THAW_URL": served.base, "THAW_ADMIN_KEY": "root"},
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    return process.returncode, out.decode()
