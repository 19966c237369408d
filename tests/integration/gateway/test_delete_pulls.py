"""DELETE of paths that end with "/pull": it cancels pulls, or removes a model of such a name."""

from __future__ import annotations

import pytest

from shared.contracts import subjects
from shared.contracts.admin import ADMIN_REQUEST, AdminRequest, CancelPulls, PullsCancelled, PullTarget, RemoveModel
from shared.contracts.base import Done, Message
from shared.messaging.streams import catalog_bucket
from tests.integration.gateway.conftest import CARDS, Served, ServeFn, until_listed
from tests.support.fake_engine import FakeNode, card_of


async def test_cancelled_pulls_are_logged_with_who_cancelled_them(
    gateway: Served, node: FakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer(request: AdminRequest) -> Message:
        return PullsCancelled(name="alpha", cancelled=(PullTarget(node="n", tier="ssd"),))

    await node.mesh.respond(subjects.ADMIN, ADMIN_REQUEST, answer).start()
    await node.mesh.flush()
    with caplog.at_level("INFO"):
        assert (await gateway.http.delete("/admin/v1/models/a/pull")).status_code == 200
    (record,) = (vars(r) for r in caplog.records if r.message == "pulls cancelled")
    logged = {field: record[field] for field in ("model", "targets", "actor", "client")}
    assert logged == {"model": "alpha", "targets": ["ssd of n"], "actor": "no key", "client": "127.0.0.1"}


async def test_models_called_pull_are_removed(node: FakeNode, serve: ServeFn) -> None:
    bucket = await catalog_bucket(node.mesh.nc.jetstream())
    cards = (card_of("lone/pull"), card_of("alpha/pull"))
    for card in cards:
        await bucket.put(subjects.token(card.name), card.model_dump_json().encode())
    asked: list[AdminRequest] = []

    async def answer(request: AdminRequest) -> Message:
        asked.append(request)
        return PullsCancelled(name=request.name) if isinstance(request, CancelPulls) else Done()

    await node.mesh.respond(subjects.ADMIN, ADMIN_REQUEST, answer).start()
    await node.mesh.flush()
    async with serve() as served:
        await until_listed(served, (*CARDS, *cards))
        for path, expected in (
            ("lone/pull", RemoveModel(name="lone/pull")),
            ("lone/pull?adapters=true", RemoveModel(name="lone/pull", with_adapters=True)),
            ("lone/pull/pull", CancelPulls(name="lone/pull")),
            ("alpha/pull", CancelPulls(name="alpha")),  # both are models, and this removes neither
            ("org/alpha/pull", CancelPulls(name="org/alpha")),
            ("alpha%2Fpull", RemoveModel(name="alpha/pull")),
            ("alpha%2fpull?adapters=true", RemoveModel(name="alpha/pull", with_adapters=True)),
            ("alpha%2Fpull/pull", CancelPulls(name="alpha/pull")),
            ("unknown/pull", CancelPulls(name="unknown")),
        ):
            for prefix, headers in (("", {}), ("/ui/api", {"x-thaw-console": "1"})):
                answered = await served.http.delete(f"{prefix}/admin/v1/models/{path}", headers=headers)
                assert (answered.status_code, asked.pop()) == (200, expected), (path, answered.text)
