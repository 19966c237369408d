"""A followed response counts once if its follower is killed, whether or not its owner is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from shared.contracts import subjects
from shared.contracts.inference import InferRequest
from tests.integration.gateway.conftest import CARDS, ServeFn, chat, until, until_listed
from tests.integration.gateway.gateway_process import answers, spawn
from tests.integration.gateway.idempotent_requests import KEY, TEXT, URL, claimed, ended, entry_of
from tests.integration.gateway.usage_ledger import Ledger
from tests.support.fake_engine import FakeNode
from tests.support.nats_accounts import NatsAccount


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("owner", ["is lost", "ends the key", "began another attempt", "is of a later version"])
async def test_response_whose_follower_was_killed_counts_once(
    node: FakeNode, serve: ServeFn, own_nats: NatsAccount, ledger: Ledger, tmp_path: Path, owner: str, new_port: Callable[[], int]
) -> None:
    engine = await node.engine("alpha")
    port, home = new_port(), tmp_path / "shared"
    base = f"http://127.0.0.1:{port}"
    follower = await spawn(THAW_NATS_URL=own_nats.url, THAW_GATEWAY_PORT=str(port), THAW_HOME=str(home))
    await until(lambda: answers(base, "/v1/models/alpha"), within=60)
    async with httpx.AsyncClient(base_url=base, timeout=60) as client:
        request = client.build_request("POST", URL, json=chat(), headers=KEY)
        claim = await claimed(node, request.content)
        reply = subjects.keyed_reply("dead", "r-1")
        await claim.record_attempt(reply, "r-1", engine.id, node.name)
        ask = InferRequest(request_id="r-1", instance_id=engine.id, model="alpha", endpoint="chat", body=chat())
        await node.mesh.nc.publish(subjects.infer(engine.id), ask.model_dump_json().encode(), reply=reply)
        async with claim.renewed():  # the follower may begin late
            answer = await client.send(request)
    follower.kill()
    await follower.communicate()
    assert answer.json()["choices"][0]["message"]["content"] == TEXT
    if owner == "ends the key":
        await claim.complete(len(answer.content), None)
    elif owner == "began another attempt":
        await claim.record_attempt(subjects.keyed_reply("dead", "r-2"), "r-2", engine.id, node.name)
    elif owner == "is of a later version":
        bucket = await node.mesh.nc.jetstream().key_value(subjects.IDEMPOTENCY_BUCKET)
        await bucket.put((await bucket.keys())[0], b'{"state":"unknown to this version"}')
    spools = list(home.glob("**/*.usage"))
    assert b'"followed"' in b"".join(path.read_bytes() for path in spools)
    async with serve(home=home) as later:
        await until_listed(later, CARDS)
        if owner == "is lost":
            await until(lambda: ledger.counted(1))
            await until(lambda: ended(node))
            assert ledger.tokens == answer.json()["usage"]["completion_tokens"]
        assert (await later.http.post(URL, json=chat())).status_code == 200
        await until(lambda: ledger.counted(2 if owner == "is lost" else 1))
        await until(lambda: _all_removed(spools))
        if owner == "began another attempt":
            await until(lambda: _is_released(node))
    assert ledger.alone == (["chatcmpl-dead"] if owner == "is lost" else [])
    is_resolved = owner != "is of a later version"
    assert bool(list(home.glob("**/*.usage"))) != is_resolved, "the spool of an unresolved response is left to the next gateway"


async def _is_released(node: FakeNode) -> bool:
    entry = await entry_of(node)
    return entry is not None and not entry.owner


async def _all_removed(spools: list[Path]) -> bool:
    return not any(path.exists() for path in spools)
