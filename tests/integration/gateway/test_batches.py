"""Files and batches: results, faulty input, limits, keys, cancelling, crashes, and expiry."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import SecretStr

from services.gateway.adapters.batch_store import BatchStore
from services.gateway.adapters.file_store import FileStore
from services.gateway.domain.batches.owner_state import OwnerBounds, OwnerState, StoredFile, add_file
from shared.contracts import subjects
from tests.integration.gateway.batches import CHAT, ended, jsonl, line, start
from tests.integration.gateway.clients import openai_client
from tests.integration.gateway.conftest import CARDS, Served, ServeFn, chat, until, until_listed
from tests.integration.gateway.gateway_process import answers, spawn
from tests.support.fake_engine import WORDS, FakeNode, Run, hang, speak
from tests.support.nats_accounts import NatsAccount
from tests.support.nats_relay import NatsRelay
from tests.support.servers import NatsServer

TEXT = "".join(WORDS)


async def results(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(text) for text in (await client.files.content(file_id)).text.splitlines()]


@pytest.fixture
async def client(gateway: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai_client(gateway) as client:
        yield client


async def test_responses_and_errors_are_in_files_of_their_own(client: openai.AsyncOpenAI, node: FakeNode) -> None:
    engine = await node.engine("alpha")
    wrong = line(1, body=chat(temperature=-1))
    batch = await ended(client, await start(client, jsonl(line(0), wrong, b"", line(2))))
    assert (batch.status, batch.errors) == ("completed", None)
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 3, "completed": 2, "failed": 1}
    good, bad = await results(client, batch.output_file_id), await results(client, batch.error_file_id)
    assert [found["custom_id"] for found in good] == ["r0", "r2"]
    assert {found["response"]["body"]["choices"][0]["message"]["content"] for found in good} == {TEXT}
    assert [found["custom_id"] for found in bad] == ["r1"]
    assert (bad[0]["response"]["status_code"], bad[0]["response"]["body"]["error"]["param"]) == (400, "temperature")
    assert len({found["id"] for found in good + bad}) == 3
    assert len(engine.requests) == 2
    file = await client.files.retrieve(batch.output_file_id or "")
    assert (file.purpose, file.bytes) == ("batch_output", len((await client.files.content(file.id)).content))


async def test_embeddings_run_in_a_batch(client: openai.AsyncOpenAI, node: FakeNode) -> None:
    await node.engine("vectors")
    asked = line(0, url="/v1/embeddings", body={"model": "vectors", "input": "x", "encoding_format": "float"})
    batch = await ended(client, await start(client, jsonl(asked), "/v1/embeddings"))
    (found,) = await results(client, batch.output_file_id)
    assert found["response"]["body"]["data"][0]["embedding"] == [0.0, 0.5, -1.0]


async def test_responses_run_in_a_batch_and_are_stored_on_demand(client: openai.AsyncOpenAI, node: FakeNode) -> None:
    await node.engine("alpha")
    asked = [
        line(i, url="/v1/responses", body={"model": "alpha", "input": str(i)} | more)
        for i, more in enumerate(({}, {"store": True}))
    ]
    batch = await ended(client, await start(client, jsonl(*asked), "/v1/responses"))
    assert batch.status == "completed"
    unstored, stored = (found["response"]["body"] for found in await results(client, batch.output_file_id))
    assert (unstored["object"], unstored["store"], stored["store"]) == ("response", False, True)
    assert {found["output"][0]["content"][0]["text"] for found in (unstored, stored)} == {TEXT}
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(unstored["id"])
    assert (await client.responses.retrieve(stored["id"])).output_text == TEXT


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        ((line(0), b"{x"), "invalid_json_line", 2),
        ((b"[]",), "invalid_json_line", 1),
        ((line(0), line(1), line(0)), "duplicate_custom_id", 3),
        ((line(0, url="/v1/completions"),), "invalid_url", 1),
        ((line(0, method="GET"),), "invalid_method", 1),
        ((line(0, custom_id=""),), "invalid_custom_id", 1),
        ((line(0, body=chat(stream=True)),), "invalid_request", 1),
        ((line(0), line(1, body=chat("beta"))), "mismatched_model", 2),
        ((line(0, body=chat("unknown")),), "model_not_found", None),
        ((b"",), "empty_file", None),
    ],
)
async def test_faulty_input_fails_the_whole_batch(
    client: openai.AsyncOpenAI, lines: tuple[Any, ...], code: str, number: int | None
) -> None:
    batch = await ended(client, await start(client, jsonl(*lines)))
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(error.code, error.line) for error in batch.errors.data] == [(code, number)]
    assert (batch.output_file_id, batch.error_file_id) == (None, None)


async def test_files_and_batches_belong_to_their_key(gateway: Served, node: FakeNode) -> None:
    await node.engine("alpha")
    async with openai_client(gateway, "theirs") as theirs, openai_client(gateway, "mine") as mine:
        batch = await ended(theirs, await start(theirs, jsonl(line(0))))
        file_id = batch.output_file_id or ""
        for call in (mine.files.retrieve, mine.files.content, mine.files.delete):
            with pytest.raises(openai.NotFoundError):
                await call(file_id)
        for change in (mine.batches.retrieve, mine.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                await change(batch.id)
        with pytest.raises(openai.NotFoundError):
            await mine.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
        assert [file.id async for file in mine.files.list()] == []
        assert [found.id async for found in mine.batches.list()] == []
        assert {file.id async for file in theirs.files.list()} == {file_id, batch.input_file_id}


async def test_lists_have_pages_newest_first(client: openai.AsyncOpenAI) -> None:
    made = [(await client.files.create(file=("f", b"x"), purpose="batch")).id for _ in range(5)]
    assert [file.id async for file in client.files.list(limit=2)] == made[::-1]
    assert [file.id async for file in client.files.list(limit=2, order="asc")] == made
    page = await client.files.list(limit=2, after=made[3])
    assert ([file.id for file in page.data], page.has_more) == ([made[2], made[1]], True)
    await client.files.delete(made[0])
    assert [file.id async for file in client.files.list()] == made[:0:-1]
    with pytest.raises(openai.BadRequestError):
        await client.files.list(after="nothing")


@pytest.mark.parametrize(
    "asked",
    [
        {"endpoint": "/v1/moderations"},
        {"completion_window": "25h"},
        {"metadata": {"k": "v" * 513}},
        {"input_file_id": ""},
    ],
)
async def test_wrong_batch_is_refused(client: openai.AsyncOpenAI, asked: dict[str, Any]) -> None:
    file = await client.files.create(file=("f", jsonl(line(0))), purpose="batch")
    fields: dict[str, Any] = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"} | asked
    with pytest.raises(openai.BadRequestError) as refused:
        await client.batches.create(**fields)
    assert (refused.value.param or "").split(".")[0] == next(iter(asked))


async def test_wrong_upload_is_refused(client: openai.AsyncOpenAI, gateway: Served) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.files.create(file=("f", b"x"), purpose="vision")
    assert refused.value.param == "purpose"
    assert (await gateway.http.post("/v1/files", json={})).status_code == 400
    torn = {"content-type": "multipart/form-data; boundary=b"}
    assert (await gateway.http.post("/v1/files", content=b"--b\r\n", headers=torn)).status_code == 400
    assert [file async for file in client.files.list()] == []


async def test_limits_of_a_key(node: FakeNode, serve: ServeFn) -> None:
    await node.engine("alpha", hang)
    async with serve(files_per_key=3, max_file_bytes=200_000, files_bytes_per_key=250_000, batches_per_key=1) as gateway:
        await until_listed(gateway, CARDS)
        async with openai_client(gateway) as client:
            client = client.with_options(max_retries=0)
            with pytest.raises(openai.APIStatusError) as refused:
                await client.files.create(file=("f", b"x" * 200_001), purpose="batch")
            assert (refused.value.status_code, refused.value.code) == (413, "payload_too_large")
            whole = b"y" * 199_999 + b"\n"
            stored = await client.files.create(file=("f", whole), purpose="batch")
            assert (await client.files.content(stored.id)).content == whole
            with pytest.raises(openai.APIStatusError, match="Delete some"):
                await client.files.create(file=("f", b"x" * 60_000), purpose="batch")
            running = await start(client, jsonl(line(0)))
            with pytest.raises(openai.RateLimitError, match="batches"):
                await client.batches.create(input_file_id=running.input_file_id, endpoint=CHAT, completion_window="24h")
            assert 'thaw_reason="active_batches"} 1.0' in (await gateway.http.get("/metrics")).text
            with pytest.raises(openai.ConflictError):
                await client.files.delete(running.input_file_id)
            await client.files.create(file=("f", b"x"), purpose="batch")
            for size in (1, 100_000, 20_000_000):  # the whole body is read, so that its client gets the refusal
                with pytest.raises(openai.APIStatusError, match="3 files"):
                    await client.files.create(file=("f", b"x" * size), purpose="batch")
            await client.files.delete(stored.id)
            await client.files.create(file=("f", b"x"), purpose="batch")
            async with openai_client(gateway, "other") as other:
                await other.files.create(file=("f", whole), purpose="batch")
    names = await (await node.mesh.nc.jetstream().key_value(subjects.FILES_BUCKET)).keys()
    assert stored.id not in {name.split(".")[1] for name in names}


async def test_cancelled_batch_keeps_the_results_that_it_has(client: openai.AsyncOpenAI, node: FakeNode) -> None:
    async def first_only(run: Run) -> None:
        await (speak if run.request.body["user"] == "0" else hang)(run)

    engine = await node.engine("alpha", first_only)
    begun = await start(client, jsonl(*(line(i) for i in range(40))))
    await engine.until(lambda: len(engine.requests) > 5)

    async def has_first() -> bool:
        counts = (await client.batches.retrieve(begun.id)).request_counts
        return counts is not None and counts.completed == 1

    await until(has_first)
    assert (await client.batches.cancel(begun.id)).status == "cancelling"
    batch = await ended(client, begun)
    assert (batch.status, batch.error_file_id) == ("cancelled", None)
    assert [found["custom_id"] for found in await results(client, batch.output_file_id)] == ["r0"]
    # Requests that were on their way may arrive after the end, followed by their cancellations.
    await engine.until(
        lambda: {r.request.request_id for r in engine.requests if r.request.body["user"] != "0"} == set(engine.cancelled)
    )
    assert len(engine.requests) < 40
    assert (await client.batches.cancel(begun.id)).status == "cancelled"


async def test_a_place_of_the_engine_stays_free_for_interactive_requests(client: openai.AsyncOpenAI, node: FakeNode) -> None:
    engine = await node.engine("alpha", hang, capacity=3)
    begun = await start(client, jsonl(*(line(i) for i in range(10))))
    await engine.until(lambda: len(engine.requests) == 2)
    engine.behaviour = speak
    asked = chat()
    answer = await client.chat.completions.create(model=asked["model"], messages=asked["messages"])
    assert answer.choices[0].message.content == TEXT
    assert len(engine.requests) == 3
    await client.batches.cancel(begun.id)
    assert (await ended(client, begun)).status == "cancelled"


async def test_a_batch_whose_model_is_busy_does_not_hold_up_batches_of_others(node: FakeNode, serve: ServeFn) -> None:
    engine = await node.engine("alpha", hang, capacity=3)
    await node.engine("vectors")
    async with serve(batch_concurrency=4) as gateway:
        await until_listed(gateway, CARDS)
        async with openai_client(gateway) as client:
            busy = await start(client, jsonl(*(line(i) for i in range(10))))
            await engine.until(lambda: len(engine.requests) == 2)
            asked = line(0, url="/v1/embeddings", body={"model": "vectors", "input": "x"})
            other = await ended(client, await start(client, jsonl(asked), "/v1/embeddings"))
            assert (other.status, len(engine.requests)) == ("completed", 2)
            await client.batches.cancel(busy.id)
            assert (await ended(client, busy)).status == "cancelled"


async def test_request_that_the_engine_refuses_for_now_is_repeated(client: openai.AsyncOpenAI, node: FakeNode) -> None:
    seen: Counter[str] = Counter()

    async def busy_at_first(run: Run) -> None:
        seen[run.request.body["user"]] += 1
        if seen[run.request.body["user"]] == 1:
            await run.respond("application/json", b'{"error":{"message":"busy"}}', status=503)
            await run.close()
        else:
            await speak(run)

    await node.engine("alpha", busy_at_first)
    batch = await ended(client, await start(client, jsonl(line(0), line(1))))
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 0)
    assert set(seen.values()) == {2}


async def test_a_response_that_is_not_json_does_not_stop_the_batch(client: openai.AsyncOpenAI, node: FakeNode) -> None:
    async def garbled_at_first(run: Run) -> None:
        if run.request.body["user"] == "0":
            await run.respond("text/plain", b"no JSON")
            await run.close()
        else:
            await speak(run)

    await node.engine("alpha", garbled_at_first)
    batch = await ended(client, await start(client, jsonl(line(0), line(1))))
    assert batch.request_counts is not None
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 1, 1)
    (result,) = await results(client, batch.error_file_id)
    assert (result["custom_id"], result["response"], result["error"]["code"]) == ("r0", None, "invalid_response")


async def test_each_request_is_generated_once_when_gateways_are_killed(
    own_nats: NatsAccount, node: FakeNode, tmp_path: Path, new_port: Callable[[], int]
) -> None:
    gate = asyncio.Event()

    async def wait_then_speak(run: Run) -> None:
        if int(run.request.body["user"]) >= 10:
            await gate.wait()
        await speak(run)

    engine = await node.engine("alpha", wait_then_speak)
    ports = [new_port(), new_port()]
    processes = [
        await spawn(THAW_NATS_URL=own_nats.url, THAW_GATEWAY_PORT=str(port), THAW_HOME=str(tmp_path / str(port))) for port in ports
    ]
    async with contextlib.AsyncExitStack() as stack:
        for process in processes:
            stack.push_async_callback(_killed, process)
        stack.callback(gate.set)
        for port in ports:
            await until(partial(answers, f"http://127.0.0.1:{port}", "/ready"))
        clients = [
            await stack.enter_async_context(openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k", max_retries=5))
            for port in ports
        ]
        begun = await start(clients[0], jsonl(*(line(i) for i in range(30))))
        await engine.until(lambda: len(engine.requests) >= 20)
        # The gateway that runs the batch is the one that has sent the requests.
        (runner,) = [i for i in (0, 1) if await _has_requests(ports[i])]
        await _killed(processes[runner])
        gate.set()
        other = clients[1 - runner]
        batch = await ended(other, begun)
        assert batch.status == "completed"
        assert [found["custom_id"] for found in await results(other, batch.output_file_id)] == [f"r{i}" for i in range(30)]
        generated = Counter(run.request.body["user"] for run in engine.requests)
        assert generated == {str(i): 1 for i in range(30)}


async def _killed(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.communicate()


async def _has_requests(port: int) -> bool:
    """Return whether the gateway has requests at an engine, by its metrics."""
    async with httpx.AsyncClient(timeout=60) as http:
        text = (await http.get(f"http://127.0.0.1:{port}/metrics")).text
    return any(row.startswith("thaw_requests_in_flight") and not row.endswith(" 0.0") for row in text.splitlines())


@pytest.mark.own_nats_server
async def test_batch_survives_the_death_of_nats(own_nats: NatsServer, client: openai.AsyncOpenAI, node: FakeNode) -> None:
    engine = await node.engine("alpha")
    begun = await start(client, jsonl(*(line(i) for i in range(60))))
    await engine.until(lambda: len(engine.requests) >= 10)
    own_nats.kill()
    own_nats.restart()
    batch = await ended(client.with_options(max_retries=20), begun)
    assert batch.status == "completed"
    found = await results(client, batch.output_file_id)
    assert [one["custom_id"] for one in found] == [f"r{i}" for i in range(60)]


@pytest.mark.own_nats_server
async def test_a_batch_whose_confirmation_is_lost_is_made_once(own_nats: NatsServer, node: FakeNode, serve: ServeFn) -> None:
    relay = NatsRelay(own_nats)
    async with relay.serving(), serve(nats_url=SecretStr(relay.url)) as gateway, openai_client(gateway) as client:
        await until_listed(gateway, CARDS)
        file = await client.files.create(file=("in.jsonl", jsonl(line(0))), purpose="batch")
        relay.break_at(f'"stream":"KV_{subjects.BATCHES_BUCKET}"'.encode(), "close")
        made = await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        assert relay.broken.is_set()
        assert [found.id for found in (await client.batches.list()).data] == [made.id]


async def test_an_upload_is_kept_if_an_expired_file_cannot_be_removed(node: FakeNode) -> None:
    files, now = FileStore(node.mesh, 3600.0), int(time.time())
    store = BatchStore(node.mesh, files)
    old, new = (StoredFile(id=f"file-{n}", filename=n, purpose="batch", size_bytes=1, created_at=0, expires_at=0) for n in "ab")
    new = new.model_copy(update={"expires_at": now + 3600})
    await store.change("owner", lambda state: state.model_copy(update={"files": (old,)}))
    await files.write("owner", old.id, 0, b"x")
    js = node.mesh.nc.jetstream()
    config = (await js.stream_info(f"KV_{subjects.FILES_BUCKET}")).config
    await js.update_stream(config.evolve(deny_purge=True, allow_rollup_hdrs=False))  # removals fail
    changed = await store.change("owner", partial(add_file, file=new, bounds=OwnerBounds(9, 9, 9, 9)))
    assert changed.files == (await store.read("owner")).files == (new,)


async def test_batch_fails_if_its_input_is_lost(node: FakeNode, serve: ServeFn) -> None:
    engine = await node.engine("alpha", hang)
    async with serve() as gateway:
        await until_listed(gateway, CARDS)
        async with openai_client(gateway) as client:
            begun = await start(client, jsonl(line(0)))
            await engine.until(lambda: len(engine.requests) == 1)
    await node.mesh.nc.jetstream().purge_stream(f"KV_{subjects.FILES_BUCKET}")
    async with serve() as gateway:
        await until_listed(gateway, CARDS)
        async with openai_client(gateway) as client:
            batch = await ended(client, begun)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert [error.code for error in batch.errors.data or []] == ["not_found"]


async def test_requests_that_the_window_leaves_over_are_listed(node: FakeNode, serve: ServeFn) -> None:
    engine = await node.engine("alpha", hang)
    async with serve() as gateway:
        await until_listed(gateway, CARDS)
        async with openai_client(gateway) as client:
            begun = await start(client, jsonl(line(0), line(1)))
            await engine.until(lambda: len(engine.requests) == 2)
    bucket = await node.mesh.nc.jetstream().key_value(subjects.BATCHES_BUCKET)
    (owner,) = [name for name in await bucket.keys() if name != "runner"]
    state = OwnerState.model_validate_json((await bucket.get(owner)).value or b"")
    (batch,) = state.batches
    yesterday = batch.model_copy(update={"created_at": batch.created_at - 24 * 3600})
    await bucket.put(owner, state.model_copy(update={"batches": (yesterday,)}).model_dump_json().encode())
    async with serve() as gateway:
        await until_listed(gateway, CARDS)
        async with openai_client(gateway) as client:
            expired = await ended(client, begun)
            assert expired.status == "expired"
            found = await results(client, expired.error_file_id)
    assert [(one["custom_id"], one["error"]["code"]) for one in found] == [("r0", "batch_expired"), ("r1", "batch_expired")]
