"""The loader's Unix socket as a foreign engine's plug-in uses it."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from pathlib import Path

import pytest

from shared.errors import CheckpointInvalid, InvalidModel, NotFound, Unreachable
from shared.unix_sockets import short_address
from tests.integration.loader.conftest import Client, LoaderProcess
from tests.integration.loader.local_socket import assert_arrived, path_of
from tests.integration.loader.sparse_models import GIB, client_card_of_sparse
from tests.integration.loader.statuses import status_where
from tests.support import slow_loader
from tests.unit.loader.checkpoints import tensors, write_checkpoint, write_sparse_checkpoint
from weights.client import attach


async def test_weights_by_source_and_by_id(loader: LoaderProcess, client: Client, tmp_path: Path) -> None:
    expected = write_checkpoint(tmp_path / "m", tensors(megabytes=40), shards=2)
    with await asyncio.to_thread(attach, path_of(loader), source=str(tmp_path / "m"), timeout=60) as weights:
        await asyncio.to_thread(assert_arrived, weights, expected)
        assert weights.directory == tmp_path / "m"
        card = await client.card(tmp_path / "m")
        assert card.info.revision == weights.weights_id  # the same weights as a builtin engine would hold
        found = await client.attach("i1", card)
        assert found.total_bytes == loader.memory() == weights.total_bytes
        with await asyncio.to_thread(attach, path_of(loader), weights_id=weights.weights_id, timeout=60) as second:
            await asyncio.to_thread(second.wait)
            assert second.complete
    await status_where(client, loader.node, lambda s: [g.holders for g in s.segments] == [("i1",)])
    assert await client.release("i1") == weights.total_bytes
    assert loader.memory() == 0


async def test_weights_are_released_with_the_connection(loader: LoaderProcess, client: Client, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m")
    weights = await asyncio.to_thread(attach, path_of(loader), source=str(tmp_path / "m"), timeout=60)
    await asyncio.to_thread(weights.wait)
    gone = asyncio.create_task(status_where(client, loader.node, lambda s: not s.segments))
    weights.close()
    await gone
    assert loader.memory() == 0


@pytest.mark.parametrize("loader_module", [slow_loader.MODULE])
async def test_disconnected_reader_cancels_its_load(loader: LoaderProcess, client: Client, tmp_path: Path) -> None:
    write_sparse_checkpoint(tmp_path / "m", 2 * GIB)
    weights = await asyncio.to_thread(attach, path_of(loader), source=str(tmp_path / "m"), timeout=60)
    assert not weights.complete
    gone = asyncio.create_task(status_where(client, loader.node, lambda s: not s.segments))
    weights.close()
    await gone
    assert loader.memory() == 0


async def test_watermarks_are_sent_while_bytes_arrive(loader: LoaderProcess, client: Client, tmp_path: Path) -> None:
    write_sparse_checkpoint(tmp_path / "m", GIB)
    weights = await asyncio.to_thread(attach, path_of(loader), source=str(tmp_path / "m"), timeout=60)
    seen = {weights.loaded_bytes}
    while not weights.complete:
        await asyncio.to_thread(weights.wait_until, weights.loaded_bytes + 1)
        seen.add(weights.loaded_bytes)
    assert any(0 < loaded_bytes < weights.total_bytes for loaded_bytes in seen)
    weights.close()


async def test_refused_requests_are_typed(loader: LoaderProcess, client: Client, tmp_path: Path) -> None:
    def ask(**what: str) -> None:
        attach(path_of(loader), timeout=60, **what)  # type: ignore[arg-type]  # either of two strings

    with pytest.raises(CheckpointInvalid, match="does not exist"):
        await asyncio.to_thread(ask, source="/nowhere")
    with pytest.raises(InvalidModel, match="absolute"):
        await asyncio.to_thread(ask, source="here")
    with pytest.raises(NotFound, match="Attach with their source"):
        await asyncio.to_thread(ask, weights_id="0" * 32)
    write_checkpoint(tmp_path / "m")
    card = await client.card(tmp_path / "m")
    await client.attach("i1", card)
    for line in (b"{}\n", b"garbage\n", b'{"kind": "attach", "source": "a", "weights_id": "b"}\n'):
        assert b'"invalid_request' in await asyncio.to_thread(raw, path_of(loader), line)
    assert await asyncio.to_thread(raw, path_of(loader), b"half a line") == b""
    assert loader.memory() > 0  # other holders' weights are untouched


def raw(path: Path, line: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        with short_address(path) as address:
            connection.connect(address)
        connection.sendall(line)
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as answer:
            return answer.read()


@pytest.mark.parametrize("loader_module", [slow_loader.MODULE])
async def test_stopped_loader_is_reported_to_readers(loader: LoaderProcess, client: Client, tmp_path: Path) -> None:
    write_sparse_checkpoint(tmp_path / "m", 3 * GIB)
    await client_card_of_sparse(client, tmp_path / "m")
    weights = await asyncio.to_thread(attach, path_of(loader), source=str(tmp_path / "m"), timeout=60)
    loader.end(signal.SIGKILL)
    with pytest.raises(Unreachable, match="ask again"):
        await asyncio.to_thread(weights.wait)
    weights.close()
    with pytest.raises(Unreachable, match="No loader listens"):
        await asyncio.to_thread(attach, path_of(loader), source=str(tmp_path / "m"))


def connected(path: Path) -> socket.socket:
    """Return a connection, once the loader listens: its file exists a moment before."""
    deadline = time.monotonic() + 60
    while True:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(60)
        try:
            with short_address(path) as address:
                connection.connect(address)
            return connection
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_messages_on_the_socket_follow_the_contract(loader: LoaderProcess, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m")
    with connected(path_of(loader)) as connection:
        connection.sendall(json.dumps({"kind": "attach", "source": str(tmp_path / "m")}).encode() + b"\n")
        lines = connection.makefile("rb")
        kinds = [json.loads(lines.readline())["kind"]]
        while kinds[-1] != "complete":
            kinds.append(json.loads(lines.readline())["kind"])
        assert kinds[0] == "attached"
        assert set(kinds[1:-1]) <= {"watermark"}
        lines.close()
