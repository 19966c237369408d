"""Decisions of tiers and cache.

Names, ranges, retries, eviction, read order, checksums.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
from email.utils import formatdate
from http.client import HTTPMessage
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.contracts.loader import CachedModel, LinkStatus, LoaderStatus, SegmentStatus
from shared.errors import CheckpointInvalid
from weights.cache.eviction import CacheEntry, plan_eviction
from weights.cache.journal import Journal, Piece, head_of
from weights.cache.ranges import RangeSet
from weights.cache.store import SsdCache
from weights.cache.verify import Verifier
from weights.sources.peers import Peers, peers_first
from weights.tiers.http_client import redact_url
from weights.tiers.names import is_safe, is_small, select
from weights.tiers.object_store import stored_md5
from weights.tiers.port import TierFile
from weights.tiers.retry import asked_seconds

NAMES = st.text(alphabet="ab./\\\0~ -", max_size=12)


@settings(deadline=None)
@given(NAMES)
def test_safe_name_stays_below_its_directory(name: str) -> None:
    if is_safe(name):
        assert os.path.normpath(f"/root/{name}").startswith("/root/")
        assert ".." not in name.split("/")


@pytest.mark.parametrize("name", ["", "/", "/a", "a//b", "../a", "a/../b", ".hidden", "a/.b", "a\0b", "a\\b", "a" * 300])
def test_unsafe_names_are_refused(name: str) -> None:
    assert not is_safe(name)


def test_small_files_are_recognized_by_name_and_size() -> None:
    assert is_small("config.json", 10)
    assert is_small("1_Pooling/config.json", 10)
    assert is_small("own.py", 10)
    assert not is_small("other/config.json", 10)
    assert not is_small("huge.json", 1 << 30)
    assert not is_small("model.safetensors", 10)
    assert is_small("thaw.index.json", 200 << 20), "of a large model divided for many ranks"


def test_files_of_a_model_are_selected() -> None:
    sizes = {"config.json": 2, "model.safetensors": 9, "consolidated.safetensors": 9, "README.md": 3, "../x.json": 1}
    assert select(sizes, "there", lambda name: b"") == ("config.json", "model.safetensors")
    with pytest.raises(CheckpointInvalid, match="there has no weights"):
        select({"config.json": 2}, "there", lambda name: b"")
    index = b'{"weight_map": {"a": "model-1.safetensors"}}'
    with pytest.raises(CheckpointInvalid, match=r"model-1\.safetensors is named by the model's index but missing"):
        select({"model.safetensors.index.json": 9}, "there", lambda name: index)


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "thaw.index.json"])
def test_an_index_of_a_terabyte_is_not_read(name: str) -> None:
    """An index of a terabyte is not read: its buffer would get the loader killed."""
    with pytest.raises(CheckpointInvalid, match=rf"there/{name} is over \d+ bytes; that is no configuration file"):
        select({name: 1 << 40}, "there", lambda name: pytest.fail("it was read"))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=30), st.integers(1, 60))
def test_ranges_are_sets_of_bytes(pieces: list[tuple[int, int]], size: int) -> None:
    there, expected = RangeSet(), set[int]()
    for start, length in pieces:
        there.add(start, start + length)
        expected |= set(range(start, start + length))
    assert there.total == len(expected)
    assert {b for start, end in there.list_missing(size) for b in range(start, end)} == set(range(size)) - expected
    for start in range(0, 60, 7):
        assert there.covers(start, start + 5) == (set(range(start, start + 5)) <= expected)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, 0.0),
        ("7", 7.0),
        ("0.5", 0.5),
        ("-3", 0.0),
        ("soon", 0.0),
        (formatdate(1030, usegmt=True), 30.0),
        (formatdate(0), 0.0),
    ],
)
def test_retry_after_header_is_parsed(header: str | None, seconds: float) -> None:
    assert asked_seconds(header, 1000.0) == pytest.approx(seconds)


def test_urls_are_shown_without_secrets() -> None:
    assert redact_url("https://u:p@host:8/a%20b?sig=s#f") == "https://host:8/a b"


def entry(revision: str, used: float, nbytes: int = 10, **flags: Any) -> CacheEntry:
    return CacheEntry(revision, nbytes, used, **flags)


def test_eviction_order_is_incomplete_then_least_recently_used() -> None:
    entries = [
        entry("old", 1),
        entry("pinned", 0, pinned=True),
        entry("read", 2, in_use=True),
        entry("half", 9, complete=False),
        entry("new", 5),
    ]
    assert plan_eviction(entries, 50, 100, 1000) == ()
    assert plan_eviction(entries, 60, 100, 1000) == ("half",)
    assert plan_eviction(entries, 80, 100, 1000) == ("half", "old", "new")
    assert plan_eviction(entries, 81, 100, 1000) is None
    assert plan_eviction([], 101, 100, 1000) is None
    assert plan_eviction(entries, 20, 100, 10) == ("half",), "the disk is full, whatever the budget"


def test_bytes_still_to_be_fetched_count_too() -> None:
    entries = [entry("old", 1), entry("half", 9, in_use=True, complete=False, due=40)]
    assert plan_eviction(entries, 40, 100, 1000) == ()
    assert plan_eviction(entries, 50, 100, 1000) == ("old",)
    assert plan_eviction(entries, 51, 100, 1000) is None
    assert plan_eviction(entries, 20, 1000, 60) == (), "of the disk's 60, 40 are spoken for"
    assert plan_eviction(entries, 21, 1000, 60) == ("old",)


@settings(deadline=None)
@given(
    st.lists(
        st.builds(CacheEntry, st.uuids().map(str), st.integers(0, 50), st.floats(0, 9), st.booleans(), st.booleans()), max_size=8
    ),
    st.integers(0, 100),
    st.integers(0, 200),
)
def test_eviction_never_removes_pinned_or_used_entries(entries: list[CacheEntry], needed: int, budget: int) -> None:
    plan = plan_eviction(entries, needed, budget, 10**9)
    by_name = {e.revision: e for e in entries}
    left = sum(e.nbytes for e in entries)
    if plan is None:
        kept = sum(e.nbytes for e in entries if e.pinned or e.in_use)
        assert kept + needed > budget
        return
    for name in plan:
        assert left + needed > budget, "no more than needed goes"
        assert not by_name[name].pinned
        assert not by_name[name].in_use
        left -= by_name[name].nbytes
    assert left + needed <= budget


@pytest.mark.parametrize(
    ("peers", "source", "first"),
    [([None], None, True), ([1.0], None, True), ([None], 9.0, True), ([1.0], 9.0, False), ([9.0], 1.0, True)],
)
def test_faster_of_peers_and_source_is_read_first(peers: list[float | None], source: float | None, first: bool) -> None:
    assert peers_first(peers, source) is first


async def test_peers_are_offered_by_load_and_trust() -> None:
    now = [0.0]
    peers = Peers("here", lambda: now[0])
    has = (CachedModel(weights_id="r", tier="ssd", nbytes=1),)
    busy = (LinkStatus(link="ssd:x", queued_bytes=5),)
    for node, cached, links, token in (
        ("here", has, (), "t"),
        ("busy", has, busy, "t"),
        ("idle", has, (), "t"),
        ("mute", has, (), None),
        ("other", (CachedModel(weights_id="x", tier="ssd", nbytes=1),), (), "t"),
    ):
        await peers.on_status(
            LoaderStatus(node=node, boot_id="b", cached=cached, links=links, peer_url="http://p", peer_token=token)
        )
    assert [o.node for o in peers.offers("r")] == ["idle", "busy"]
    peers.distrust("idle", "r")
    assert [o.node for o in peers.offers("r")] == ["busy"]
    now[0] = 60.0
    assert peers.offers("r") == []


async def test_peers_with_a_model_in_memory_only_follow_those_with_its_files() -> None:
    peers = Peers("here", lambda: 0.0)
    held = SegmentStatus(weights_id="r", model="m", segment="s", total_bytes=10, loaded_bytes=10, holders=("i",))
    dram, ssd = (CachedModel.model_validate({"weights_id": "r", "tier": tier, "nbytes": 10}) for tier in ("dram", "ssd"))
    busy = LinkStatus(link="ssd:x", queued_bytes=1)
    has: dict[str, dict[str, Any]] = {
        "cached": {"cached": (dram,)},
        "held": {"segments": (held,)},
        "disk": {"cached": (ssd,), "links": (busy,)},
        "loading": {"segments": (held.model_copy(update={"loaded_bytes": 9}),)},
        "partial": {"segments": (held.model_copy(update={"is_partial": True}),)},
        "failed": {"segments": (held.model_copy(update={"error": CheckpointInvalid("x").body()}),)},
    }
    for node, fields in has.items():
        await peers.on_status(LoaderStatus(node=node, boot_id="b", peer_url="u", peer_token="t", **fields))
    assert [(o.node, o.is_whole) for o in peers.offers("r")] == [("disk", True), ("cached", False), ("held", False)]


def headers(**values: str) -> HTTPMessage:
    message = HTTPMessage()
    for name, value in values.items():
        message[name.replace("_", "-")] = value
    return message


MD5 = hashlib.md5(b"x", usedforsecurity=False)


def test_md5_is_read_from_the_headers_of_each_store() -> None:
    import base64

    encoded = base64.b64encode(MD5.digest()).decode()
    assert stored_md5(headers(x_goog_hash=f"crc32c=AAAA,md5={encoded}"), "gs") == MD5.hexdigest()
    assert stored_md5(headers(x_ms_blob_content_md5=encoded), "az") == MD5.hexdigest()
    assert stored_md5(headers(ETag=f'"{MD5.hexdigest()}"'), "s3") == MD5.hexdigest()
    assert stored_md5(headers(ETag=f'"{MD5.hexdigest()}-2"'), "s3") is None, "put in several parts"
    assert stored_md5(headers(ETag=f'"{MD5.hexdigest()}"', x_amz_server_side_encryption="aws:kms"), "s3") is None
    assert stored_md5(headers(ETag=f'"{MD5.hexdigest()}"', x_amz_server_side_encryption_customer_algorithm="AES256"), "s3") is None
    assert stored_md5(headers(ETag=f'"{MD5.hexdigest()}"'), "az") is None
    assert stored_md5(None, "s3") is None


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=200), st.data())
def test_checksum_is_verified_for_any_order_of_pieces(content: bytes, data: st.DataObject) -> None:
    cuts = sorted({0, len(content), *data.draw(st.lists(st.integers(0, len(content)), max_size=6))})
    pieces = data.draw(st.permutations(list(itertools.pairwise(cuts))))
    right = data.draw(st.booleans())
    digest = hashlib.sha256(content if right else content + b"x").hexdigest()
    file, wrong = TierFile("f", len(content), sha256=digest), list[TierFile]()
    verifier = Verifier([file], "there", wrong.append)
    for start, end in pieces:
        verifier.put(file, start, memoryview(content)[start:end])
    try:
        if right:
            verifier.wait()
        else:
            with pytest.raises(CheckpointInvalid, match="there/f has the sha256"):
                verifier.wait()
    finally:
        verifier.close()
    assert verifier.is_hashed("f")
    assert wrong == ([] if right else [file])


def test_waiting_for_checksums_is_called_off() -> None:
    before = set(threading.enumerate())
    file = TierFile("f", 4, sha256="0" * 64)
    verifier = Verifier([file], "there", lambda f: None)
    verifier.put(file, 2, memoryview(b"cd"))
    verifier.wait()  # the rest belongs to another load
    verifier.close()
    verifier.put(file, 0, memoryview(b"ab"))
    assert not verifier.is_hashed("f")
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()


@settings(deadline=None)
@given(st.binary(max_size=120))
def test_a_journal_survives_any_bytes(tmp_path_factory: pytest.TempPathFactory, junk: bytes) -> None:
    directory = tmp_path_factory.mktemp("journal")
    files = [TierFile("a", 100), TierFile("b", 5)]
    journal = Journal(directory)
    journal.begin(head_of("0123456789", "there", files))
    journal.add(Piece(file=0, offset=0, length=50, crc=1))
    journal.close()
    with (directory / "journal").open("ab") as file:
        file.write(junk)
    again = Journal(directory)
    again.refresh()
    again.add(Piece(file=0, offset=50, length=50, crc=2))
    follower = Journal(directory)
    follower.refresh()
    for j in (again, follower):
        assert j.head is not None
        assert j.head.revision == "0123456789"
        assert {(p.offset, p.length) for p in j.pieces[0].values()} >= {(0, 50), (50, 50)} or junk.count(b"\n")
        j.close()


def test_revisions_are_no_paths(tmp_path: Path) -> None:
    cache = SsdCache(tmp_path, 0)
    for revision in ("..", "../x", "", "a/b", "ABCDEF0123"):
        with pytest.raises(ValueError, match="is no revision"):
            cache.lookup(revision)
