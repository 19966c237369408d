"""Models of hosted engines, with and without routes of their own."""

from __future__ import annotations

from shared.contracts import subjects
from shared.messaging.streams import catalog_bucket
from tests.integration.gateway.conftest import CARDS, Served, until_listed
from tests.support.fake_engine import FakeNode, card_of

ROUTES = ("/v1/responses", "/v1/messages", "/v1/audio/speech", "/v1/audio/transcriptions", "/v1/rerank")
HOSTED = card_of("hosted", engine="llamacpp")
OWN = card_of("own", engine="vllm", routes=ROUTES)
EVENTS = "text/event-stream"


async def register_hosted(gateway: Served, node: FakeNode) -> None:
    bucket = await catalog_bucket(node.mesh.nc.jetstream())
    await bucket.put(subjects.token(HOSTED.name), HOSTED.model_dump_json().encode())
    await until_listed(gateway, (*CARDS, HOSTED))


async def register(gateway: Served, node: FakeNode) -> None:
    bucket = await catalog_bucket(node.mesh.nc.jetstream())
    await bucket.put(subjects.token(OWN.name), OWN.model_dump_json().encode())
    await until_listed(gateway, (*CARDS, OWN))
