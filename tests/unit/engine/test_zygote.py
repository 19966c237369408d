"""The zygote, and forks that fail."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from services.engine.zygote import Zygote, _Peer
from shared.contracts.engine import ZygoteFailure
from shared.contracts.executor import ExecutorStart


def test_a_fork_that_fails_leaves_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fail)
    start = ExecutorStart(executor_id="x", node="n", device="cpu:0", log_path=str(tmp_path / "log"), current_path="c")
    with socket.socket() as listener:
        zygote = Zygote(listener)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            before = set(Path("/dev/fd").iterdir())
            zygote._fork(_Peer(theirs), start.model_dump_json().encode())
            assert set(Path("/dev/fd").iterdir()) == before
            failure = ZygoteFailure.model_validate_json(ours.recv(65536))
        for inherited in (zygote._selector, zygote._wakeup, zygote._wakeup_writer):
            inherited.close()
    assert (failure.instance_id, "Resource temporarily unavailable" in failure.error.message) == ("x", True)


@pytest.mark.parametrize(
    "end",
    [
        "from services.engine.process import end_process; print('x'); end_process(7)",
        "from services.engine.stages.processes import _become_stage; print('x'); _become_stage(None, lambda _: 7, os.getppid())",
    ],
)
def test_a_process_ends_although_its_output_cannot_be_written(end: str) -> None:
    """Its log's disk may be full. Then it must not return into the zygote or the first stage."""
    with Path("/dev/full").open("wb") as full:
        program = f"import os\ntry:\n    {end}\nfinally:\n    os._exit(8)"
        buffered = os.environ | {"PYTHONUNBUFFERED": ""}
        ended = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=full, env=buffered, check=False, timeout=120)
    assert ended.returncode == 7
