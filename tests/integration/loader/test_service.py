"""The loader process as its callers see it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from shared.contracts import subjects
from shared.contracts.loader import AttachWeights, WeightsAttached
from shared.contracts.phases import Phase
from shared.contracts.stages import split_layers
from shared.errors import (
    CheckpointInvalid,
    Conflict,
    InsufficientMemory,
    PayloadTooLarge,
    StaleToken,
    ThawError,
    UnsupportedArchitecture,
)
from tests.integration.loader.conftest import Client, LoaderProcess
from tests.integration.loader.sparse_models import GIB, client_card_of_sparse
from tests.integration.loader.statuses import status_where
from tests.support import slow_loader
from tests.unit.loader.checkpoints import CONFIG, tensors, write_checkpoint, write_sparse_checkpoint
from tests.unit.loader.segments import assert_same


async def test_weights_are_loaded_shared_and_freed(loader: LoaderProcess, client: Client, tmp_path: Path) -> None:
    weights = write_checkpoint(tmp_path / "m", tensors(megabytes=40), shards=2)
    card = await client.card(tmp_path / "m")
    assert loader.memory() == 0  # inspecting loads nothing
    await client.prepare("i1", card)
    index = await client.attach("i1", card, "index")
    first = await client.attach("i1", card)
    second = await client.attach("i2", card)
    assert index.extents == second.extents == first.extents != ()
    assert first.total_bytes == first.loaded_bytes == card.info.weights_bytes
    assert Path(first.directory) == tmp_path / "m"
    assert_same(first, weights)
    [load] = [s for s in first.phases if s.phase is Phase.LOAD]
    assert load.end_ms <= 0
    assert load.detail["bytes"] == first.total_bytes
    status = await status_where(client, loader.node, lambda s: bool(s.segments) and s.segments[0].holders == ("i1", "i2"))
    assert status.bytes_per_second is not None
    assert await client.release("i1") == 0
    assert await client.release("i2") == first.total_bytes
    assert loader.memory() == 0
    assert await client.release("i2") == 0


async def test_models_of_one_revision_share_a_segment(client: Client, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m")
    (tmp_path / "alias").symlink_to(tmp_path / "m")
    a = await client.attach("i1", await client.card(tmp_path / "m", "a"))
    b = await client.attach("i2", await client.card(tmp_path / "alias", "b"))
    assert a.extents == b.extents


async def test_a_released_instance_cannot_attach_again(client: Client, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m")
    card = await client.card(tmp_path / "m")
    await client.release("i1")  # arrived before its prepare
    with pytest.raises(StaleToken):
        await client.prepare("i1", card)
    with pytest.raises(StaleToken):
        await client.attach("i1", card)


async def test_an_old_leader_is_refused(client: Client, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m")
    card = await client.card(tmp_path / "m")
    await client.prepare("i1", card, token=(2 << 32) + 1)
    with pytest.raises(StaleToken):
        await client.prepare("i2", card, token=(1 << 32) + 9)


async def test_instance_may_hold_only_one_model(client: Client, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a")
    write_checkpoint(tmp_path / "b")
    await client.prepare("i1", await client.card(tmp_path / "a", "a"))
    with pytest.raises(Conflict, match="holds the weights of a"):
        await client.prepare("i1", await client.card(tmp_path / "b", "b"))


async def test_a_damaged_checkpoint_fails_all_waiters_and_may_be_retried(
    loader: LoaderProcess, client: Client, tmp_path: Path
) -> None:
    weights = write_checkpoint(tmp_path / "m")
    card = await client.card(tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    await client.prepare("i1", card)
    for until in ("index", "complete"):
        with pytest.raises(CheckpointInvalid, match=r"model\.safetensors is truncated"):
            await client.attach("i1", card, until)
    assert loader.memory() == 0
    file.write_bytes(whole)
    found = await client.attach("i2", card)  # a new start retries
    assert_same(found, weights)
    await client.release("i1")
    assert await client.release("i2") == found.total_bytes


async def test_a_grown_checkpoint_must_be_registered_again(client: Client, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m")
    card = await client.card(tmp_path / "m")
    write_checkpoint(tmp_path / "m", tensors(megabytes=1))
    with pytest.raises(CheckpointInvalid, match="Register it again"):
        await client.attach("i1", card)


async def test_too_large_for_shared_memory(loader: LoaderProcess, client: Client, tmp_path: Path) -> None:
    write_sparse_checkpoint(tmp_path / "m", 2**43)
    spec_card = await client_card_of_sparse(client, tmp_path / "m")
    with pytest.raises(InsufficientMemory, match="/dev/shm"):
        await client.attach("i1", spec_card)
    assert loader.memory() == 0


@pytest.mark.parametrize("loader_module", [slow_loader.MODULE])
async def test_the_last_release_calls_a_load_off(loader: LoaderProcess, client: Client, tmp_path: Path) -> None:
    write_sparse_checkpoint(tmp_path / "m", 2 * GIB)
    card = await client_card_of_sparse(client, tmp_path / "m")
    await client.attach("i1", card, "index")
    waiting = asyncio.create_task(client.attach("i1", card))
    await status_where(client, loader.node, lambda s: bool(s.segments) and 0 < s.segments[0].loaded_bytes < 2 * GIB)
    await client.release("i1")
    with pytest.raises(StaleToken):
        await waiting
    assert loader.memory() == 0


async def test_a_load_continues_after_a_waiter_s_deadline(client: Client, tmp_path: Path) -> None:
    write_sparse_checkpoint(tmp_path / "m", GIB // 2)
    card = await client_card_of_sparse(client, tmp_path / "m")
    await client.prepare("i1", card)
    with pytest.raises(ThawError, match=r"deadline|within"):
        await client.attach("i1", card, deadline_ms=1)
    found = await client.attach("i1", card)
    assert found.loaded_bytes == found.total_bytes
    assert await client.release("i1") == found.total_bytes


async def test_inspection_errors_are_typed(client: Client, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", config={**CONFIG, "architectures": ["T5ForConditionalGeneration"], "model_type": "t5"})
    with pytest.raises(UnsupportedArchitecture, match="T5ForConditionalGeneration"):
        await client.card(tmp_path / "m")
    with pytest.raises(CheckpointInvalid, match="does not exist"):
        await client.card(tmp_path / "none")


@pytest.mark.parametrize("loader_module", [slow_loader.MODULE])
async def test_restarted_loader_adopts_held_segments_after_sigkill(loader: LoaderProcess, client: Client, tmp_path: Path) -> None:
    weights = write_checkpoint(tmp_path / "m")
    write_sparse_checkpoint(tmp_path / "big", 3 * GIB)
    held = await client.attach("i1", await client.card(tmp_path / "m"))
    big = await client_card_of_sparse(client, tmp_path / "big")
    half = await client.attach("i2", big, "index")
    loader.end(signal.SIGKILL)
    assert half.extents != held.extents
    loader.start()
    await client.until_served(loader)
    assert loader.memory() == held.total_bytes
    again = await client.attach("i3", await client.card(tmp_path / "m"))
    assert again.extents == held.extents
    assert_same(again, weights)
    await client.release("i3")
    assert await client.release("i1") == held.total_bytes


@pytest.mark.parametrize("loader_module", [slow_loader.MODULE])
async def test_clean_shutdown_keeps_only_held_segments(loader: LoaderProcess, client: Client, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m")
    write_sparse_checkpoint(tmp_path / "big", 3 * GIB)
    held = await client.attach("i1", await client.card(tmp_path / "m"))
    big = await client_card_of_sparse(client, tmp_path / "big")
    await client.attach("i2", big, "index")
    waiting = asyncio.create_task(client.attach("i2", big))
    await status_where(client, loader.node, lambda s: any(0 < e.loaded_bytes < e.total_bytes for e in s.segments))
    assert loader.end() == 0
    with pytest.raises(ThawError, match="shutting down"):
        await waiting
    assert loader.memory() == held.total_bytes


def test_waiting_for_nats_can_be_stopped(tmp_path: Path) -> None:
    process = LoaderProcess("nats://127.0.0.1:1", tmp_path, "alone")
    process.start()
    deadline = time.monotonic() + 60
    while not (tmp_path / "nodes" / "alone" / "loader" / "lock").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert process.end() == 0


async def test_second_loader_of_a_node_exits(loader: LoaderProcess, client: Client) -> None:
    second = LoaderProcess(loader.environment["THAW_NATS_URL"], loader.home, loader.node)
    second.start()
    assert second.process is not None
    assert second.process.wait(60) == 1
    assert "Another loader runs" in loader.log.read_text()


async def test_overwritten_directory_must_be_registered_again(client: Client, tmp_path: Path) -> None:
    """A directory that was overwritten is another model.

    Size and header are the same, as of a fine-tune saved in the same place. Cached and resident
    copies are of the old version.
    """
    old = write_checkpoint(tmp_path / "m", tensors(megabytes=2))
    card = await client.card(tmp_path / "m")
    assert_same(await client.attach("i1", card), old)
    await client.release("i1")
    new = {name: np.asarray(values + 1) for name, values in old.items()}
    write_checkpoint(tmp_path / "m", new)
    with pytest.raises(CheckpointInvalid, match=r"have changed since they were first loaded; register it again"):
        await client.attach("i2", card)
    await client.release("i2")
    assert_same(await client.attach("i3", await client.card(tmp_path / "m")), new)


async def test_unregistered_node_accepts_its_own_copy(client: Client, tmp_path: Path) -> None:
    """A node that did not register a model accepts its own copy.

    Files copied to each node by hand differ in their times. A node keeps to the first version it
    saw.
    """
    write_checkpoint(tmp_path / "m", tensors(megabytes=2))
    card = await client.card(tmp_path / "m")
    elsewhere = card.model_copy(update={"info": card.info.model_copy(update={"revision": "registered-at-another-node"})})
    await client.attach("i1", elsewhere)
    await client.release("i1")
    await client.attach("i2", elsewhere)
    await client.release("i2")
    os.utime(tmp_path / "m" / "model.safetensors", ns=(1, 1))
    with pytest.raises(CheckpointInvalid, match=r"weights in .* have changed since"):
        await client.attach("i3", elsewhere)


async def test_a_hostile_name_does_not_make_an_answer_too_long_to_be_sent(client: Client, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m")
    header = json.dumps({"a": {"dtype": "x" * 20_000_000, "shape": [1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "m" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"1234")
    with pytest.raises(
        CheckpointInvalid, match=r"model\.safetensors gives tensor 'a' the unknown dtype 'xxx.* known are"
    ) as caught:
        await client.card(tmp_path / "m")
    assert len(caught.value.message) < 10_000


async def test_model_description_over_the_message_limit_is_refused(client: Client, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m")
    empty = {"dtype": "F32", "shape": [0, 1], "data_offsets": [0, 0]}
    header = json.dumps({f"x{number:x}{'y' * 900}.weight": empty for number in range(10_000)}).encode()
    (tmp_path / "m" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(PayloadTooLarge, match=r"The answer .* would have \d+ bytes"):
        await client.card(tmp_path / "m")


async def test_stages_load_only_their_parts_as_entries_of_their_own(loader: LoaderProcess, client: Client, tmp_path: Path) -> None:
    weights = write_checkpoint(tmp_path / "m", tensors(megabytes=30))
    card = await client.card(tmp_path / "m")
    found = []
    for number, layers in enumerate(split_layers(3, 2)):
        request = AttachWeights(instance_id=f"s{number}", card=card, until="complete", layers=layers)
        found.append(await client.mesh.request(subjects.loader_command(loader.node), request, WeightsAttached))
    first, last = found
    assert first.weights_id != last.weights_id
    assert_same(first, {n: w for n, w in weights.items() if n in ("layers.0.weight", "layers.1.weight")})
    assert_same(last, {n: w for n, w in weights.items() if n not in ("layers.0.weight", "layers.1.weight")})
    assert loader.memory() == first.total_bytes + last.total_bytes < card.info.weights_bytes * 1.01
    with pytest.raises(Conflict):
        await client.attach("s0", card)
    whole = await client.attach("i1", card)
    assert_same(whole, weights)
    assert await client.release("s0") == first.total_bytes
    assert await client.release("s1") == last.total_bytes
    assert loader.memory() == whole.total_bytes
