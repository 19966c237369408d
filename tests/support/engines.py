"""Real engine processes under test.

A zygote, the engines it forks, and the messages they stream back.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from nats.aio.msg import Msg

from shared.contracts import subjects
from shared.contracts.engine import ZYGOTE_LINE, EngineExited, EngineForked, EngineReport, EngineStart, ZygoteFailure, ZygoteReady
from shared.contracts.inference import (
    INFER_REPLY,
    EmbeddingsPart,
    Endpoint,
    FairShare,
    InferChunk,
    InferReply,
    InferRequest,
    InferStarted,
    Resume,
)
from shared.contracts.models import ModelCard
from shared.messaging import Mesh
from tests.support.paced_zygote import Pace

_numbers = itertools.count(1)
WITHIN_S = 120.0
"""Seconds that a test waits for a message; a request without a deadline of its own has as long."""


class ZygoteProcess:
    """A zygote of its own; ready when the constructor returns."""

    def __init__(self, directory: Path, module: str = "services.engine.zygote") -> None:
        self.socket = directory / "z.sock"
        self.process = subprocess.Popen([sys.executable, "-m", module, str(self.socket)], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.first_line = self.process.stdout.readline()

    async def connect(self) -> ZygoteClient:
        reader, writer = await asyncio.open_unix_connection(str(self.socket))
        return ZygoteClient(reader, writer)

    def close(self) -> None:
        """End the zygote and the engines that a test left: they would outlive it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for engine in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    engine.kill()
        self.process.terminate()
        self.process.wait(60)
        if self.process.stdout is not None:
            self.process.stdout.close()


class ZygoteClient:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, line: bytes) -> None:
        self._writer.write(line + b"\n")

    async def hear(self) -> EngineForked | EngineExited | ZygoteFailure:
        async with asyncio.timeout(WITHIN_S):
            while isinstance(line := ZYGOTE_LINE.validate_json(await self._reader.readline()), ZygoteReady):
                pass
            return line

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


class Stream:
    """The messages received for one request, in order."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.replies: list[InferReply] = []
        self.grew = asyncio.Condition()

    async def until(self, done: Callable[[list[InferReply]], bool]) -> list[InferReply]:
        async with asyncio.timeout(WITHIN_S), self.grew:
            await self.grew.wait_for(lambda: done(self.replies))
        return self.replies

    async def last(self) -> Any:
        """The last message, once it has arrived."""
        return (await self.until(lambda r: bool(r) and not isinstance(r[-1], InferStarted | InferChunk | EmbeddingsPart)))[-1]

    def text(self, index: int = 0) -> str:
        return "".join(d.text for r in self.replies if isinstance(r, InferChunk) for d in r.choices if d.index == index)

    def tokens(self, index: int = 0) -> list[int]:
        return [t for r in self.replies if isinstance(r, InferChunk) for d in r.choices if d.index == index for t in d.token_ids]

    def finish(self, index: int = 0) -> str | None:
        reasons = [d.finish_reason for r in self.replies if isinstance(r, InferChunk) for d in r.choices if d.index == index]
        return next((r for r in reasons if r is not None), None)


class Engines:
    """The nodeagent's and the gateway's side of one node's engines."""

    def __init__(self, mesh: Mesh, node: str, nats_url: str, directory: Path) -> None:
        self.mesh = mesh
        self.node = node
        self.nats_url = nats_url
        self.directory = directory
        self.reports: dict[str, list[EngineReport]] = {}
        self._reported = asyncio.Condition()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.patience_s = WITHIN_S

    async def start(self) -> None:
        await self.mesh.listen(subjects.engine_report(self.node), EngineReport, self._hear).start()
        await self.mesh.flush()

    async def _hear(self, report: EngineReport) -> None:
        async with self._reported:
            self.reports.setdefault(report.instance_id, []).append(report)
            self._reported.notify_all()

    def spec(self, card: ModelCard, *, kv_bytes: int = 64 << 20, **environment: str) -> EngineStart:
        instance = f"i{os.getpid()}-{next(_numbers)}"
        return EngineStart(
            instance_id=instance,
            node=self.node,
            card=card,
            device="cpu:0",
            kv_bytes=kv_bytes,
            log_path=str(self.directory / f"{instance}.log"),
            environment={"THAW_NATS_URL": self.nats_url, "THAW_ENGINE_THREADS": "1", **environment},
        )

    def paced(self, card: ModelCard, pace: Pace) -> EngineStart:
        """Return a start of an engine with this pace; its zygote is `paced_zygote`."""
        start = self.spec(card)
        return start.model_copy(update={"environment": start.environment | pace.environment})

    def spawn(self, start: EngineStart, module: str = "services.engine") -> subprocess.Popen[bytes]:
        """`python -m MODULE SPEC`, without a zygote."""
        file = self.directory / f"{start.instance_id}.json"
        file.write_text(start.model_dump_json())
        with Path(start.log_path).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(file)],
                stdout=log,
                stderr=log,
                env={**os.environ, **start.environment},
            )
        self.processes.append(process)
        return process

    async def reported(self, instance_id: str, wanted: Callable[[EngineReport], bool]) -> EngineReport:
        def find() -> EngineReport | None:
            return next((r for r in self.reports.get(instance_id, ()) if wanted(r)), None)

        try:
            async with asyncio.timeout(self.patience_s), self._reported:
                await self._reported.wait_for(find)
        except TimeoutError as e:
            log = self.directory / f"{instance_id}.log"
            raise AssertionError(log.read_text() if log.exists() else "the engine wrote no log") from e
        found = find()
        assert found is not None
        return found

    def is_ready(self, instance_id: str) -> bool:
        """True if it has reported so."""
        return any(r.state == "ready" for r in self.reports.get(instance_id, ()))

    async def settled(self, instance_id: str) -> EngineReport:
        return await self.reported(instance_id, lambda r: r.state in ("ready", "failed"))

    async def ask(
        self,
        instance_id: str,
        endpoint: Endpoint,
        *,
        deadline_ms: int = round(WITHIN_S * 1e3),
        route: str = "",
        method: str = "POST",
        query: str = "",
        adapter: ModelCard | None = None,
        resume: Resume | None = None,
        share: FairShare | None = None,
        **body: Any,
    ) -> Stream:
        stream = Stream(f"r{next(_numbers)}")
        subject = f"t.replies.{os.getpid()}.{stream.request_id}"

        async def hear(message: Msg) -> None:
            async with stream.grew:
                stream.replies.append(INFER_REPLY.validate_json(message.data))
                stream.grew.notify_all()

        await self.mesh.nc.subscribe(subject, cb=hear)
        request = InferRequest(
            request_id=stream.request_id,
            instance_id=instance_id,
            model="demo",
            endpoint=endpoint,
            deadline_ms=deadline_ms,
            route=route,
            method=method,
            query=query,
            adapter=adapter,
            resume=resume,
            share=share or FairShare(),
            body={"model": "demo", **body},
        )
        await self.mesh.nc.publish(subjects.infer(instance_id), request.model_dump_json().encode(), reply=subject)
        return stream

    async def answer(self, instance_id: str, endpoint: Endpoint, **body: Any) -> Stream:
        stream = await self.ask(instance_id, endpoint, **body)
        await stream.last()
        return stream

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
