"""Adoption over a half-open connection to NATS: its bytes are lost, and it stays open."""

from __future__ import annotations

from pathlib import Path

from shared.contracts import subjects
from shared.contracts.node import InstanceState
from tests.integration.nodeagent.harness import begin_request, running_node
from tests.support.nats_relay import NatsRelay
from tests.support.servers import NatsServer

ADOPT_S = 8
"""Less than the time in which the client of NATS notices a half-open connection."""


async def test_engines_are_adopted_if_the_agents_connection_is_half_open(nats_server: NatsServer, tmp_path: Path) -> None:
    async with running_node(nats_server.url, tmp_path, THAW_ADOPT_TIMEOUT=str(ADOPT_S)) as node:
        instance_id = await node.start()
        pids = (await node.reaches(instance_id, InstanceState.READY)).pids
        node.kill_agent()
        relay = NatsRelay(nats_server)
        relay.break_at(subjects.engine_control(instance_id).encode(), "lose")
        async with relay.serving():
            node.environment["THAW_NATS_URL"] = relay.url
            (adopted,) = (await node.start_agent()).instances
            assert relay.broken.is_set()
            assert (adopted.state, adopted.pids) == (InstanceState.READY, pids)
            await begin_request(node, instance_id)  # its report ends the adoption
            node.close()
