"""Loads that read from several sources at once: real peers that are slow, stall, die, or lie."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from services.loader.adapters.cards import card_for
from services.loader.adapters.peer_server import PeerServer
from services.loader.adapters.progress import Progress
from services.loader.adapters.resident import ResidentFiles
from services.loader.adapters.run import Run, RunContext, Threads
from services.loader.domain.effects import StartRun
from services.loader.domain.events import Event, LaidOut
from shared.contracts.loader import CachedModel, LoaderStatus
from shared.contracts.segment import ByteRange
from shared.contracts.stages import LayerRange
from shared.errors import CheckpointInvalid, Unavailable
from tests.integration.loader.checksums import write_sums
from tests.integration.loader.tiers_server import TierServer
from tests.support.launcher import until
from tests.support.sources import sources_at
from tests.unit.loader.checkpoints import tensors, write_checkpoint
from weights.cache.journal import FileHead
from weights.cache.store import EntryRecord, SsdCache
from weights.formats.checkpoint import open_checkpoint
from weights.formats.segment import Layout, lay_out
from weights.pool.chunks import CHUNK_BYTES
from weights.pool.memory import PoolMemory
from weights.sources.peers import Peers
from weights.sources.sources import Sources
from weights.tiers.port import Cancelled, Tier
from weights.transfer import stripe_plan
from weights.transfer.links import Links

MEGABYTES = 40
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
FAILED = "a source of the model failed"
SLOW_S = 0.005
"""Delay of 64 KiB: a piece takes a third of a second."""


@dataclass
class Node:
    """A node that loads, with an origin and peers that have the model."""

    home: Path
    origin: TierServer
    revision: str
    total_bytes: int
    directory: Path
    peers: dict[str, TierServer] = field(default_factory=dict)

    @property
    def source(self) -> str:
        return f"{self.origin.url}/m"

    async def sources(
        self, *in_memory: PeerServer, with_disks: bool = True, speed_of: Callable[[str], float | None] = lambda link: None
    ) -> Sources:
        """The loader's sources: its peers with the model on disk, and `in_memory`."""
        on_disk = self.peers if with_disks else {}
        peers, where = Peers("here"), {name: (server.url, "t", "ssd") for name, server in on_disk.items()}
        where |= {f"m{i}": (server.url, server.token, "dram") for i, server in enumerate(in_memory)}
        for name, (url, token, tier) in where.items():
            cached = (CachedModel.model_validate({"weights_id": self.revision, "tier": tier, "nbytes": 1}),)
            await peers.on_status(LoaderStatus(node=name, boot_id="b", cached=cached, peer_url=url, peer_token=token))
        return Sources(SsdCache(self.home / "cache", 1 << 30), (self.home / "small",), peers, speed_of)

    def sent(self, name: str) -> int:
        """Bytes of weights that a peer, or the origin, has sent."""
        server = self.origin if name == "origin" else self.peers[name]
        return sum(n for path, n in server.sent.items() if path.endswith(SHARDS))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the origin out of loads that only wait for a processor."""
    monkeypatch.setattr(stripe_plan, "RESERVE_AFTER_S", 60.0)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A model at an origin and three peers."""
    directory = tmp_path / "www" / "m"
    write_checkpoint(directory, tensors(megabytes=MEGABYTES), shards=2)
    write_sums(directory)
    origin = TierServer(tmp_path / "www")
    url = f"{origin.url}/m"
    info = sources_at(tmp_path / "other").inspect(url, trust_remote_code=False)
    node = Node(tmp_path / "home", origin, info.revision, info.weights_bytes, directory)
    heads = tuple(
        FileHead(name=p.name, size=p.stat().st_size, version="1") for p in sorted(directory.iterdir()) if p.name != "SHA256SUMS"
    )
    listing = EntryRecord(revision=info.revision, source=url, files=heads).model_dump_json().encode()
    for name in ("a", "b", "c"):
        root = tmp_path / name
        (root / "models").mkdir(parents=True)
        (root / "models" / info.revision).symlink_to(directory)
        node.peers[name] = TierServer(root)
        node.peers[name].contents[f"/models/{info.revision}"] = listing
    origin.requests.clear()
    origin.sent.clear()
    yield node
    for server in (*node.peers.values(), origin):
        server.close()


