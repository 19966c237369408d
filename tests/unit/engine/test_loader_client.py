"""The engine's client of the node's loader."""

from __future__ import annotations

from typing import Any, NoReturn, cast

import pytest
from nats.errors import ConnectionDrainingError

from services.engine.loader_client import LoaderClient
from shared.contracts.engine import EngineStart
from shared.errors import Unreachable
from shared.messaging import Mesh
from tests.unit.engine.lora_cards import card


class FailingMesh:
    """A mesh whose requests fail."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.requested: list[Any] = []

    async def request(self, subject: str, message: object, reply: type) -> NoReturn:
        self.requested.append(message)
        raise self.error


@pytest.mark.parametrize("error", [ConnectionDrainingError(), Unreachable("There is no loader")])
async def test_a_release_raises_no_error_of_the_connection(error: Exception) -> None:
    start = EngineStart(instance_id="i", node="n", card=card("a"), device="cpu:0", kv_bytes=1, log_path="")
    mesh = FailingMesh(error)
    await LoaderClient(cast(Mesh, mesh), start).release("i.lora.1")
    assert [m.instance_id for m in mesh.requested] == ["i.lora.1"]
