"""A node's launcher with spare hosts of a stand-in for vLLM."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from services.nodeagent.engines.direct import DirectLauncher
from services.nodeagent.engines.spares import Spares
from shared.contracts.engine import EngineStart
from shared.contracts.models import ModelCard
from tests.support.hosted import MIB, Hosts, hosted_card

WITHIN_S = 60.0
_VLLM = """
import gc, os, sys, time
with open({imports!r}, "a") as file:
    file.write(f"{{__name__}} {{os.getpid()}}\\n")
with open({imports!r} + "-collected", "a") as file:
    file.write(f"{{os.getpid()}} {{__name__}} {{gc.isenabled()}}\\n")
if __name__ == "__main__":
    from tests.support.fake_openai import main
    print("environment", int(bool(os.environ["VLLM_API_KEY"])), os.environ.get("OMP_NUM_THREADS"), flush=True)
    sys.argv[1:1] = ["--like", "vllm"]
    main()
"""


class Node:
    """A node's launcher of hosts, with an importable stand-in for vLLM."""

    def __init__(self, hosts: Hosts, directory: Path) -> None:
        self.hosts, self.directory = hosts, directory
        package = directory / "site" / "vllm" / "entrypoints" / "openai"
        package.mkdir(parents=True)
        self.imports = directory / "imports"
        (package / "api_server.py").write_text(_VLLM.format(imports=str(self.imports)))
        for name in (package, package.parent, package.parent.parent):
            (name / "__init__.py").touch()
        self.environment = {
            "THAW_NATS_URL": hosts.nats_url,
            "THAW_NODE": hosts.node,
            "THAW_VLLM_PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join((str(directory / "site"), str(Path.cwd()))),
        }
        self.spares = Spares(("vllm",), "services.enginehost", directory / "spares.log", self.environment, rest_s=0.2)
        self.launcher = DirectLauncher("services.enginehost", directory / "specs", "host", self.spares)
        self.keeping = asyncio.create_task(self.launcher.run())

    def start(self, **more: Any) -> EngineStart:
        card: ModelCard = hosted_card(self.directory, "vllm", memory=MIB, **more)
        start = self.hosts.spec(card, kv_bytes=64 * MIB, **self.environment)
        return start.model_copy(update={"environment": self.environment | start.environment})

    def imported(self) -> list[tuple[str, int]]:
        lines = self.imports.read_text().splitlines() if self.imports.exists() else []
        return [(name, int(pid)) for name, pid in map(str.split, lines)]

    async def waits(self, count: int = 1) -> int:
        """Wait until so many interpreters in all have done their imports.

        Returns:
            The pid of the last one.
        """

        async def found() -> list[int]:
            return [pid for name, pid in self.imported() if name != "__main__"]

        return (await self.hosts.eventually(found, lambda pids: len(pids) >= count, WITHIN_S))[-1]

    async def ready(self, start: EngineStart) -> int:
        pid = await self.launcher.launch(start)
        report = await self.hosts.settled(start.instance_id)
        assert report.state == "ready", report.error
        return pid

    async def close(self) -> None:
        self.keeping.cancel()
        await asyncio.gather(self.keeping, return_exceptions=True)
        await self.launcher.close()
