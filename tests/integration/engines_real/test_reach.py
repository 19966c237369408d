"""Only the host reaches real vLLM and llama.cpp; they have no node credentials."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.enginehost.runtimes.endpoint import can_isolate
from shared.messaging import Mesh
from tests.integration.engines_real.conftest import RealEngine, listening
from tests.support.intruder import get_as_another_user, listening_sockets
from tests.support.servers import NatsServer

# vLLM takes half a minute to start, and minutes on a busy machine.
pytestmark = pytest.mark.timeout(600)


async def test_real_engine_is_unreachable_for_other_users(mesh: Mesh, nats_server: NatsServer, real: RealEngine) -> None:
    if not can_isolate():
        pytest.skip("needs network namespaces: root, or user namespaces")
    hosts = await listening(mesh, nats_server.url, real)
    pids = hosts.marked(real.instance)
    assert listening_sockets(pids) == {}, "no port of the machine's, torch's rendezvous included"
    (path,) = {
        Path(line.split()[-1])
        for pid in pids
        for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()
        if line.endswith("/engine.sock")
    }
    for above in path.parents[1:4]:
        above.chmod(0o755)
    for attack in ("/collective_rpc", "/sleep", "/v1/models", "/docs"):
        assert get_as_another_user(str(path), attack) == "PermissionError"
    if real.engine == "vllm":
        environment = b"".join(Path(f"/proc/{pid}/environ").read_bytes() for pid in pids)
        assert b"VLLM_SERVER_DEV_MODE" not in environment, "it does not sleep on cpu"
        unserved = await hosts.request_route(real.instance, "/collective_rpc", "POST")
        assert unserved.status == 404
    answer = await hosts.request(real.instance, "completion", prompt="Hello", max_tokens=4)
    assert answer.status == 200
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
