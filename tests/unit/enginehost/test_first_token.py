"""The end of an engine while it generates its first token."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.enginehost.engine import Engine
from services.enginehost.http1 import HttpError, HttpRequest
from services.enginehost.runtimes.port import EngineExit
from shared.errors import EngineFailed, EngineKilled
from shared.telemetry.timeline import Timeline

LAST_WORDS = "the last words of the engine"


class Ending:
    """An engine whose connections break a moment before its exit is visible."""

    def __init__(self, returncode: int | None) -> None:
        self._returncode = returncode
        self._has_ended = asyncio.Event()

    async def ask(self, _: HttpRequest) -> tuple[int, bytes]:
        if self._returncode is not None:
            asyncio.get_running_loop().call_soon(self._has_ended.set)
        raise HttpError("the connection was closed early")

    async def wait(self) -> EngineExit:
        await self._has_ended.wait()
        return EngineExit(self._returncode)


def an_engine(directory: Path, ending: Ending) -> Engine:
    log = directory / "i.engine.log"
    log.write_text(f"{LAST_WORDS}\n")
    start, reporter = SimpleNamespace(log_path=str(log), instance_id="i"), SimpleNamespace()
    engine = Engine(cast(Any, None), cast(Any, start), Timeline("enginehost"), cast(Any, reporter))
    probes = [HttpRequest("POST", "/v1/completions")]
    engine.driver = cast(Any, SimpleNamespace(probes=lambda _: probes, install_hint=lambda _: ""))
    engine.client, engine._running = cast(Any, ending), cast(Any, ending)
    return engine


@pytest.mark.parametrize(
    ("returncode", "kind", "text"),
    [(-signal.SIGKILL, EngineKilled, "killed by signal 9"), (3, EngineFailed, "exit status 3"), (None, EngineFailed, "no token")],
)
async def test_cause_of_a_missing_token_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returncode: int | None, kind: type[EngineFailed], text: str
) -> None:
    """The scheduler starts a model again whose engine was killed from outside."""
    monkeypatch.setattr("services.enginehost.engine._EXIT_VISIBLE_WITHIN_S", 0.05 if returncode is None else 60)
    with pytest.raises(EngineFailed, match=text) as failed:
        await an_engine(tmp_path, Ending(returncode))._first_token()
    assert type(failed.value) is kind
    assert failed.value.message.count(LAST_WORDS) == 1
