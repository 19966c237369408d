"""`http://` sources against a misbehaving server.

Each fault is survived or gives a typed error; no descriptor stays open.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.errors import CheckpointInvalid, InvalidModel, ThawError, Unavailable
from tests.integration.loader.leftovers import without_leftovers
from tests.integration.loader.tiers_server import TierServer
from tests.unit.loader.checkpoints import tensors, write_checkpoint
from weights.tiers.connection import Patience
from weights.tiers.http import HttpTier
from weights.tiers.http_client import HttpClient
from weights.tiers.port import Cancelled, TierFile
from weights.tiers.ranges import RangeReader
from weights.tiers.retry import Backoff

SHARD = "model-00001-of-00002.safetensors"
QUICK = Backoff(attempts=4, first_s=0.001, most_s=0.01)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TierServer]:
    write_checkpoint(tmp_path / "www" / "m", tensors(megabytes=4), shards=2)
    (tmp_path / "www" / "m" / "README.md").write_text("not wanted")
    with without_leftovers("probe", "cache", "verify"):
        server = TierServer(tmp_path / "www")
        yield server
        server.close()


@pytest.fixture
def tier(server: TierServer) -> Iterator[HttpTier]:
    tier = HttpTier(f"{server.url}/m/", QUICK)
    tier.files()
    yield tier
    tier.close()


def file_of(tier: HttpTier, name: str = SHARD) -> TierFile:
    return next(f for f in tier.files() if f.name == name)


def read(tier: HttpTier, name: str = SHARD, offset: int = 0, cancelled: threading.Event | None = None) -> bytes:
    file = file_of(tier, name)
    data = bytearray(file.size - offset)
    tier.read(file, offset, memoryview(data), cancelled)
    return bytes(data)


def content(server: TierServer, name: str = SHARD) -> bytes:
    return (server.directory / "m" / name).read_bytes()


def test_model_files_are_found_by_name(server: TierServer, tier: HttpTier) -> None:
    names = [f.name for f in tier.files()]
    assert names == sorted(p.name for p in (server.directory / "m").iterdir() if p.name != "README.md")
    assert all(f.size == len(content(server, f.name)) and f.version for f in tier.files())
    assert sum(server.sent.values()) < 1_000_000, "headers only"
    assert tier.link == f"remote:127.0.0.1:{server.port}"


def test_a_list_of_checksums_names_the_files(server: TierServer) -> None:
    directory = server.directory / "m"
    (directory / "own.py").write_text("pass")
    sums = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in directory.iterdir()}
    (directory / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in sums.items()))
    tier = HttpTier(f"{server.url}/m", QUICK)
    assert {f.name: f.sha256 for f in tier.files()} == {n: d for n, d in sums.items() if n != "README.md"}
    tier.close()


@pytest.mark.parametrize("name", ["../secret.json", "/etc/passwd.json", ".ssh/id.json", "a\\b.json"])
def test_checksum_list_with_paths_is_refused(server: TierServer, name: str) -> None:
    (server.directory / "m" / "SHA256SUMS").write_text(f"{'0' * 64}  {name}\n")
    tier = HttpTier(f"{server.url}/m", QUICK)
    with pytest.raises(CheckpointInvalid, match="only plain names"):
        tier.files()
    tier.close()


@pytest.mark.parametrize(
    "line",
    [f"{'0' * 63}  config.json", f"SHA256 (config.json) = {'0' * 64}"],
    ids=["short checksum", "BSD's form"],
)
def test_checksum_list_with_a_malformed_line_is_refused(server: TierServer, line: str) -> None:
    for good in ("", f"{'0' * 64}  {SHARD}\n"):
        (server.directory / "m" / "SHA256SUMS").write_text(f"{good}{line}\n")
        tier = HttpTier(f"{server.url}/m", QUICK)
        with pytest.raises(CheckpointInvalid, match="malformed line") as caught:
            tier.files()
        tier.close()
        assert line in caught.value.message


def test_comments_in_a_checksum_list_are_skipped_as_by_sha256sum(server: TierServer) -> None:
    (server.directory / "m" / "SHA256SUMS").write_text(f"# made by hand\n\n{'0' * 64}  {SHARD}\n")
    tier = HttpTier(f"{server.url}/m", QUICK)
    assert {f.name: f.sha256 for f in tier.files()}[SHARD] == "0" * 64
    tier.close()


def test_page_in_place_of_a_checksum_list_is_logged(server: TierServer, caplog: pytest.LogCaptureFixture) -> None:
    (server.directory / "m" / "SHA256SUMS").write_text("<html>\nNo such file\n</html>")
    tier = HttpTier(f"{server.url}/m", QUICK)
    assert all(f.sha256 is None for f in tier.files())
    tier.close()
    assert "files are not verified" in caplog.text


@pytest.mark.parametrize("offset", [0, 1, 100_001])
def test_range_is_read_from_any_offset(server: TierServer, tier: HttpTier, offset: int) -> None:
    assert read(tier, offset=offset) == content(server)[offset:]


def test_cut_connection_is_resumed_where_it_was_cut(server: TierServer, tier: HttpTier) -> None:
    server.requests.clear()
    server.faults.cut_after = [300_000, 500_000, 1]
    assert read(tier) == content(server)
    starts = [r.headers["Range"] for r in server.asked(SHARD)]
    assert [s.split("-")[0] for s in starts] == ["bytes=0", "bytes=300000", "bytes=800000", "bytes=800001"]


def test_transient_errors_are_retried(server: TierServer, tier: HttpTier) -> None:
    server.faults.statuses = [500, 503, 429]
    server.faults.retry_after = "0.01"
    assert read(tier) == content(server)


def test_persistent_errors_fail_after_four_attempts(server: TierServer, tier: HttpTier) -> None:
    server.requests.clear()
    server.faults.status = 500
    with pytest.raises(Unavailable, match=rf"m/{SHARD} could not be read in 4 attempts \(the server answered 500\)") as caught:
        read(tier)
    assert caught.value.should_retry
    assert len(server.asked(SHARD)) == 4


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        (404, CheckpointInvalid, "is not there"),
        (403, InvalidModel, "credentials"),
        (401, InvalidModel, "credentials"),
        (418, InvalidModel, "418"),
    ],
)
def test_refusals_are_not_repeated(server: TierServer, tier: HttpTier, status: int, error: type[ThawError], message: str) -> None:
    server.requests.clear()
    server.faults.status = status
    with pytest.raises(error, match=message):
        read(tier)
    assert len(server.asked(SHARD)) == 1


def test_a_changed_file_is_noticed(server: TierServer, tier: HttpTier) -> None:
    server.faults.version = "2"
    with pytest.raises(CheckpointInvalid, match="has changed since it was listed"):
        read(tier)


def test_a_shrunken_file_is_noticed(server: TierServer, tier: HttpTier) -> None:
    (server.directory / "m" / SHARD).write_bytes(content(server)[:1000])
    with pytest.raises(CheckpointInvalid, match="has changed"):
        read(tier, offset=2000)


def test_file_that_changes_between_two_ranges_is_refused(server: TierServer, tier: HttpTier) -> None:
    server.faults.cut_after = [300_000]
    original = server.faults.damage
    assert original is None

    def changes(data: bytes, start: int) -> bytes:
        server.faults.version = "2"
        return data

    server.faults.damage = changes
    with pytest.raises(CheckpointInvalid, match="has changed"):
        read(tier)


def test_a_wrong_range_is_refused(server: TierServer, tier: HttpTier) -> None:
    server.faults.wrong_range = True
    with pytest.raises(Unavailable, match="instead of bytes from"):
        read(tier, offset=200_000)


def test_compressed_answers_are_refused(server: TierServer, tier: HttpTier) -> None:
    server.faults.compressed = True
    with pytest.raises(InvalidModel, match="compressed"):
        read(tier, offset=200_000)


def test_server_without_ranges_is_read_once_for_all_threads(server: TierServer) -> None:
    server.faults.no_ranges = True
    tier = HttpTier(f"{server.url}/m", QUICK)
    file = file_of(tier)
    server.sent.clear()
    data, step = bytearray(file.size), 100_000
    offsets = iter(range(0, file.size, step))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                offset = next(offsets, None)
            if offset is None:
                return
            tier.read(file, offset, memoryview(data)[offset : offset + step])

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert bytes(data) == content(server)
    assert server.sent[f"/m/{SHARD}"] < 2.5 * file.size
    tier.close()


def test_without_ranges_an_interrupted_download_restarts(server: TierServer, tier: HttpTier) -> None:
    server.faults.no_ranges = True
    server.faults.cut_after = [200_000, 600_000]
    assert read(tier, offset=400_000) == content(server)[400_000:]


def test_stalled_read_is_cancelled_immediately(server: TierServer, tier: HttpTier) -> None:
    server.faults.stall_after = 128 * 1024
    cancelled = threading.Event()

    def call_off() -> None:
        assert server.stalled.wait(60)
        cancelled.set()

    thread = threading.Thread(target=call_off)
    thread.start()
    with pytest.raises(Cancelled):
        read(tier, offset=0, cancelled=cancelled)
    thread.join()


def test_stalled_connection_times_out(server: TierServer, tier: HttpTier) -> None:
    client = HttpClient(patience=Patience(stall_s=0.2))
    reader = RangeReader(client, QUICK)
    server.faults.stall_after = 0
    remote = tier._remote(SHARD)
    with pytest.raises(Unavailable, match=r"no bytes for 0\.2 s"):
        reader.read(remote, 0, memoryview(bytearray(1000)))
    client.close()


def test_redirects_are_followed_and_credentials_stay_at_home(server: TierServer, tmp_path: Path) -> None:
    elsewhere = TierServer(server.directory)
    server.faults.redirect = elsewhere.url
    tier = HttpTier(f"http://user:secret@127.0.0.1:{server.port}/m", QUICK)
    assert read(tier) == content(server)
    assert all("Authorization" in r.headers for r in server.asked(SHARD))
    assert not any("Authorization" in r.headers for r in elsewhere.requests)
    assert "secret" not in tier.source
    count = len(server.asked(SHARD))
    read(tier, offset=500_000)
    assert len(server.asked(SHARD)) == count, "where a redirect led is remembered"
    tier.close()
    elsewhere.close()


def test_remembered_redirects_get_no_credentials(server: TierServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password pass\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with (
        contextlib.closing(TierServer(server.directory)) as elsewhere,
        contextlib.closing(HttpTier(f"{server.url}/m", QUICK)) as tier,
    ):
        server.faults.redirect = elsewhere.url
        read(tier)
        read(tier, offset=500_000)
        assert elsewhere.requests
        assert all("Authorization" in r.headers for r in server.requests)
        assert not any("Authorization" in r.headers for r in elsewhere.requests)


@pytest.mark.parametrize("target", ["http://127.0.0.1:99999", "http://[::1", f"http://{'a' * 64}.invalid"])
def test_redirects_to_invalid_urls_are_reported(server: TierServer, tier: HttpTier, target: str) -> None:
    server.faults.redirect = target
    with pytest.raises(Unavailable, match="could not be read"):
        read(tier)


def test_endless_redirects_are_refused(server: TierServer, tier: HttpTier) -> None:
    server.faults.redirect = server.url
    with pytest.raises(Unavailable, match="redirects"):
        read(tier)


def test_credentials_are_read_from_netrc(server: TierServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password pass\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    tier = HttpTier(f"{server.url}/m", QUICK)
    tier.files()
    assert server.requests[0].headers["Authorization"] == "Basic bWU6cGFzcw=="
    tier.close()


def test_a_proxy_of_the_environment(server: TierServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://u:p@127.0.0.1:{server.port}")
    monkeypatch.setenv("no_proxy", "")
    tier = HttpTier("http://models.invalid/m", QUICK)
    assert read(tier) == content(server)
    asked = server.requests[0]
    assert (asked.headers["Host"], asked.headers["Proxy-Authorization"]) == ("models.invalid", "Basic dTpw")
    monkeypatch.setenv("no_proxy", "models.invalid")
    with pytest.raises(Unavailable, match="proxy"):
        HttpTier("http://models.invalid/m", Backoff(attempts=1)).files()
    tier.close()


def test_a_connection_is_refused() -> None:
    with pytest.raises(Unavailable, match="check the server"):
        HttpTier("http://127.0.0.1:1/m", QUICK).files()


def test_invalid_tls_is_refused(server: TierServer) -> None:
    with pytest.raises(Unavailable, match=r"SSL|EOF|record"):
        HttpTier(f"https://127.0.0.1:{server.port}/m", Backoff(attempts=1)).files()


def test_missing_or_forbidden_model_is_reported(server: TierServer) -> None:
    tier = HttpTier(f"{server.url}/none", QUICK)
    with pytest.raises(CheckpointInvalid, match="has no weights"):
        tier.files()
    server.faults.suffix, server.faults.status = "", 403
    with pytest.raises(InvalidModel, match="refuses access"):
        HttpTier(f"{server.url}/m", QUICK).files()
    tier.close()


def test_missing_shard_is_named(server: TierServer) -> None:
    (server.directory / "m" / SHARD).unlink()
    tier = HttpTier(f"{server.url}/m", QUICK)
    with pytest.raises(CheckpointInvalid, match=rf"{SHARD} is named by the model's index but missing"):
        tier.files()
    tier.close()


@pytest.mark.parametrize("source", ["http://", "https:///x", "http://host:port/x", "http://[::1/x"])
def test_invalid_urls_are_refused(source: str) -> None:
    with pytest.raises(InvalidModel, match="https://host/path"):
        HttpTier(source)


def test_line_breaks_do_not_reach_the_server() -> None:
    client = HttpClient()
    with pytest.raises((ValueError, OSError, http.client.InvalidURL)):
        client.get("http://127.0.0.1:1/x", {"A": "b\r\nC: d"})
    client.close()