class Load:
    """One load of the node's model, in this process and without a loop."""

    def __init__(self, node: Node, sources: Sources, layers: LayerRange | None = None) -> None:
        self.node = node
        self.layout = lay_out(open_checkpoint(node.directory), node.revision, layers)
        count = -(-node.total_bytes // CHUNK_BYTES)
        self.pool, self.links = PoolMemory(None, count * CHUNK_BYTES), Links("fair")
        self.progress = Progress(self._emit)
        card = card_for(node.source, node.revision, node.total_bytes)
        context = RunContext(self.pool, sources, self._emit, Threads(2, 4), self.links, self.progress)
        self.run = Run(StartRun(node.revision, 1, card, layers=layers), context)

    def _emit(self, event: Event) -> None:
        if isinstance(event, LaidOut):
            self.run.grant(tuple(range(-(-event.total_bytes // CHUNK_BYTES))))

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *error: object) -> None:
        self.run.call_off()
        self.run.close()
        self.progress.close()
        self.links.close()
        self.run.filling = self.run.region = None
        self.pool.close()

    def check(self) -> None:
        """Check that each byte arrived once, and is right."""
        arrived = [a for a in self.run.arrivals.list_after(0) if isinstance(a, ByteRange)]
        at = 0
        for one in sorted(arrived, key=lambda a: a.offset):
            assert one.offset == at
            at += one.nbytes
        assert at == self.layout.total_bytes
        assert self.run.region is not None
        for place in self.layout.places:
            content = place.file.path.read_bytes()[place.start : place.start + place.size]
            for done in range(0, place.size, CHUNK_BYTES // 4):
                target = place.offset + done
                length = min(CHUNK_BYTES // 4, place.size - done, CHUNK_BYTES - target % CHUNK_BYTES)
                with self.run.region.view(target, length) as found:
                    assert found == content[done : done + length]

    def settle(self) -> None:
        tier = self.run.tier
        assert tier is not None
        assert tier.get_settled_event().wait(60)


@contextmanager
def in_memory(node: Node, is_resident: Callable[[], bool] = lambda: True) -> Iterator[PeerServer]:
    """Start a node that has the model in its memory only."""

    @contextmanager
    def find(revision: str) -> Iterator[None]:
        yield None

    with Load(node, sources_at(node.home.with_name("in-memory"), budget=0)) as load:
        load.run.load()
        tier, region, info = load.run.tier, load.run.region, load.run.order.card.info
        assert tier is not None
        assert region is not None
        found = ResidentFiles(info, tier.files(), load.layout, region, is_resident)
        serving = PeerServer("127.0.0.1", 0, find, {node.revision: found}.get)
        node.origin.sent.clear()
        try:
            yield serving
        finally:
            serving.close()


def speed(server: TierServer, delay_s: float) -> None:
    server.faults.piece_delay_s = delay_s


async def test_load_takes_pieces_from_all_peers_and_caches_the_model(node: Node) -> None:
    sources = await node.sources()
    for server in node.peers.values():
        speed(server, SLOW_S)
    with Load(node, sources) as load:
        load.run.load()
        load.check()
        load.settle()
        assert sources.cache.lookup(node.revision) is not None
        links = {s.link for s in load.links.statuses()}
    assert links == {"peer:a", "peer:b", "peer:c"}
    assert min(node.sent(name) for name in node.peers) > 0.05 * node.total_bytes
    assert node.sent("origin") < 1_000_000, "probes of the headers only"


async def test_part_of_a_model_is_read_from_all_peers(node: Node) -> None:
    """As the stage of a pipeline needs it."""
    for server in node.peers.values():
        speed(server, SLOW_S)
    with Load(node, await node.sources(), LayerRange(first=1, end=2, total=3)) as load:
        load.run.load()
        load.check()
        links = {s.link: s.moved_bytes for s in load.links.statuses()}
    assert set(links) == {"peer:a", "peer:b", "peer:c"}
    assert sum(links.values()) < node.total_bytes


async def test_slow_peer_delays_only_its_pieces(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    sources = await node.sources()
    speed(node.peers["b"], 10.0)  # a piece takes ten minutes
    with Load(node, sources) as load:
        load.run.load()
        load.check()
    assert node.sent("b") < 1_000_000
    assert node.sent("origin") < 1_000_000
    assert FAILED not in caplog.text


async def test_stalled_peer_costs_only_its_pieces(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    sources = await node.sources()
    node.peers["a"].faults.stall_after = 128 * 1024
    with Load(node, sources) as load:
        load.run.load()
        load.check()
        assert node.peers["a"].stalled.is_set()
        assert not node.peers["a"].unblocked.is_set()
    assert node.sent("origin") < 1_000_000
    assert FAILED not in caplog.text, "its pieces are read elsewhere before it counts as failed"


async def test_peer_that_dies_is_left_out(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    sources = await node.sources()
    for server in node.peers.values():
        speed(server, SLOW_S)
    with Load(node, sources) as load:
        thread = threading.Thread(target=load.run.load)
        thread.start()
        until(lambda: node.sent("c") > 0)
        node.peers["c"].dead.set()
        thread.join(60)
        load.check()
    assert [vars(r)["failed"] for r in caplog.records if FAILED in r.message] == ["peer:c"]
    assert node.sent("origin") < 1_000_000


async def test_source_replaces_peers_that_all_die(node: Node) -> None:
    sources = await node.sources()
    with Load(node, sources) as load:
        after_headers(load, lambda: kill_all(node))
        load.run.load()
        load.check()
    assert node.sent("origin") > 0.9 * node.total_bytes


async def test_source_takes_part_when_every_peer_stalls(
    node: Node, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stripe_plan, "RESERVE_AFTER_S", 0.3)
    sources = await node.sources()
    for server in node.peers.values():
        server.faults.stall_after = 128 * 1024
    with Load(node, sources) as load:
        load.run.load()
        load.check()
        assert not any(server.unblocked.is_set() for server in node.peers.values())
    assert node.sent("origin") > 0.9 * node.total_bytes
    assert [(vars(r)["failed"], vars(r)["error"]) for r in caplog.records if FAILED in r.message] == []


async def test_source_that_is_known_to_be_faster_takes_part_from_the_start(node: Node) -> None:
    speeds = {f"peer:{name}": 1.0 for name in node.peers} | {f"remote:127.0.0.1:{node.origin.port}": 2.0}
    sources = await node.sources(speed_of=speeds.get)
    for server in (*node.peers.values(), node.origin):
        speed(server, SLOW_S)
    with Load(node, sources) as load:
        load.run.load()
        load.check()
    assert min(node.sent(name) for name in (*node.peers, "origin")) > 0.02 * node.total_bytes


async def test_load_fails_only_if_every_source_fails(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weights.tiers.retry.Backoff.pause", lambda *_: None)
    sources = await node.sources()
    with Load(node, sources) as load:
        after_headers(load, lambda: fail_all(node))
        with pytest.raises(Unavailable, match="503"):
            load.run.load()


def after_headers(load: Load, then: Callable[[], None]) -> None:
    """Call `then` when the load has read the headers, and before it reads weights."""
    original = load.run._report_indexed

    def indexed(tier: Tier, layout: Layout, directory: Path, loaded: int) -> None:
        original(tier, layout, directory, loaded)
        then()

    load.run._report_indexed = indexed  # type: ignore[method-assign]  # between two steps of the load


def kill_all(node: Node) -> None:
    for server in node.peers.values():
        server.dead.set()


def fail_all(node: Node) -> None:
    for server in (*node.peers.values(), node.origin):
        server.faults.status = 503


async def test_peers_that_sent_a_damaged_file_are_not_asked_again(node: Node) -> None:
    sources = await node.sources()
    liar = node.peers["b"]
    liar.faults.damage = lambda data, start: bytes(len(data))
    with Load(node, sources) as load, pytest.raises(CheckpointInvalid, match="sha256"):
        load.run.load()
    before = node.sent("b")
    with Load(node, sources) as load:
        load.run.load()
        load.check()
        load.settle()
    assert node.sent("b") == before
    assert sources.cache.lookup(node.revision) is not None


async def test_cancelled_load_ends_while_every_source_stalls(node: Node) -> None:
    sources = await node.sources()
    for server in (*node.peers.values(), node.origin):
        server.faults.stall_after = 128 * 1024
    with Load(node, sources) as load:
        ended: list[BaseException] = []

        def run() -> None:
            try:
                load.run.load()
            except BaseException as e:
                ended.append(e)

        thread = threading.Thread(target=run)
        thread.start()
        until(lambda: all(s.stalled.is_set() for s in node.peers.values()))
        load.run.call_off()
        thread.join(60)
        assert [type(e) for e in ended] == [Cancelled]


async def test_peer_that_does_not_list_its_files_delays_no_load(node: Node) -> None:
    sources = await node.sources()
    node.peers["a"].faults.suffix = node.revision
    node.peers["a"].faults.stall_from = 0
    with Load(node, sources) as load:
        load.run.load()
        load.check()
    assert node.peers["a"].stalled.is_set()
    assert node.sent("a") == 0


async def test_load_reads_from_memory_and_disks_of_peers_at_once(node: Node) -> None:
    for server in node.peers.values():
        speed(server, SLOW_S)
    with in_memory(node) as serving:
        with Load(node, await node.sources(serving)) as load:
            load.run.load()
            load.check()
            links = {s.link: s.moved_bytes for s in load.links.statuses()}
        assert set(links) == {"peer:a", "peer:b", "peer:c", "peer:m0"}
        assert links["peer:m0"] > max(links["peer:a"], links["peer:b"], links["peer:c"])
    assert node.sent("origin") < 1_000_000


async def test_weights_that_leave_a_peer_s_memory_are_read_elsewhere(node: Node) -> None:
    reads = iter(range(1000))
    with in_memory(node, lambda: next(reads) < 20) as serving, Load(node, await node.sources(serving, with_disks=False)) as load:
        load.run.load()
        load.check()
        links = {s.link: s.moved_bytes for s in load.links.statuses()}
    assert links["peer:m0"] > 0, "of four pieces at once in reads of 1 MiB, one was complete"
    assert node.sent("origin") > 0.3 * node.total_bytes


async def test_memory_of_a_peer_does_not_replace_an_unavailable_source(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no configuration and no tokenizer."""
    monkeypatch.setattr("weights.tiers.retry.Backoff.pause", lambda *_: None)
    with in_memory(node) as serving:
        sources = await node.sources(serving, with_disks=False)
        node.origin.faults.suffix, node.origin.faults.status = "", 503
        with pytest.raises(Unavailable, match="503"):
            sources.open(node.source, node.revision)
