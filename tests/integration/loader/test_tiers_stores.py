"""Object stores: moto's server for S3, azurite for Azure if npm installed it."""

from __future__ import annotations

import base64
import email.utils
import hashlib
import hmac
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from shared.errors import CheckpointInvalid, InvalidModel, Unavailable
from shared.ports import free_port
from tests.support.sources import inspected, sources_at
from tests.unit.loader.checkpoints import tensors, write_checkpoint
from weights.tiers.object_store import ObjectStoreTier
from weights.tiers.port import Cancelled
from weights.tiers.retry import Backoff

QUICK = Backoff(attempts=2, first_s=0.001)
SHARD = "model-00001-of-00002.safetensors"
AZURITE_ACCOUNT = "devstoreaccount1"
AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Public credentials, the same for every azurite."""
ANYBODY = {"Authorization": "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"}


def listening(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise AssertionError("the server did not start")


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    with (tmp_path_factory.mktemp("moto") / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log
        )
    listening(port, process)
    yield f"http://127.0.0.1:{port}"
    stop(process)


@pytest.fixture
def bucket(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Upload the files of models/m to a bucket."""
    import obstore
    from obstore.store import S3Store

    for name, value in {
        "AWS_ENDPOINT_URL": s3,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    # moto accepts any signature, and needs one to select the AWS service.
    urlopen(Request(f"{s3}/bucket", method="PUT", headers=ANYBODY)).close()
    directory = tmp_path / "m"
    write_checkpoint(directory, tensors(megabytes=4), shards=2)
    store = S3Store("bucket", config={"endpoint": s3}, client_options={"allow_http": True})
    for path in directory.iterdir():
        obstore.put(store, f"models/m/{path.name}", path.read_bytes(), use_multipart=False)
    return directory


def read(tier: ObjectStoreTier, name: str = SHARD, cancelled: threading.Event | None = None) -> bytes:
    file = next(f for f in tier.files() if f.name == name)
    data = bytearray(file.size)
    tier.read(file, 0, memoryview(data), cancelled)
    return bytes(data)


def test_a_bucket_s_files(bucket: Path) -> None:
    tier = ObjectStoreTier("s3://bucket/models/m/", QUICK)
    assert [f.name for f in tier.files()] == sorted(p.name for p in bucket.iterdir())
    assert all(f.md5 for f in tier.files()), "S3 reports the MD5 of files stored in one part"
    assert read(tier) == (bucket / SHARD).read_bytes()
    assert (tier.source, tier.link) == ("s3://bucket/models/m", "remote:s3:bucket")
    tier.close()


def test_the_same_without_signing(bucket: Path) -> None:
    """The same without signing: the credentials open the store but cannot sign URLs."""
    tier = ObjectStoreTier("s3://bucket/models/m", QUICK)
    tier._signs = False
    assert read(tier) == (bucket / SHARD).read_bytes()
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(Cancelled):
        read(tier, cancelled=cancelled)
    tier.close()


def test_google_store_is_read_by_its_xml_api(bucket: Path, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests to Google's stores, which list and return objects as S3 does (XML API).

    No server of theirs is available, so moto's stands in. Google's own features (checksums in
    x-goog-hash, signed URLs) are not covered.
    """
    monkeypatch.setenv("GOOGLE_BASE_URL", s3)
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    for path in bucket.iterdir():
        public = ANYBODY | {"x-amz-acl": "public-read"}
        urlopen(Request(f"{s3}/bucket/models/m/{path.name}?acl", method="PUT", headers=public)).close()
    tier = ObjectStoreTier("gs://bucket/models/m", QUICK)
    assert [f.name for f in tier.files()] == sorted(p.name for p in bucket.iterdir())
    assert read(tier) == (bucket / SHARD).read_bytes()
    assert (tier.source, tier.link) == ("gs://bucket/models/m", "remote:gs:bucket")
    tier.close()
    missing = ObjectStoreTier("gs://bucket/models/none", QUICK)
    with pytest.raises(CheckpointInvalid, match="holds nothing"):
        missing.files()
    missing.close()


def test_a_changed_object_is_noticed(bucket: Path) -> None:
    import obstore
    from obstore.store import S3Store

    tier = ObjectStoreTier("s3://bucket/models/m", QUICK)
    tier.files()
    store = S3Store("bucket", config={"endpoint": os.environ["AWS_ENDPOINT_URL"]}, client_options={"allow_http": True})
    data = bytearray((bucket / SHARD).read_bytes())
    data[-1] ^= 1
    obstore.put(store, f"models/m/{SHARD}", bytes(data), use_multipart=False)
    with pytest.raises(CheckpointInvalid, match="has changed since it was listed"):
        read(tier)
    tier._signs = False
    with pytest.raises(CheckpointInvalid, match="has changed since it was listed"):
        read(tier)
    tier.close()


def test_missing_bucket_or_prefix_is_reported(bucket: Path) -> None:
    with pytest.raises(CheckpointInvalid, match="holds nothing"):
        inspected("s3://bucket/none")
    with pytest.raises(CheckpointInvalid, match="s3://no-such-bucket/x is not there; correct bucket"):
        inspected("s3://no-such-bucket/x")


def test_unreachable_endpoint_is_reported(bucket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    tier = ObjectStoreTier("s3://bucket/models/m", QUICK)
    with pytest.raises(Unavailable, match="endpoint"):
        tier.files()
    tier.close()


@pytest.mark.parametrize("source", ["s3://", "s3:///x", "s3://bucket/x?y", "gs://", "az://"])
def test_invalid_urls_are_refused(source: str) -> None:
    with pytest.raises(InvalidModel, match="s3://bucket/prefix"):
        ObjectStoreTier(source)


def test_a_load_is_kept_and_checked(bucket: Path, tmp_path: Path) -> None:
    sources = sources_at(tmp_path / "home")
    info = sources.inspect("s3://bucket/models/m", trust_remote_code=False)
    assert info.files == 2
    tier = sources.open(info.source, info.revision)
    for file in tier.files():
        tier.read(file, 0, memoryview(bytearray(file.size)))
    tier.finish()
    assert tier.get_settled_event().wait(60)
    tier.close()
    directory = sources.cache.lookup(info.revision)
    assert directory is not None
    assert (directory / SHARD).read_bytes() == (bucket / SHARD).read_bytes()


@pytest.fixture
def azurite(tmp_path: Path) -> Iterator[int]:
    command = os.environ.get("THAW_TEST_AZURITE") or shutil.which("azurite-blob")
    if command is None:
        pytest.skip("azurite is not installed (npm install -g azurite)")
    port = free_port()
    with (tmp_path / "azurite.log").open("wb") as log:
        process = subprocess.Popen(
            [command, "--silent", "--inMemoryPersistence", "--skipApiVersionCheck", "--blobPort", str(port)], stdout=log, stderr=log
        )
    listening(port, process)
    yield port
    stop(process)


def test_a_container_s_files(azurite: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import obstore
    from obstore.store import AzureStore

    endpoint = f"http://127.0.0.1:{azurite}/{AZURITE_ACCOUNT}"
    for name, value in {
        "AZURE_STORAGE_ACCOUNT_NAME": AZURITE_ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": AZURITE_KEY,
        "AZURE_STORAGE_ENDPOINT": endpoint,
    }.items():
        monkeypatch.setenv(name, value)
    directory = tmp_path / "m"
    write_checkpoint(directory, tensors(megabytes=4), shards=2)
    store = AzureStore("models", client_options={"allow_http": True})
    _create_container(endpoint)
    for path in directory.iterdir():
        obstore.put(store, f"m/{path.name}", path.read_bytes(), use_multipart=False)
    tier = ObjectStoreTier("az://models/m", QUICK)
    assert [f.name for f in tier.files()] == sorted(p.name for p in directory.iterdir())
    assert read(tier) == (directory / SHARD).read_bytes()
    tier.close()
    with pytest.raises(CheckpointInvalid, match="holds nothing"):
        inspected("az://models/none")


def _create_container(endpoint: str) -> None:
    """Create a container by a request with a SharedKey signature: obstore cannot."""
    date = email.utils.formatdate(usegmt=True)
    headers = {"x-ms-date": date, "x-ms-version": "2021-08-06"}
    canonical = "".join(f"{k}:{v}\n" for k, v in sorted(headers.items()))
    text = f"PUT\n\n\n\n\ntext/plain\n\n\n\n\n\n\n{canonical}/{AZURITE_ACCOUNT}/{AZURITE_ACCOUNT}/models\nrestype:container"
    signature = base64.b64encode(hmac.new(base64.b64decode(AZURITE_KEY), text.encode(), hashlib.sha256).digest()).decode()
    request = Request(f"{endpoint}/models?restype=container", method="PUT", headers=headers, data=b"")
    request.add_header("Authorization", f"SharedKey {AZURITE_ACCOUNT}:{signature}")
    request.add_header("Content-Type", "text/plain")
    urlopen(request).close()


@pytest.mark.parametrize("asked", [False, True])
def test_cloud_metadata_address_is_contacted_only_if_configured(monkeypatch: pytest.MonkeyPatch, asked: bool) -> None:
    """The cloud's metadata address is contacted only if that is configured.

    There are no credentials. The store and the metadata service are one listener, which answers 403
    and records the requests.
    """
    paths: list[str] = []

    class Both(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            paths.append(self.path)
            self.send_response(403)
            self.send_header("content-length", "0")
            self.end_headers()

        do_GET = do_PUT = _answer

        def log_message(self, *_: object) -> None: ...

    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    with ThreadingHTTPServer(("127.0.0.1", 0), Both) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", url)
        monkeypatch.setenv("THAW_CLOUD_IDENTITY", str(asked).lower())
        try:
            with pytest.raises((InvalidModel, Unavailable)):
                ObjectStoreTier("s3://bucket/model").files()
        finally:
            server.shutdown()
    assert any("/latest/" in path for path in paths) is asked
    assert paths
