"""Models from another node's loader.

Peers are preferred, refuse requests without the token, and are replaced by the source if they fail.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path

import pytest

from services.loader.adapters.peer_server import PeerServer
from shared.contracts.loader import CachedModel, LoaderStatus
from shared.errors import CheckpointInvalid
from tests.integration.loader.cached_loads import load, settle
from tests.integration.loader.checksums import write_sums
from tests.integration.loader.conftest import Client, LoaderProcess
from tests.integration.loader.statuses import status_where
from tests.integration.loader.tiers_server import TierServer
from tests.support import patient_loader
from tests.support.servers import NatsServer
from tests.support.sources import sources_at
from tests.unit.loader.checkpoints import tensors, write_checkpoint
from tests.unit.loader.segments import assert_same
from weights.cache.caching import CachingTier
from weights.sources import sources as sources_module
from weights.sources.failover import FailoverTier, SourcePlace
from weights.sources.open import open_source
from weights.sources.peer import PeerTier
from weights.sources.peers import Peers
from weights.sources.sources import Sources
from weights.tiers.http import HttpTier
from weights.tiers.http_client import HttpClient
from weights.tiers.port import Tier, TierFile

SHARD = "model-00001-of-00002.safetensors"
OTHER = "other-node"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TierServer]:
    write_checkpoint(tmp_path / "www" / "m", tensors(megabytes=4), shards=2)
    write_sums(tmp_path / "www" / "m")
    server = TierServer(tmp_path / "www")
    yield server
    server.close()


@pytest.fixture
def theirs(server: TierServer, tmp_path: Path) -> Iterator[tuple[Sources, PeerServer, str]]:
    """Start a peer node that has the model; return it, its server, and the revision."""
    sources = sources_at(tmp_path / "theirs")
    info = sources.inspect(f"{server.url}/m", trust_remote_code=False)
    tier = sources.open(info.source, info.revision)
    load(tier)
    settle(tier)
    serving = PeerServer("127.0.0.1", 0, sources.open_complete)
    yield sources, serving, info.revision
    serving.close()
    assert not [t for t in threading.enumerate() if t.name == "peers"]


async def known(serving: PeerServer, revision: str, token: str | None = None, *, nodes: Sequence[str] = ("there",)) -> Peers:
    peers = Peers("here")
    cached = (CachedModel(weights_id=revision, tier="ssd", nbytes=1),)
    for node in nodes:
        status = LoaderStatus(node=node, boot_id="b", cached=cached, peer_url=serving.url, peer_token=token or serving.token)
        await peers.on_status(status)
    return peers


async def test_peer_is_preferred_over_the_source(
    server: TierServer, theirs: tuple[Sources, PeerServer, str], tmp_path: Path
) -> None:
    _, serving, revision = theirs
    ours = sources_at(tmp_path / "ours", peers=await known(serving, revision))
    server.requests.clear()
    tier = ours.open(f"{server.url}/m", revision)
    assert tier.link == "peer:there"
    assert load(tier)[SHARD] == (server.directory / "m" / SHARD).read_bytes()
    settle(tier)
    assert not [r for r in server.asked(SHARD) if int(r.headers["Range"].split("-")[1]) > 100_000], "probes only"
    assert ours.cache.lookup(revision) is not None


async def test_peers_are_contacted_without_the_configured_proxy(
    server: TierServer, theirs: tuple[Sources, PeerServer, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, serving, revision = theirs
    ours = sources_at(tmp_path / "ours", peers=await known(serving, revision))
    monkeypatch.setenv("http_proxy", server.url)
    monkeypatch.delenv("no_proxy", raising=False)
    server.requests.clear()
    tier = ours.open(f"{server.url}/m", revision)
    assert tier.link == "peer:there"
    assert load(tier)[SHARD] == (server.directory / "m" / SHARD).read_bytes()
    settle(tier)
    assert not [r for r in server.requests if "Authorization" in r.headers], "nor is the token sent to it"


async def test_peer_replaces_an_unavailable_source(
    server: TierServer, theirs: tuple[Sources, PeerServer, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, serving, revision = theirs
    monkeypatch.setattr("weights.tiers.retry.Backoff.pause", lambda *_: None)
    server.faults.suffix, server.faults.status = "", 503
    ours = sources_at(tmp_path / "ours", peers=await known(serving, revision))
    tier = ours.open(f"{server.url}/m", revision)
    assert load(tier)[SHARD] == (server.directory / "m" / SHARD).read_bytes()
    settle(tier)


async def test_peer_replaces_a_source_that_does_not_answer(
    server: TierServer, theirs: tuple[Sources, PeerServer, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host drops packets: an attempt to connect takes ten seconds, and there are several."""
    _, serving, revision = theirs
    answers, closed, close = threading.Event(), threading.Event(), HttpTier.close

    def hang(source: str) -> Tier:
        answers.wait(60)
        return open_source(source)

    def close_and_note(tier: HttpTier) -> None:
        close(tier)
        closed.set()

    monkeypatch.setattr(sources_module, "_SOURCE_S", 0.05)
    monkeypatch.setattr(sources_module, "open_source", hang)
    ours = sources_at(tmp_path / "ours", peers=await known(serving, revision))
    tier = ours.open(f"{server.url}/m", revision)
    assert not answers.is_set()
    assert tier.link == "peer:there"
    assert load(tier)[SHARD] == (server.directory / "m" / SHARD).read_bytes()
    settle(tier)
    monkeypatch.setattr(HttpTier, "close", close_and_note)
    answers.set()
    assert await asyncio.to_thread(closed.wait, 60), "the late source is not left open"


