"""Stops a migration of real processes at a step: the process that would do the next thing is stopped."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Literal

import httpx

from shared.contracts.migration import MigrationRecord
from tests.support.launcher import until
from tests.support.mesh import Brake, held
from tests.support.moving import Roomy

Step = Literal["asked", "round", "handing_over"]
_TURN_S = 0.005


class Order(threading.Thread):
    """A migration that is asked for in a thread.

    `answer`: its records; `refused`: the error's body, or what became of the connection.
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
        """How it ended, where one migration was asked for."""
        self.join(120)
        assert self.answer, self.refused
        return self.answer[0]


class Staged:
    """One migration of a mesh, ordered by `order` and held at a step."""

    def __init__(self, mesh: Roomy) -> None:
        self.mesh = mesh
        self._before = set(mesh.records())

    def new(self) -> list[MigrationRecord]:
        """What has been ordered since."""
        return [r for key, r in self.mesh.records().items() if key not in self._before]

    @contextlib.contextmanager
    def at(self, step: Step, source: str, node: str, destination: int) -> Iterator[Order]:
        """All that `source` serves is ordered to `node`, whose engine is the process `destination`. The step lasts as long as the block."""
        with contextlib.ExitStack() as still:
            migrator = still.enter_context(stopped(self.mesh.pid("migrator")))
            brake = Brake(destination) if step == "round" else None
            if brake is not None:
                still.callback(brake.resume)
            order = Order(self.mesh, instance_id=source, node=node)
            until(lambda: bool(self.new()), what="the order is written")
            if step == "handing_over":
                still.enter_context(held(self.mesh.pid("gateway")))
            if step != "asked":
                migrator.resume()
            if step == "handing_over":
                until(lambda: self.new()[0].state == step, what="the gateway is asked")
            if brake is not None:
                until(lambda: self._begun(brake), what="a round has begun")
            yield order

    def _begun(self, destination: Brake) -> bool:
        """True if the destination has been asked about requests, after a moment of its time."""
        destination.step(_TURN_S)
        return bool(self.new()[0].requests)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[Brake]:
    """The process is stopped until it is resumed or the block ends."""
    brake = Brake(pid)
    try:
        yield brake
    finally:
        brake.resume()
