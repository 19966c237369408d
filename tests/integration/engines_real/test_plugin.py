"""An unmodified vLLM with `load_format: thaw`.

It reads weights from the node's loader or from files, and its tokens are the same.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.enginehost.drivers.overlay import plugin_path
from shared.messaging import Mesh
from tests.integration.engines_real.conftest import PATIENCE_S, RealEngine, listening
from tests.integration.nodeagent.harness import gone
from tests.support.hosted import Hosts, hosted_card
from tests.support.real_engines import python_of
from tests.support.servers import NatsServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * PATIENCE_S)]
ASKED: dict[str, Any] = {"prompt": "The ice", "max_tokens": 48, "temperature": 0, "return_token_ids": True}


async def test_vllm_with_load_format_thaw_gives_the_same_tokens(
    mesh: Mesh, nats_server: NatsServer, vllm: RealEngine, model_directory: Path, tmp_path: Path
) -> None:
    own = await listening(mesh, nats_server.url, vllm)
    expected = (await own.whole(vllm.instance, "completion", **ASKED)).json["choices"][0]["token_ids"]
    hosts = Hosts(mesh, "real-plugin", nats_server.url, tmp_path)
    hosts.patience_s = PATIENCE_S
    await hosts.start()
    env = {**os.environ, "THAW_NATS_URL": nats_server.url, "THAW_HOME": str(tmp_path), "THAW_NODE": hosts.node}
    with (tmp_path / "loader.log").open("wb") as log:
        loader = subprocess.Popen([sys.executable, "-m", "services.loader"], env=env, stdout=log, stderr=log)  # noqa: ASYNC220
    try:
        card = hosted_card(model_directory, "vllm", context=1024, engine_args={"load_format": "thaw"})
        start = hosts.host(card, THAW_VLLM_PYTHON=python_of("vllm"), THAW_HOME=str(tmp_path))
        report = await hosts.settled(start.instance_id)
        assert report.state == "ready", report.error
        assert "from its loader" in Path(start.log_path).read_text()
        answer = await hosts.whole(start.instance_id, "completion", **ASKED)
        assert answer.json["choices"][0]["token_ids"] == expected
        assert report.hosted is not None
        assert len(report.hosted.pids) > 1, "vLLM's core too"
        os.kill(report.pid, signal.SIGKILL)
        assert all([await gone(pid) for pid in report.hosted.pids])
    finally:
        hosts.close()
        loader.terminate()
        loader.wait()


PROGRAM = """
import json, sys
from safetensors.torch import load_file
from weights.vllm_plugin import weights
with weights(sys.argv[1], None) as coming:
    found = dict(coming)
expected = load_file(sys.argv[1] + "/model.safetensors")
print(json.dumps([len(found), all((found[name] == tensor).all().item() for name, tensor in expected.items())]))
"""


def test_without_a_loader_the_files_are_read(model_directory: Path, tmp_path: Path) -> None:
    """Without a loader the plug-in reads the files.

    vLLM's environment has nothing of Thaw but the overlay.
    """
    done = subprocess.run(
        [python_of("vllm"), "-c", PROGRAM, str(model_directory)],
        env={**os.environ, "PYTHONPATH": str(plugin_path(tmp_path / "overlay"))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [39, True]