async def test_peer_that_does_not_answer_is_not_waited_for_beside_one_that_does(
    server: TierServer, theirs: tuple[Sources, PeerServer, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the source nor the first peer answers."""
    _, serving, revision = theirs
    answers, list_files = threading.Event(), PeerTier.files

    def hang(source: str) -> Tier:
        answers.wait(60)
        return open_source(source)

    def list_late(tier: PeerTier) -> Sequence[TierFile]:
        if tier.node == "silent":
            answers.wait(60)
        return list_files(tier)

    monkeypatch.setattr(sources_module, "_SOURCE_S", 0.05)
    monkeypatch.setattr(sources_module, "_PEER_S", 0.05)
    monkeypatch.setattr(sources_module, "open_source", hang)
    monkeypatch.setattr(PeerTier, "files", list_late)
    peers = await known(serving, revision, nodes=("there", "silent"))
    opening = asyncio.create_task(asyncio.to_thread(sources_at(tmp_path / "ours", peers=peers).open, f"{server.url}/m", revision))
    try:
        tier = await asyncio.wait_for(asyncio.shield(opening), 30)
        assert tier.link == "peer:there"
        tier.close()
    finally:
        answers.set()
        await opening
        for thread in threading.enumerate():
            if thread.name in ("list-source", "list-silent"):
                await asyncio.to_thread(thread.join, 60)


async def test_source_replaces_a_peer_that_fails_during_the_read(
    server: TierServer, theirs: tuple[Sources, PeerServer, str], tmp_path: Path
) -> None:
    _, serving, revision = theirs
    ours = sources_at(tmp_path / "ours", peers=await known(serving, revision))
    tier = ours.open(f"{server.url}/m", revision)
    file = next(f for f in tier.files() if f.name == SHARD)
    data = bytearray(file.size)
    tier.read(file, 0, memoryview(data)[:500_000])
    serving.close()
    tier.read(file, 500_000, memoryview(data)[500_000:])
    assert bytes(data) == (server.directory / "m" / SHARD).read_bytes()
    assert isinstance(tier, CachingTier)
    assert tier.inner.link.startswith("remote:")
    tier.close()


async def test_peer_that_sent_wrong_bytes_is_not_used_again(
    server: TierServer, theirs: tuple[Sources, PeerServer, str], tmp_path: Path
) -> None:
    sources, serving, revision = theirs
    directory = sources.cache.lookup(revision)
    assert directory is not None
    with (directory / SHARD).open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    ours = sources_at(tmp_path / "ours", peers=await known(serving, revision))
    tier = ours.open(f"{server.url}/m", revision)
    load(tier)
    with pytest.raises(CheckpointInvalid, match="sha256"):
        tier.finish()
    tier.close()
    tier = ours.open(f"{server.url}/m", revision)
    assert tier.link.startswith("remote:")
    load(tier)
    settle(tier)


def test_peer_serves_nothing_without_the_token(theirs: tuple[Sources, PeerServer, str]) -> None:
    _, serving, revision = theirs
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"bearer {serving.token}"}):
        client = HttpClient(headers)
        for path in (f"/models/{revision}", f"/models/{revision}/config.json", "/"):
            with client.get(serving.url + path) as answer:
                assert answer.status == HTTPStatus.UNAUTHORIZED
        client.close()


@pytest.mark.parametrize(
    "path",
    [
        "/", "/models", "/models/..", "/models/{r}/../../x", "/models/{r}/..%2f..%2fsecret", "/models/{r}/%2e%2e/secret", "/models/{r}//etc/passwd",
        "/models/{r}/entry.json", "/models/{r}/", "/models/{r}/nothing", "/models/0123456789abcdef", "/models/{r}/config.json/x",
        "/models/{r}/\\..\\x",
    ],
)  # fmt: skip
def test_peer_serves_only_listed_files(theirs: tuple[Sources, PeerServer, str], path: str) -> None:
    _, serving, revision = theirs
    client = HttpClient({"Authorization": f"Bearer {serving.token}"})
    with client.get(serving.url + path.format(r=revision)) as answer:
        assert answer.status == HTTPStatus.NOT_FOUND
    client.close()


def test_ranges_of_a_peer(theirs: tuple[Sources, PeerServer, str], server: TierServer) -> None:
    _, serving, revision = theirs
    content = (server.directory / "m" / SHARD).read_bytes()
    client = HttpClient({"Authorization": f"Bearer {serving.token}"})
    url = f"{serving.url}/models/{revision}/{SHARD}"
    for asked, found in (("bytes=10-19", content[10:20]), (f"bytes={len(content) - 5}-", content[-5:]), ("bytes=0-0", content[:1])):
        with client.get(url, {"Range": asked}) as answer:
            assert (answer.status, answer.read(1 << 30)) == (HTTPStatus.PARTIAL_CONTENT, found)
    with client.get(url, {"Range": f"bytes={len(content)}-"}) as answer:
        assert answer.status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
    with client.get(url) as answer:
        assert (answer.status, answer.read(1 << 30)) == (HTTPStatus.OK, content)
    client.close()


def test_directory_is_served_only_while_unchanged(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m")
    sources = sources_at(tmp_path / "home")
    revision = sources.inspect(str(tmp_path / "m"), trust_remote_code=False).revision
    with sources.open_complete(revision) as found:
        assert found is not None
        assert found[0] == tmp_path / "m"
    write_checkpoint(tmp_path / "m", tensors(seed=1))
    with sources.open_complete(revision) as found:
        assert found is None


@asynccontextmanager
async def second_node(client: Client, nats_server: NatsServer, home: Path) -> AsyncIterator[Client]:
    """Start the loader of another node, and return a client of it."""
    other = LoaderProcess(nats_server.url, home, OTHER)
    other.module = patient_loader.MODULE
    other.home.mkdir()
    other.start()
    try:
        asker = Client(client.mesh, other.node)
        await asker.until_served()
        yield asker
    finally:
        other.close()


async def test_second_node_loads_from_the_first(
    loader: LoaderProcess, client: Client, nats_server: NatsServer, server: TierServer, tmp_path: Path
) -> None:
    card = await client.card(f"{server.url}/m")
    await client.attach("a1", card)
    await status_where(client, loader.node, lambda s: any(c.tier == "ssd" for c in s.cached) and s.peer_url is not None)
    async with second_node(client, nats_server, tmp_path / "other") as asker:
        # The second status of each shows that both have received the other's.
        for _ in range(2):
            await status_where(asker, loader.node, lambda s: True)
        server.requests.clear()
        found = await asker.attach("b1", card)
        await asyncio.to_thread(assert_same, found, tensors(megabytes=4))
        assert not [r for r in server.asked(SHARD) if int(r.headers["Range"].split("-")[1]) > 100_000]
        status = await status_where(asker, OTHER, lambda s: any(link.link.startswith("peer:") for link in s.links))
        assert all(not link.link.startswith("remote:") for link in status.links)
        await asker.release("b1")


async def test_second_node_loads_from_the_memory_of_the_first(
    loader: LoaderProcess, client: Client, nats_server: NatsServer, server: TierServer, tmp_path: Path
) -> None:
    loader.end()
    loader.environment["THAW_CACHE_BYTES"] = "0"
    loader.start()
    await client.until_served(loader)
    card = await client.card(f"{server.url}/m")
    await client.attach("a1", card)
    async with second_node(client, nats_server, tmp_path / "other") as asker:
        for _ in range(2):
            status = await status_where(asker, loader.node, lambda s: any(x.loaded_bytes == x.total_bytes for x in s.segments))
        server.requests.clear()
        found = await asker.attach("b1", card)
        await asyncio.to_thread(assert_same, found, tensors(megabytes=4))
        assert not [r for r in server.asked(SHARD) if int(r.headers["Range"].split("-")[1]) > 100_000]
        assert await asyncio.to_thread(listed_status, status, card.info.revision) == HTTPStatus.PARTIAL_CONTENT
        await client.release("a1")
        assert await asyncio.to_thread(listed_status, status, card.info.revision) == HTTPStatus.NOT_FOUND


def listed_status(node: LoaderStatus, revision: str) -> int:
    """Return the status of a node's answer to a request for a model's files."""
    client = HttpClient({"Authorization": f"Bearer {node.peer_token}"})
    with client.get(f"{node.peer_url}/models/{revision}", {"Range": "bytes=0-9999"}) as answer:
        status = answer.status
    client.close()
    return status


def test_load_fails_only_if_every_location_fails(server: TierServer, tmp_path: Path) -> None:
    from weights.tiers.directory import DirectoryTier

    write_checkpoint(tmp_path / "a")
    write_checkpoint(tmp_path / "b")
    one, two = DirectoryTier(tmp_path / "a"), DirectoryTier(tmp_path / "b")
    tier = FailoverTier(one, [SourcePlace(one), SourcePlace(two)])
    file = next(f for f in tier.files() if f.name.endswith(".safetensors"))
    (tmp_path / "a" / file.name).unlink()
    data = bytearray(file.size)
    tier.read(file, 0, memoryview(data))
    assert bytes(data) == (tmp_path / "b" / file.name).read_bytes()
    (tmp_path / "b" / file.name).unlink()
    with pytest.raises(CheckpointInvalid, match="cannot be read"):
        tier.read(file, 0, memoryview(data))
