"""The gateway process: `python -m services.gateway`."""

from __future__ import annotations

import asyncio
import signal
import socket
from asyncio.subprocess import Process
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.integration.gateway.conftest import chat, until
from tests.integration.gateway.gateway_process import answers, spawn
from tests.support.fake_engine import FakeNode, hang
from tests.support.nats_accounts import NatsAccount
from tests.support.servers import NatsServer


async def ended(process: Process) -> tuple[int | None, str]:
    async with asyncio.timeout(60):
        _, log = await process.communicate()
    return process.returncode, log.decode()


async def test_port_in_use_is_reported() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        status, log = await ended(await spawn(THAW_GATEWAY_PORT=str(taken.getsockname()[1])))
    assert status == 1
    assert "THAW_GATEWAY_PORT" in log


async def test_a_wrong_setting_is_reported() -> None:
    status, log = await ended(await spawn(THAW_GATEWAY_PORT="eighty"))
    assert status == 2
    assert "gateway: THAW_GATEWAY_PORT: " in log


@pytest.mark.parametrize("variables", [("CERTIFICATE",), ("CERTIFICATE", "KEY"), ("KEY",)])
async def test_a_wrong_certificate_is_reported(tmp_path: Path, variables: tuple[str, ...]) -> None:
    missing = {f"THAW_TLS_{variable}": str(tmp_path / "missing.pem") for variable in variables}
    status, log = await ended(await spawn(THAW_GATEWAY_PORT="0", **missing))
    assert status == 1
    assert "gateway: cannot use TLS: " in log
    assert "check THAW_TLS_CERTIFICATE" in log
    assert "Traceback" not in log


async def test_a_missing_key_of_a_certificate_is_named(tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate.write_text("-----BEGIN CERTIFICATE-----\n")
    files = {"THAW_TLS_CERTIFICATE": str(certificate), "THAW_TLS_KEY": str(key)}
    status, log = await ended(await spawn(THAW_GATEWAY_PORT="0", **files))
    assert status == 1
    assert f"gateway: cannot use TLS: {key}: No such file" in log


async def test_gateway_stops_while_nats_is_unreachable(new_port: Callable[[], int]) -> None:
    process = await spawn(THAW_NATS_URL=f"nats://127.0.0.1:{new_port()}", THAW_GATEWAY_PORT=str(new_port()))
    assert process.stderr is not None
    async with asyncio.timeout(60):
        assert b"starting" in await process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    assert (await ended(process))[0] == 0


async def test_gateway_without_nats_answers_503_until_it_is_available(new_port: Callable[[], int]) -> None:
    port, nats_port = new_port(), new_port()
    base = f"http://127.0.0.1:{port}"
    process = await spawn(THAW_NATS_URL=f"nats://127.0.0.1:{nats_port}", THAW_GATEWAY_PORT=str(port), THAW_STARTING_TIMEOUT="1")
    await until(lambda: answers(base, "/health"), within=60)
    async with httpx.AsyncClient(base_url=base, timeout=60) as client:
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.get("/openapi.json")).status_code == 200
        ready = await client.get("/ready")
        assert (ready.status_code, ready.json()["faults"]) == (503, ["not connected to NATS yet"])
        asked = [client.get("/v1/models"), client.get("/v1/models/alpha"), client.get("/admin/v1/cluster")]
        asked += [client.get("/admin/v1/traces/last"), client.get("/admin/v1/keys")]
        for path, body in (("chat/completions", chat()), ("embeddings", {"model": "x", "input": "y"}), ("rerank", {"model": "x"})):
            headers = {"idempotency-key": "k"}
            asked.append(client.post(f"/v1/{path}", json=body, headers=headers))
        refused = await asyncio.gather(*asked)
        assert {(r.status_code, r.json()["error"]["code"], r.headers["x-should-retry"]) for r in refused} == {
            (503, "unavailable", "true")
        }
        assert (await client.get("/nonsense")).status_code == 404
    late = NatsServer(port=nats_port)
    try:
        await until(lambda: answers(base, "/ready"), within=60)
    finally:
        process.send_signal(signal.SIGTERM)
        status = (await ended(process))[0]
        late.close()
    assert status == 0


async def test_sigterm_ends_streams_in_order_and_logs_no_prompt(
    node: FakeNode, own_nats: NatsAccount, new_port: Callable[[], int]
) -> None:
    port = new_port()
    base = f"http://127.0.0.1:{port}"
    process = await spawn(THAW_NATS_URL=own_nats.url, THAW_GATEWAY_PORT=str(port), THAW_DRAIN_TIMEOUT="0.2")
    await until(lambda: answers(base, "/v1/models/alpha"), within=60)
    engine = await node.engine("alpha", hang)
    async with httpx.AsyncClient(base_url=base, timeout=60) as client:
        body = chat(stream=True, messages=[{"role": "user", "content": "a secret"}])
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            process.send_signal(signal.SIGTERM)
            assert "shutting_down" in [line async for line in lines if line][-1]
    await engine.until(lambda: len(engine.cancelled) == 1)
    status, log = await ended(process)
    assert status == 0, log
    assert '"message": "request finished"' in log
    assert "secret" not in log


async def test_a_request_waits_for_nats_longer_than_a_clients_retries_would(new_port: Callable[[], int]) -> None:
    """A request waits for NATS longer than a client's retries would.

    Chaos seed 5: a gateway restarted while NATS was stopped refused a client's three attempts
    within eight seconds.
    """
    port, nats_port = new_port(), new_port()
    base = f"http://127.0.0.1:{port}"
    process = await spawn(THAW_NATS_URL=f"nats://127.0.0.1:{nats_port}", THAW_GATEWAY_PORT=str(port))
    await until(lambda: answers(base, "/health"), within=60)
    async with httpx.AsyncClient(base_url=base, timeout=60) as client:
        asked = asyncio.create_task(client.get("/v1/models/alpha"))
        done, _ = await asyncio.wait([asked], timeout=3.0)
        assert not done
        late = NatsServer(port=nats_port)
        try:
            # Without a scheduler there is no catalogue yet; NATS is no longer among the reasons.
            await until(lambda: joined(base), within=60)
        finally:
            asked.cancel()
            process.send_signal(signal.SIGTERM)
            await ended(process)
            late.close()


async def joined(base: str) -> bool:
    async with httpx.AsyncClient(base_url=base, timeout=60) as client:
        return "not connected to NATS yet" not in (await client.get("/ready")).text
