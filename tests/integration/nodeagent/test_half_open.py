"""Adoption over a half-open connection to NATS: its bytes are lost, and it stays open."""

from __future__ import annotations

import asyncio
from pathlib import Path

from shared.contracts import subjects
from shared.contracts.node import InstanceState
from shared.messaging.mesh import HALF_OPEN_WITHIN_S
from tests.integration.nodeagent.harness import WITHIN_S, begin_request, running_node, start_command
from tests.support.hosted import fake_card
from tests.support.nats_relay import NatsRelay
from tests.support.servers import NatsServer

READY, FAILED = InstanceState.READY, InstanceState.FAILED
ADOPT_S = 8
"""Less than the time in which the client of NATS notices a half-open connection."""


async def test_engines_are_adopted_if_the_agents_connection_is_half_open(nats_server: NatsServer, tmp_path: Path) -> None:
    async with running_node(nats_server.url, tmp_path, THAW_ADOPT_TIMEOUT=str(ADOPT_S)) as node:
        instance_id = await node.start()
        pids = (await node.reaches(instance_id, READY)).pids
        node.kill_agent()
        relay = NatsRelay(nats_server)
        relay.break_at(subjects.engine_control(instance_id).encode(), "lose")
        async with relay.serving():
            node.environment["THAW_NATS_URL"] = relay.url
            (adopted,) = (await node.start_agent()).instances
            assert relay.broken.is_set()
            assert (adopted.state, adopted.pids) == (READY, pids)
            await begin_request(node, instance_id)  # its report ends the adoption
            node.close()


async def test_engine_whose_own_connection_is_half_open_is_adopted(nats_server: NatsServer, tmp_path: Path) -> None:
    """It notices that by its pings, and connects again."""
    relay, settings = NatsRelay(nats_server), {"THAW_ADOPT_TIMEOUT": str(4 * HALF_OPEN_WITHIN_S)}
    async with relay.serving(), running_node(nats_server.url, tmp_path, THAW_NATS_URL=relay.url, **settings) as node:
        await start_command(node, "h", fake_card())
        pids = (await node.reaches("h", READY, FAILED, within=2 * WITHIN_S)).pids
        node.kill_agent()
        relay.break_at(subjects.engine_report(node.name).encode(), "lose")
        async with asyncio.timeout(WITHIN_S):
            await relay.broken.wait()
        node.environment["THAW_NATS_URL"] = nats_server.url
        (adopted,) = (await node.start_agent()).instances
        assert (adopted.state, adopted.pids) == (READY, pids)

        def is_settled() -> bool:
            return node.instance("h").state is not READY or node.instance("h").load.idle_ms > adopted.load.idle_ms

        await node.until(lambda _: is_settled())
        assert (node.instance("h").state, node.instance("h").pids) == (READY, pids)
        node.close()
