"""A converted model in the loader process: registered, loaded, shared, verified."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared.errors import CheckpointInvalid
from tests.integration.loader.conftest import Client, LoaderProcess
from tests.integration.loader.conversion import convert
from tests.integration.loader.statuses import status_where
from tests.integration.loader.tiers_server import TierServer
from tests.unit.loader.checkpoints import tensors, write_checkpoint
from tests.unit.loader.segments import assert_same
from weights.load import measure


async def test_a_converted_model_is_served_like_any_other(loader: LoaderProcess, client: Client, tmp_path: Path) -> None:
    weights = write_checkpoint(tmp_path / "m", tensors(megabytes=40), shards=2)
    convert(tmp_path / "m", tmp_path / "out", "--verify")
    card = await client.card(tmp_path / "out")
    attached = await client.attach("i1", card)
    assert attached.total_bytes == card.info.weights_bytes
    assert_same(attached, weights)
    assert await client.release("i1") == attached.total_bytes
    assert loader.memory() == 0


async def test_damaged_model_is_neither_registered_nor_loaded(loader: LoaderProcess, client: Client, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "out")
    card = await client.card(tmp_path / "out")
    os.truncate(tmp_path / "out" / "weights-00000-of-00001.thaw", 4096)
    with pytest.raises(CheckpointInvalid, match="has 4096 bytes instead of"):
        await client.attach("i1", card)
    (tmp_path / "out" / "thaw.index.json").write_text("{}")
    with pytest.raises(CheckpointInvalid, match="no valid index"):
        await client.card(tmp_path / "out")
    assert loader.memory() == 0


async def test_flipped_bits_are_found_if_verification_is_enabled(loader: LoaderProcess, client: Client, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", tensors(megabytes=20))
    convert(tmp_path / "m", tmp_path / "out")
    assert measure(tmp_path / "out", 2, verify=True)["verified_bytes"] > 19_000_000
    with pytest.raises(CheckpointInvalid, match="carry hashes; thaw convert"):
        measure(tmp_path / "m", 2, verify=True)
    with (tmp_path / "out" / "weights-00000-of-00001.thaw").open("r+b") as file:
        file.seek(18_000_000)
        [old] = file.read(1)
        file.seek(18_000_000)
        file.write(bytes([old ^ 1]))
    with pytest.raises(CheckpointInvalid, match="not those that were converted"):
        measure(tmp_path / "out", 2, verify=True)
    loader.end()
    loader.environment["THAW_VERIFY"] = "true"
    loader.start()
    await client.until_served(loader)
    with pytest.raises(CheckpointInvalid, match="not those that were converted"):
        await client.attach("i1", await client.card(tmp_path / "out"))
    await client.release("i1")
    await status_where(client, loader.node, lambda status: not status.segments and loader.memory() == 0)


def test_damage_during_a_fetch_is_reported_with_its_source(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m")
    (tmp_path / "www").mkdir()
    convert(tmp_path / "m", tmp_path / "www" / "out")
    with (tmp_path / "www" / "out" / "weights-00000-of-00001.thaw").open("r+b") as file:
        file.write(b"x")
    server = TierServer(tmp_path / "www")
    try:
        with pytest.raises(CheckpointInvalid, match=rf"{server.url}/out/weights-00000-of-00001\.thaw: the bytes of tensor"):
            measure(f"{server.url}/out", 2, verify=True)
    finally:
        server.close()


async def test_pickles_are_sent_to_the_converter(client: Client, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").rename(tmp_path / "m" / "pytorch_model.bin")
    with pytest.raises(CheckpointInvalid, match="thaw convert"):
        await client.card(tmp_path / "m")
