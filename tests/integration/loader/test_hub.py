"""`hf://` sources against a server that imitates the hub."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.contracts.model_info import ModelInfo
from shared.errors import CheckpointInvalid, InvalidModel, StaleToken, ThawError, Unavailable
from tests.integration.loader.conftest import Client, LoaderProcess
from tests.integration.loader.fake_hub import COMMIT, FakeHub
from tests.integration.loader.tiers_server import TierServer
from tests.support.servers import NatsServer
from tests.support.sources import sources_at
from tests.unit.loader.checkpoints import tensors, write_checkpoint
from tests.unit.loader.segments import assert_same
from weights.sources.sources import Sources

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


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    return sources_at(tmp_path / "home")


def inspect(sources: Sources, source: str = SOURCE) -> ModelInfo:
    return sources.inspect(source, trust_remote_code=False)


def fetch(sources: Sources, revision: str, source: str = PINNED, *, trust: bool = False) -> Path:
    """Cache all files; return the directory of the small ones."""
    tier = sources.open(source, revision)
    try:
        directory = sources.small_files(tier, trust_remote_code=trust)
        if tier.directory is None:
            for file in tier.files():
                if file.name.endswith(".safetensors"):
                    tier.read(file, 0, memoryview(bytearray(file.size)))
            tier.finish()
            assert tier.get_settled_event().wait(60)
        return directory
    finally:
        tier.close()


@pytest.mark.parametrize("ranges", [True, False])
def test_inspection_fetches_only_headers(hub: FakeHub, sources: Sources, ranges: bool) -> None:
    hub.ranges = ranges
    found = inspect(sources)
    assert found.source == PINNED
    assert found.files == 2
    assert found.has_chat_template
    assert all(sent < 10_000_000 for name, sent in hub.sent.items() if name.endswith(".safetensors")), hub.sent
    assert not {"README.md", "consolidated.safetensors", "code.py"} & hub.sent.keys()
    assert inspect(sources, f"{SOURCE}@main") == found


def test_directory_of_the_same_files_has_the_same_weights_size(hub: FakeHub, sources: Sources) -> None:
    copy = hub.directory.parent / "copy"
    write_checkpoint(copy, tensors(megabytes=30), shards=2)
    assert inspect(sources, str(copy)).weights_bytes == inspect(sources).weights_bytes


def test_files_to_load_are_fetched_once(hub: FakeHub, sources: Sources) -> None:
    revision = inspect(sources).revision
    directory = fetch(sources, revision)
    names = {p.name for p in directory.iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= names
    assert not {"README.md", "consolidated.safetensors", "code.py"} & names
    hub.requests.clear()
    assert fetch(sources, revision) == directory, "small files outlive the cached copy"
    assert hub.requests == [], "not even the hub's API is asked"
    with sources.open_complete(revision) as found:
        assert found is not None
        assert inspect(sources, str(found[0])).files == 2


def test_remote_code_is_fetched_only_if_trusted(hub: FakeHub, sources: Sources) -> None:
    revision = inspect(sources).revision
    tier = sources.open(PINNED, revision)
    assert not (sources.small_files(tier, trust_remote_code=False) / "code.py").exists()
    assert (sources.small_files(tier, trust_remote_code=True) / "code.py").exists()
    tier.close()


def test_wrong_bytes_are_noticed_by_the_hubs_checksum(hub: FakeHub, sources: Sources) -> None:
    revision = inspect(sources).revision
    hub.damage = True
    with pytest.raises(CheckpointInvalid, match=r"model-0000\d-of-00002\.safetensors has the sha256"):
        fetch(sources, revision)
    hub.damage = False
    fetch(sources, revision)


def test_without_a_network_the_cache_serves(hub: FakeHub, sources: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    found = inspect(sources)
    fetch(sources, found.revision)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        assert inspect(sources) == found
        fetch(sources, found.revision)
        with pytest.raises(Unavailable, match="HF_ENDPOINT"):
            inspect(sources, "hf://org/other")


def test_offline_mode_uses_only_fetched_files(hub: FakeHub, sources: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(Unavailable, match="HF_HUB_OFFLINE is set"):
        inspect(sources)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    found = inspect(sources)
    fetch(sources, found.revision)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.requests.clear()
    assert inspect(sources) == found
    fetch(sources, found.revision)
    assert hub.requests == []


def test_offline_with_the_small_files_only(hub: FakeHub, sources: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    revision = inspect(sources).revision
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(Unavailable, match="is not complete"):
        fetch(sources, revision)


def test_cache_of_the_hub_library_is_used(hub: FakeHub, sources: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import snapshot_download

    found = inspect(sources)
    directory = Path(snapshot_download("org/model", endpoint=hub.url))
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert inspect(sources).weights_bytes == found.weights_bytes
    tier = sources.open(PINNED, found.revision)
    assert tier.directory == directory
    tier.close()
    assert hub.requests == []


@pytest.mark.parametrize(
    ("status", "code", "error", "message"),
    [
        (401, "RepoNotFound", InvalidModel, "no such repository"),
        (404, "RepoNotFound", InvalidModel, "no such repository"),
        (403, "GatedRepo", InvalidModel, "accept its terms"),
        (401, "", InvalidModel, "HF_TOKEN"),
        (403, "", InvalidModel, "HF_TOKEN"),
        (503, "", Unavailable, "503"),
    ],
)
def test_hub_refusals_are_typed(
    hub: FakeHub, sources: Sources, status: int, code: str, error: type[ThawError], message: str
) -> None:
    hub.status, hub.error_code = status, code
    with pytest.raises(error, match=message):
        inspect(sources)


def test_hub_that_never_answers_is_given_up(sources: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weights.tiers.hub._ANSWER_S", 0.2)
    found: list[Exception] = []

    def ask() -> None:
        try:
            inspect(sources)
        except Unavailable as e:
            found.append(e)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(60)
    assert len(found) == 1


@pytest.mark.parametrize("body", [b"<html>Log in</html>", b"[]", b"{}", b'{"id": "org/model"}'])
def test_answers_of_what_is_no_hub_are_reported(
    tmp_path: Path, sources: Sources, monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    with contextlib.closing(TierServer(tmp_path)) as portal:
        portal.contents["/api/models/org/model"] = body
        monkeypatch.setenv("HF_ENDPOINT", portal.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        with pytest.raises(Unavailable, match="HF_ENDPOINT"):
            inspect(sources)


def test_unknown_revision_is_refused(hub: FakeHub, sources: Sources) -> None:
    with pytest.raises(InvalidModel, match="no such revision"):
        inspect(sources, f"{SOURCE}@v9")


def test_the_token_opens_gated_models(hub: FakeHub, sources: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_secret"
    with pytest.raises(InvalidModel, match="gated") as caught:
        inspect(sources)
    assert "hf_secret" not in caught.value.message
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert inspect(sources).files == 2


def test_missing_shard_is_named(hub: FakeHub, sources: Sources) -> None:
    (hub.directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointInvalid, match=r"model-00002-of-00002\.safetensors is named by .* but missing"):
        inspect(sources)


def test_a_lying_remote_header(hub: FakeHub, sources: Sources) -> None:
    path = hub.directory / "model-00001-of-00002.safetensors"
    path.write_bytes((1 << 50).to_bytes(8, "little") + b"x" * 100)
    with pytest.raises(CheckpointInvalid, match="claims a header"):
        inspect(sources)


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
        indexed = await asker.attach("i0", card, "index")
        assert indexed.total_bytes == card.info.weights_bytes
        waiting = asyncio.create_task(asker.attach("i0", card))
        assert await asyncio.to_thread(hub.holding.wait, 60)
        await asker.release("i0")  # at once, though the download hangs
        with pytest.raises(StaleToken):
            await waiting
        hub.hold_after = None
        hub.unblocked.set()
        found = await asker.attach("i1", card)
        assert_same(found, tensors(megabytes=30))
        assert [p.phase for p in found.phases] == ["fetch"]
        assert (Path(found.directory) / "config.json").exists()
        await asker.release("i1")
    finally:
        process.close()
