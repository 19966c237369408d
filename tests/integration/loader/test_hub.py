"""`hf://` sources against a server that imitates the hub."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.loader.tiers.port import Cancelled
from services.loader.adapters.source import source_of
from shared.contracts.models import ModelInfo
from shared.errors import CheckpointInvalid, InvalidModel, StaleToken, ThawError, Unavailable
from tests.integration.loader.conftest import Client, LoaderProcess
from tests.integration.loader.fake_hub import COMMIT, FakeHub
from tests.support.servers import NatsServer
from tests.unit.loader.checkpoints import tensors, write_checkpoint
from tests.unit.loader.segments import assert_same

SOURCE = "hf://org/model"
PINNED = f"{SOURCE}@{COMMIT}"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    from huggingface_hub import constants

    write_checkpoint(tmp_path / "repo", tensors(megabytes=30), shards=2)
    (tmp_path / "repo" / "README.md").write_text("not wanted")
    (tmp_path / "repo" / "consolidated.safetensors").write_text("not wanted")
    (tmp_path / "repo" / "code.py").write_text("raise SystemExit")
    server = FakeHub(tmp_path / "repo")
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    # The library reads its variables when it is imported; a loader process has them from its start.
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf" / "token"))
    yield server
    server.close()


def inspect(source: str = SOURCE) -> ModelInfo:
    return source_of(source).inspect(trust_remote_code=False)


def fetch(source: str = PINNED, told: list[int] | None = None, cancelled: threading.Event | None = None) -> Path:
    return source_of(source).fetch(
        (told if told is not None else []).append, cancelled or threading.Event(), trust_remote_code=False
    )


@pytest.mark.parametrize("ranges", [True, False])
def test_inspecting_takes_headers_only(hub: FakeHub, ranges: bool) -> None:
    hub.ranges = ranges
    found = inspect()
    assert found.source == PINNED
    assert found.files == 2
    assert found.has_chat_template
    assert all(sent < 10_000_000 for name, sent in hub.sent.items() if name.endswith(".safetensors")), hub.sent
    assert not {"README.md", "consolidated.safetensors", "code.py"} & hub.sent.keys()
    assert inspect(f"{SOURCE}@main") == found


def test_a_directory_of_the_same_files_takes_as_many_bytes(hub: FakeHub) -> None:
    copy = hub.directory.parent / "copy"
    write_checkpoint(copy, tensors(megabytes=30), shards=2)
    assert inspect(str(copy)).weights_bytes == inspect().weights_bytes


def test_fetching_brings_the_wanted_files_once(hub: FakeHub) -> None:
    told: list[int] = []
    directory = fetch(told=told)
    names = {p.name for p in directory.iterdir()}
    assert {"config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"} <= names
    assert not {"README.md", "consolidated.safetensors", "code.py"} & names
    assert told == sorted(told)
    assert told[-1] >= 30_000_000 * 0.9
    hub.sent.clear()
    assert fetch() == directory
    assert not hub.sent
    assert inspect(str(directory)).files == 2


def test_own_code_comes_only_if_trusted(hub: FakeHub) -> None:
    directory = source_of(PINNED).fetch(lambda _: None, threading.Event(), trust_remote_code=True)
    assert (directory / "code.py").exists()


def test_without_a_network_the_cache_serves(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    found = inspect()
    directory = fetch()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        assert inspect() == found
        assert fetch() == directory
        with pytest.raises(Unavailable, match="HF_ENDPOINT"):
            inspect("hf://org/other")


def test_offline(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(Unavailable, match="HF_HUB_OFFLINE is set"):
        inspect()
    monkeypatch.delenv("HF_HUB_OFFLINE")
    found = inspect()
    fetch()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.requests.clear()
    assert inspect() == found
    assert fetch().name == COMMIT
    assert hub.requests == []


def test_offline_with_the_small_files_only(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    inspect()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(Unavailable, match="not \\(whole\\)"):
        fetch()


@pytest.mark.parametrize(
    ("status", "code", "error", "said"),
    [
        (401, "RepoNotFound", InvalidModel, "no such repository"),
        (404, "RepoNotFound", InvalidModel, "no such repository"),
        (403, "GatedRepo", InvalidModel, "accept its terms"),
        (401, "", InvalidModel, "HF_TOKEN"),
        (403, "", InvalidModel, "HF_TOKEN"),
        (503, "", Unavailable, "503"),
    ],
)
def test_refusals_are_typed(hub: FakeHub, status: int, code: str, error: type[ThawError], said: str) -> None:
    hub.status, hub.error_code = status, code
    with pytest.raises(error, match=said):
        inspect()


def test_an_unknown_revision(hub: FakeHub) -> None:
    with pytest.raises(InvalidModel, match="no such revision"):
        inspect(f"{SOURCE}@v9")


def test_the_token_opens_gated_models(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_secret"
    with pytest.raises(InvalidModel, match="gated") as caught:
        inspect()
    assert "hf_secret" not in caught.value.message
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert inspect().files == 2


def test_a_missing_shard(hub: FakeHub) -> None:
    (hub.directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointInvalid, match=r"model-00002-of-00002\.safetensors is named by .* but missing"):
        inspect()


def test_a_lying_remote_header(hub: FakeHub) -> None:
    path = hub.directory / "model-00001-of-00002.safetensors"
    path.write_bytes((1 << 50).to_bytes(8, "little") + b"x" * 100)
    with pytest.raises(CheckpointInvalid, match="claims a header"):
        inspect()


def test_a_full_disk(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def full(*_: object, **__: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(Unavailable, match="HF_HOME"):
        fetch()


def test_a_download_is_called_off(hub: FakeHub) -> None:
    cancelled = threading.Event()
    with pytest.raises(Cancelled):
        source_of(PINNED).fetch(lambda _: cancelled.set(), cancelled, trust_remote_code=False)
    assert not list(hub.directory.parent.glob("hf/hub/*/snapshots/*/*.safetensors"))
    assert fetch().name == COMMIT  # and goes on later


async def test_from_the_hub_into_shared_memory(hub: FakeHub, nats_server: NatsServer, tmp_path: Path, client: Client) -> None:
    process = LoaderProcess(nats_server.url, tmp_path / "home2", "hub-node")
    process.home.mkdir()
    process.environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf2")}
    process.start()
    try:
        asker = Client(client.mesh, "hub-node")
        await asker.until_served()
        card = await asker.card(SOURCE)
        hub.hold_after = 12 * 1024 * 1024
        waiting = asyncio.create_task(asker.attach("i0", card, "index"))
        assert await asyncio.to_thread(hub.holding.wait, 20)
        assert await asker.release("i0") == 0  # at once, though the download hangs
        with pytest.raises(StaleToken):
            await waiting
        hub.hold_after = None
        hub.let_go.set()
        found = await asker.attach("i1", card)
        assert_same(found.segment, tensors(megabytes=30))
        assert [p.phase for p in found.phases] == ["fetch", "load"]
        assert await asker.release("i1") == found.total_bytes
    finally:
        process.close()
