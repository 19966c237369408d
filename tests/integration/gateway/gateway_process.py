"""The gateway as a process."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import Process
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[3]


async def spawn(**environment: str) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.gateway",
        env={k: v for k, v in os.environ.items() if not k.startswith("THAW_")} | environment,
        cwd=ROOT,
        stderr=asyncio.subprocess.PIPE,
    )


async def answers(base: str, path: str) -> bool:
    try:
        async with httpx.AsyncClient(base_url=base, timeout=60) as client:
            return (await client.get(path)).status_code == 200
    except httpx.TransportError:
        return False
