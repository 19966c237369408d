"""NATS over TLS (`tls://`) to a server that proves its name.

No other server gets a password.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from shared.messaging import Mesh
from shared.settings import CommonSettings
from tests.support.servers import NatsServer

PASSWORD = "hunter2hunter2"
TLS_HANDSHAKE = b"\x16\x03"
INFO = b'INFO {"server_id":"x","version":"2.12.0","max_payload":1048576,"auth_required":true}\r\n'


def certificate(directory: Path, name: str) -> tuple[Path, Path]:
    """Create a self-signed certificate for host `name`, and its key."""
    path, key = directory / f"{name}.pem", directory / f"{name}.key"
    command: list[str | Path] = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        key,
        "-out",
        path,
        "-days",
        "2",
    ]
    command += ["-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return path, key


@pytest.fixture
def server(named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NatsServer]:
    path, key = certificate(tmp_path, named)
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    # With `auto` the server speaks first if the client is slower than 50 ms, as on a busy machine.
    tls = f'tls {{ cert_file: "{path}", key_file: "{key}", handshake_first: true, timeout: 60 }}'
    found = NatsServer(config=f'{tls}\nauthorization {{ user: "thaw", password: "{PASSWORD}" }}')
    yield found
    found.close()


def mesh(port: int) -> Mesh:
    return Mesh(CommonSettings(nats_url=SecretStr(f"tls://thaw:{PASSWORD}@localhost:{port}")), "test")


@pytest.mark.parametrize("named", ["localhost"])
async def test_server_with_a_valid_certificate_is_used(server: NatsServer) -> None:
    connection = mesh(server.port)
    await asyncio.wait_for(connection.start(), 60)
    try:
        subscription = await connection.nc.subscribe("greeting")
        await connection.nc.publish("greeting", b"hello")
        assert (await subscription.next_msg(timeout=60)).data == b"hello"
    finally:
        await connection.stop()


@pytest.mark.parametrize("named", ["elsewhere.test"])
async def test_a_certificate_of_another_name_is_refused(server: NatsServer) -> None:
    refused = asyncio.Event()

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "certificate verify failed" in str(record.__dict__.get("error")):
                refused.set()

    watch = Watch()
    logging.getLogger("shared.messaging").addHandler(watch)
    try:
        connected = await asyncio.wait_for(mesh(server.port).start_unless(refused), 60)
    finally:
        logging.getLogger("shared.messaging").removeHandler(watch)
    assert refused.is_set()
    assert not connected


async def test_a_server_without_tls_gets_no_password() -> None:
    """A server without TLS gets no password.

    A man in the middle can remove TLS from the server's offer.
    """
    first: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(INFO)
        got = await reader.read(4096)
        if not first.done():
            first.set_result(got)
        writer.close()

    listener = await asyncio.start_server(impostor, "127.0.0.1", 0)
    done = asyncio.Event()
    first.add_done_callback(lambda _: done.set())
    async with listener:
        connected = await asyncio.wait_for(mesh(listener.sockets[0].getsockname()[1]).start_unless(done), 60)
    assert not connected
    assert first.result().startswith(TLS_HANDSHAKE)
    assert PASSWORD.encode() not in first.result()
