"""Executors on a node whose disk refuses their files, and executors that do not answer."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.nodeagent.engines import executors as module
from services.nodeagent.engines.executors import KEPT_LOGS, Executors
from services.nodeagent.engines.launcher import Launcher
from shared.contracts.engine import EngineStart
from shared.contracts.executor import CURRENT_BYTES, STEP_BEGAN, AttachInstance, ExecutorStart, InstanceAttached, InstanceDetached
from shared.errors import EngineFailed, ThawError, Unreachable
from shared.messaging.mesh import HALF_OPEN_WITHIN_S
from tests.support.fake_engine import card_of

DETACH_S = 5.0
"""Time in which a detach has to be answered."""


class OwnProcess:
    """Starts nothing: the executor is this process."""

    async def launch(self, _: ExecutorStart) -> int:
        return os.getpid()


async def attached(*_: Any) -> InstanceAttached:
    return InstanceAttached(pid=os.getpid())


def executors(tmp_path: Path, request: Callable[..., Awaitable[Any]] = attached, kill_grace_s: float = 5.0) -> Executors:
    return Executors(cast(Launcher, OwnProcess()), request, tmp_path / "executors", tmp_path, "n", {}, kill_grace_s)


def start(tmp_path: Path, logs: str = "") -> EngineStart:
    return EngineStart(
        instance_id="i",
        node="n",
        card=card_of("m"),
        device="cpu:0",
        kv_bytes=0,
        log_path=str(tmp_path / logs / "i.engine.log"),
    )


async def test_executor_whose_record_cannot_be_written_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, _: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    found = executors(tmp_path)
    monkeypatch.setattr(module, "write_record", fail)
    assert await found.attach(start(tmp_path)) == os.getpid()
    assert found.is_running("cpu:0")


async def test_log_that_cannot_be_linked_refuses_the_start(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="cannot be linked"):
        await executors(tmp_path).attach(start(tmp_path, "missing"))


async def test_executor_that_reconnects_to_nats_is_asked_to_detach_again(tmp_path: Path) -> None:
    answers: list[Any] = [Unreachable("it reconnects"), Unreachable("it reconnects"), InstanceDetached(freed_bytes=5)]

    async def request(_subject: str, command: Any, _reply: Any) -> Any:
        if isinstance(command, AttachInstance):
            return InstanceAttached(pid=os.getpid())
        answer = answers.pop(0)
        if isinstance(answer, ThawError):
            raise answer
        return answer

    found = executors(tmp_path, request)
    await found.attach(start(tmp_path))
    assert (await found.detach("i", os.getpid(), 60)).freed_bytes == 5
    answers.append(Unreachable("it has no subscription"))
    with pytest.raises(Unreachable):
        await found.detach("i", os.getpid(), -1)


async def test_rotated_logs_of_removed_executors_are_removed(tmp_path: Path) -> None:
    for number in range(20):
        log = tmp_path / f"x-{number}.n.executor.log"
        log.touch()
        log.with_name(f"{log.name}.1").touch()
    await executors(tmp_path).attach(start(tmp_path))
    assert len(list(tmp_path.glob("*.executor.log"))) == len(list(tmp_path.glob("*.executor.log.1"))) == KEPT_LOGS


async def test_the_next_agent_finds_an_executor(tmp_path: Path) -> None:
    await executors(tmp_path).attach(start(tmp_path))
    assert executors(tmp_path).list_devices() == ["cpu:0"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time of the module, which the test changes."""
    now_s = [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s[0], time_ns=time.time_ns))
    return now_s


async def test_silent_executor_has_time_to_notice_a_half_open_connection(tmp_path: Path, clock: list[float]) -> None:
    """It serves other models, and connects again."""
    found, pid = executors(tmp_path), os.getpid()
    await found.attach(start(tmp_path))
    asked_at = clock[0]
    while clock[0] - asked_at < HALF_OPEN_WITHIN_S:
        clock[0] += DETACH_S
        assert not found.note_silent(pid, DETACH_S)
    clock[0] += DETACH_S
    assert found.note_silent(pid, DETACH_S), "it hangs"
    assert not found.is_silent(pid), "no step is to blame"


async def test_silent_executor_is_ended_however_seldom_detaches_are_repeated(tmp_path: Path, clock: list[float]) -> None:
    """They are repeated after `THAW_KILL_GRACE`."""
    grace_s = 30.0
    found, pid = executors(tmp_path, kill_grace_s=grace_s), os.getpid()
    await found.attach(start(tmp_path))
    assert not found.note_silent(pid, DETACH_S)
    clock[0] += grace_s
    assert found.note_silent(pid, DETACH_S)


async def test_answer_ends_the_silence_of_an_executor(tmp_path: Path, clock: list[float]) -> None:
    async def request(_subject: str, command: Any, _reply: Any) -> Any:
        if isinstance(command, AttachInstance):
            return InstanceAttached(pid=os.getpid())
        raise EngineFailed("its memory is still mapped")

    found, pid = executors(tmp_path, request), os.getpid()
    await found.attach(start(tmp_path))
    assert not found.note_silent(pid, HALF_OPEN_WITHIN_S)
    with pytest.raises(EngineFailed):
        await found.detach("i", pid, DETACH_S)
    clock[0] += DETACH_S
    assert not found.note_silent(pid, DETACH_S)
    clock[0] += 3600.0
    assert not found.note_silent(pid, DETACH_S), "the connection is half-open once more"


async def test_step_that_keeps_an_executor_from_answering_is_to_blame(tmp_path: Path, clock: list[float]) -> None:
    found, pid = executors(tmp_path), os.getpid()
    await found.attach(start(tmp_path))
    assert found.note_silent(pid + 1, DETACH_S), "no executor that is known"
    (record,) = (tmp_path / "executors").glob("*.json")
    began_ns = int((clock[0] - DETACH_S) * 1e9)
    record.with_suffix(".current").write_bytes(b"i".ljust(CURRENT_BYTES, b"\0") + STEP_BEGAN.pack(began_ns))
    assert found.note_silent(pid, DETACH_S)
    assert found.is_silent(pid)
