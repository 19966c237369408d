"""Stops a migration of real processes at a step.

It stops the process that performs the next step.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import nats

from shared.contracts import subjects
from shared.contracts.migration import MigrationRecord
from shared.messaging.mesh import flush
from tests.support.launcher import until
from tests.support.mesh import Brake, held
from tests.support.moving import Roomy

Step = Literal["asked", "round", "handing_over"]
_MESSAGE_WITHIN_S = 60.0


class Order(threading.Thread):
    """A migration order in a thread.

    Attributes:
        answer: Its records.
        refused: The error's body, or the connection's error.
    """

    def __init__(self, mesh: Roomy, **fields: Any) -> None:
        super().__init__(name="order", daemon=True)
        self.mesh, self.fields = mesh, fields
        self.answer: list[dict[str, Any]] = []
        self.refused: dict[str, Any] = {}
        self.start()

    def run(self) -> None:
        try:
            self.answer = self.mesh.order(**self.fields)["migrations"]
        except httpx.HTTPStatusError as e:
            self.refused = e.response.json()["error"]  # whatever happens, an error is well-formed
        except httpx.HTTPError as e:
            self.refused = {"code": "", "message": repr(e)}

    def record(self) -> dict[str, Any]:
        """Return the record of the only migration ordered."""
        self.join(300)
        assert self.answer, self.refused
        return self.answer[0]


class Staged:
    """One migration of a mesh, ordered by `order` and stopped at a step."""

    def __init__(self, mesh: Roomy) -> None:
        self.mesh = mesh
        self._before = set(mesh.records())

    def new(self) -> list[MigrationRecord]:
        """Return the migrations ordered since."""
        return [r for key, r in self.mesh.records().items() if key not in self._before]

    @contextlib.contextmanager
    def at(self, step: Step, source: str, node: str, destination: int) -> Iterator[Order]:
        """Migrate all requests of `source` to `node`, stopped at a step within the block.

        Args:
            step: The step.
            source: The instance with the requests.
            node: The node that they migrate to.
            destination: The engine process on that node.
        """
        with contextlib.ExitStack() as still:
            migrator = still.enter_context(stopped(self.mesh.pid("migrator")))
            brake = Brake(destination) if step == "round" else None
            if brake is not None:
                still.callback(brake.resume)
            order = Order(self.mesh, instance_id=source, node=node)
            until(lambda: bool(self.new()), what="the order is written")
            if step == "handing_over":
                still.enter_context(held(self.mesh.pid("gateway")))
            if brake is not None:
                asyncio.run(_begin_round(self.mesh.endpoints["nats_url"], self.new()[0].instance_id, migrator, brake))
                until(lambda: bool(self.new()[0].requests), what="the round is recorded")
            elif step == "handing_over":
                migrator.resume()
                until(lambda: self.new()[0].state == step, what="the gateway is asked")
            yield order


async def _begin_round(nats_url: str, instance_id: str, migrator: Brake, destination: Brake) -> None:
    """Resume the migrator, and return when it has sent a round to the stopped destination.

    The migrator first asks the destination for its requests. The destination runs only for that
    reply, while the migrator is stopped: it cannot complete the round before it is stopped again.
    """
    nc = await nats.connect(nats_url)
    try:
        requests = await nc.subscribe(subjects.engine_control(instance_id))
        await flush(nc)
        migrator.resume()
        while (kind := json.loads((asked := await requests.next_msg(_MESSAGE_WITHIN_S)).data)["kind"]) != "prepare_resume":
            if kind != "list_requests":
                continue
            migrator.stop()
            replies = await nc.subscribe(asked.reply)
            await flush(nc)
            destination.resume()
            await replies.next_msg(_MESSAGE_WITHIN_S)
            destination.stop()
            migrator.resume()
    finally:
        await nc.close()


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[Brake]:
    """Stop the process until it is resumed or the block ends."""
    brake = Brake(pid)
    try:
        yield brake
    finally:
        brake.resume()
