"""The nodeagent process: invalid settings, no NATS, and the fakes of other tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from services.nodeagent.engines.launcher import engine_environment
from services.nodeagent.settings import NodeagentSettings
from shared.settings import NodeSettings
from tests.support.forking import executed


def run_agent(home: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    with executed():
        return subprocess.run(
            [sys.executable, "-m", "services.nodeagent"],
            env={**os.environ, "THAW_HOME": str(home), "THAW_NODE": "n", "THAW_LOG_FORMAT": "text", **settings},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"THAW_DEVICES": "cpu:0=lots"}, "is not a size"),
        ({"THAW_DEVICES": "tpu:0"}, "is not a device"),
        ({"THAW_DEVICES": "cuda:4000"}, "names cuda:4000, but this machine has"),
        ({"THAW_NODE": "No Such Name"}, "THAW_NODE"),
        ({"THAW_HOME": "/tmp/" + "x" * 100}, "too long"),
        ({"THAW_HOME": "/proc/nowhere"}, "cannot start"),
    ],
    ids=lambda v: str(v)[:30],
)
def test_invalid_setting_is_named_and_exits_with_status_2(tmp_path: Path, settings: dict[str, str], says: str) -> None:
    done = run_agent(tmp_path, **settings)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_engine_environment_is_readable_by_engine_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = NodeagentSettings.model_validate(
        {"home": tmp_path, "node": "n1", "nats_url": "nats://u:p@h:1", "otlp_endpoint": "http://c:4317", "log_prompts": True}
    )
    for name, value in engine_environment(agent).items():
        monkeypatch.setenv(name, value)
    engine = NodeSettings()
    assert engine.nats_url.get_secret_value() == "nats://u:p@h:1"
    assert (engine.node, engine.state, engine.otlp_endpoint, engine.log_prompts) == ("n1", tmp_path, "http://c:4317", True)


def test_state_directory_writable_by_others_is_refused(tmp_path: Path) -> None:
    """A state directory that others can write is refused.

    Its sockets and records could belong to another user.
    """
    home = Path(tempfile.mkdtemp(prefix="thaw-state-", dir="/tmp"))
    try:
        home.chmod(0o777)
        done = run_agent(home)
        assert done.returncode == 2
        assert "can be written by others" in done.stderr
    finally:
        shutil.rmtree(home)
