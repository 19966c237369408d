"""A scheduler and a gateway on one NATS server, and a node with fake engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from services.gateway.settings import GatewaySettings
from shared.contracts.engine import EngineLoad
from shared.contracts.node import InstanceState, NodeStatus
from tests.integration.gateway.conftest import Served
from tests.integration.scheduler.conftest import Site
from tests.support.fake_engine import Behaviour, FakeEngine, speak
from tests.support.fake_node import FakeInstance, FakeNode
from tests.support.servers import kept_port


@dataclass
class ServingNode(FakeNode):
    """A node whose ready instances have scripted engines, and report their load."""

    behaviour: Behaviour = speak
    engines: dict[str, FakeEngine] = field(default_factory=dict)

    async def _enter(self, i: FakeInstance, state: InstanceState) -> None:
        name = i.command.instance_id
        if state is InstanceState.READY and name not in self.engines:
            engine = FakeEngine(self.mesh, i.command.card.name, self.behaviour)
            engine.id = name
            await engine.listen()
            self.engines[name] = engine
        elif state is InstanceState.STOPPED and name in self.engines:
            await self.engines.pop(name).vanish()
        await super()._enter(i, state)

    def status(self) -> NodeStatus:
        for name, engine in self.engines.items():
            if name in self.instances:
                active = len(engine._running)
                self.instances[name].load = EngineLoad(active=active, completed=len(engine.requests) - active)
        return super().status()

    async def stop(self) -> None:
        await super().stop()
        for engine in self.engines.values():
            await engine.vanish()


@asynccontextmanager
async def gateway(site: Site, **settings: Any) -> AsyncIterator[Served]:
    """Start a gateway that knows every model registered so far."""
    kept = kept_port()
    fields: dict[str, Any] = {
        "nats_url": site.settings.nats_url,
        "gateway_port": kept.getsockname()[1],
        "drain_timeout": 1.0,
        "home": site.settings.home,
    }
    fields |= settings
    served = Served(GatewaySettings(**fields))
    try:
        await served.until_ready()
        names = {m.card.name for m in (await site.view()).models}

        async def listed() -> bool:
            return names <= {m["id"] for m in (await served.http.get("/v1/models")).json()["data"]}

        await site.until(listed)
        yield served
    finally:
        await served.close()
        kept.close()


async def serving_node(site: Site, **options: Any) -> ServingNode:
    node = ServingNode(site.mesh, **options)
    await node.start()
    site.nodes.append(node)
    return node
