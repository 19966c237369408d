"""`/admin/v1/simulations`: replay the latest requests under other policies or without a node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from services.gateway.adapters.simulation import Simulations, is_installed
from services.gateway.http.endpoints.admin import ask_scheduler
from services.gateway.http.errors import json_response
from services.gateway.http.parsing.body import read_body
from services.gateway.http.parsing.validation import validate_body
from services.gateway.http.scopes import ScopedRoute
from services.gateway.loop import Gateway
from shared.compact_json import encode_json
from shared.contracts.admin import ClusterView, ViewCluster
from shared.contracts.base import Frozen
from shared.contracts.simulation import SimulationOptions, SimulationProgress, SimulationResult, StartSimulation
from shared.errors import ShuttingDown, ThawError
from shared.policies import policy_names

PATH = "/admin/v1/simulations"
_MAX_BODY = 16 * 1024
_KEEP_ALIVE_S = 2.0


def _event(name: str, data: Frozen) -> bytes:
    return f"event: {name}\ndata: ".encode() + encode_json(data.model_dump(mode="json")) + b"\n\n"


class SimulationRoutes:
    """Handlers of simulations. At most one simulation runs in a gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        settings = gateway.settings
        self._tasks: set[asyncio.Task[SimulationResult]] = set()
        self.simulations = Simulations(gateway.mesh, self._view, settings.simulation_timeout, settings.simulation_bytes)

    def routes(self) -> list[ScopedRoute]:
        return [
            ScopedRoute(PATH, self.options, methods=["GET"], needs="read-only"),
            ScopedRoute(PATH, self.start, methods=["POST"], needs="admin"),
        ]

    async def options(self, request: Request) -> Response:
        """Return what a simulation may be started with."""
        view = await self._view(brief=True)
        nodes = tuple(n.node for n in view.nodes if n.alive and n.devices)
        found = SimulationOptions(installed=is_installed(), policies=policy_names(), policy=view.policy, nodes=nodes)
        return json_response(found.model_dump(mode="json"))

    async def start(self, request: Request) -> Response:
        """Simulate, and stream events: `progress`, and at the end `result` or `error`.

        The simulation is cancelled when the client disconnects.
        """
        order = validate_body(StartSimulation, await read_body(request.scope, request.receive, _MAX_BODY))
        self.simulations.check(order)
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(self._stream(order), headers=headers, media_type="text/event-stream")

    async def _stream(self, order: StartSimulation) -> AsyncIterator[bytes]:
        progress: asyncio.Queue[SimulationProgress] = asyncio.Queue()
        simulation = asyncio.create_task(self.simulations.run(order, progress.put_nowait), name="simulation")
        closing = asyncio.create_task(self._gateway.closing.wait(), name="simulation closing")
        self._tasks.add(simulation)
        simulation.add_done_callback(self._tasks.discard)
        try:
            while not simulation.done():
                update = asyncio.create_task(progress.get(), name="simulation progress")
                waits: set[asyncio.Future[Any]] = {simulation, closing, update}
                done, _ = await asyncio.wait(waits, timeout=_KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
                update.cancel()
                if closing in done:
                    raise ShuttingDown
                if update in done:
                    yield _event("progress", update.result())
                elif not done:
                    yield b": running\n\n"
            yield _event("result", simulation.result())
        except ThawError as e:
            yield _event("error", e.body())
        finally:
            # Not awaited: a client that has left cancels whatever this task waits for.
            simulation.cancel()
            closing.cancel()

    async def _view(self, *, brief: bool = False) -> ClusterView:
        return await ask_scheduler(self._gateway, ViewCluster(brief=brief), ClusterView)
