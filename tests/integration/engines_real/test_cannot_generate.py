"""A real vLLM that never generates is detected and explained."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.messaging import Mesh
from tests.integration.engines_real.conftest import PATIENCE_S, forked_python
from tests.support.hosted import Hosts, hosted_card
from tests.support.servers import NatsServer
from thaw.demo.models import make_demo_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * PATIENCE_S)]


async def test_healthy_and_unable_to_generate(mesh: Mesh, nats_server: NatsServer, tmp_path: Path) -> None:
    """An engine that is healthy but unable to generate is detected.

    vLLM starts with this model, opens its port and is healthy; its attention on cpu cannot compute
    heads of 16 elements.
    """
    source = make_demo_model(tmp_path / "test", "test")
    hosts = Hosts(mesh, "real-mute", nats_server.url, tmp_path)
    hosts.patience_s = PATIENCE_S
    await hosts.start()
    start = hosts.host(hosted_card(source, "vllm"), THAW_VLLM_PYTHON=forked_python())
    try:
        report = await hosts.settled(start.instance_id)
        assert report.state == "failed"
        assert report.error is not None
        assert "generated no token" in report.error.message
        await hosts.left_nothing(start.instance_id)
    finally:
        hosts.close()
