"""A real web server, with TLS: nginx."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from shared.errors import CheckpointInvalid, Unavailable
from shared.ports import free_port
from tests.support.sources import sources_at
from tests.unit.loader.checkpoints import tensors, write_checkpoint
from weights.tiers.http import HttpTier
from weights.tiers.retry import Backoff

pytestmark = pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed (apt-get install nginx-light)")
ONCE = Backoff(attempts=1)
PIECE = 5_000_000


@dataclass
class Nginx:
    directory: Path
    http: str
    https: str
    certificate: Path


@pytest.fixture(scope="module")
def nginx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    home = tmp_path_factory.mktemp("nginx")
    home.chmod(0o755)
    write_checkpoint(home / "www" / "m", tensors(megabytes=30), shards=2)
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", home / "key", "-out", home / "certificate", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        check=True,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    plain, secure = free_port(), free_port()
    paths = "".join(f"{kind}_temp_path {home}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    (home / "conf").write_text(
        f"{'user root; ' if os.getuid() == 0 else ''}daemon off; worker_processes 1; pid {home}/pid; error_log {home}/error.log; "
        f"events {{}} http {{ access_log off; sendfile on; {paths}"
        f"server {{ listen 127.0.0.1:{plain}; listen 127.0.0.1:{secure} ssl; ssl_certificate {home}/certificate; "
        f"ssl_certificate_key {home}/key; root {home}/www; location /moved/ {{ rewrite ^/moved/(.*)$ /m/$1 redirect; }} }} }}"
    )
    process = subprocess.Popen(["nginx", "-c", str(home / "conf"), "-p", str(home)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (home / "pid").exists() or not (home / "pid").read_text().strip():
        assert process.poll() is None, (home / "error.log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    yield Nginx(home / "www" / "m", f"http://127.0.0.1:{plain}", f"https://localhost:{secure}", home / "certificate")
    process.terminate()
    process.wait(60)


def assert_all_read(tier: HttpTier, directory: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        for file in tier.files():
            data = bytearray(file.size)
            offsets = range(0, file.size, PIECE)
            list(threads.map(lambda at, f=file, d=data: tier.read(f, at, memoryview(d)[at : at + PIECE]), offsets))
            assert bytes(data) == (directory / file.name).read_bytes()
    tier.close()


def test_ranges_by_four_connections(nginx: Nginx) -> None:
    assert_all_read(HttpTier(f"{nginx.http}/m", ONCE), nginx.directory)


def test_nginx_with_tls_needs_a_trusted_certificate(nginx: Nginx, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match="CERTIFICATE_VERIFY_FAILED"):
        HttpTier(f"{nginx.https}/m", ONCE).files()
    monkeypatch.setenv("SSL_CERT_FILE", str(nginx.certificate))
    assert_all_read(HttpTier(f"{nginx.https}/m", ONCE), nginx.directory)


class ConnectProxy:
    """A proxy that supports CONNECT with a user and a password."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.heads: list[bytes] = []
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            head = b""
            while b"\r\n\r\n" not in head and (got := client.recv(4096)):
                head += got
            if not head:
                client.close()
                return
            self.heads.append(head)
            host, _, port = head.split()[1].decode().rpartition(":")
            server = socket.create_connection((host, int(port)))
            self._sockets += [client, server]
            client.sendall(b"HTTP/1.1 200 Connected\r\n\r\n")
            for one, other in ((client, server), (server, client)):
                self._threads.append(threading.Thread(target=self._pass_on, args=(one, other)))
                self._threads[-1].start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(65536):
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self) -> None:
        socket.create_connection(("127.0.0.1", self.port)).close()  # wakes the accepting thread, which exits
        for thread in self._threads:
            thread.join(60)
        for sock in (*self._sockets, self._listener):
            sock.close()


def test_tls_through_a_proxy(nginx: Nginx, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = ConnectProxy()
    monkeypatch.setenv("SSL_CERT_FILE", str(nginx.certificate))
    monkeypatch.setenv("https_proxy", f"http://u:p@127.0.0.1:{proxy.port}")
    monkeypatch.setenv("no_proxy", "")
    assert_all_read(HttpTier(f"{nginx.https}/m", ONCE), nginx.directory)
    proxy.close()
    assert proxy.heads
    assert all(b"Proxy-Authorization: Basic dTpw" in head for head in proxy.heads)


def test_redirects_of_nginx_are_followed(nginx: Nginx) -> None:
    assert_all_read(HttpTier(f"{nginx.http}/moved", ONCE), nginx.directory)


def test_model_from_nginx_is_served_from_the_cache(nginx: Nginx, tmp_path: Path) -> None:
    sources = sources_at(tmp_path)
    info = sources.inspect(f"{nginx.http}/m", trust_remote_code=False)
    tier = sources.open(info.source, info.revision)
    for file in tier.files():
        tier.read(file, 0, memoryview(bytearray(file.size)))
    tier.finish()
    assert tier.get_settled_event().wait(60)
    tier.close()
    assert sources.inspect(str(sources.cache.lookup(info.revision)), trust_remote_code=False).weights_bytes == info.weights_bytes
    (nginx.directory / "tokenizer.json").write_text('{"changed": true}')
    assert sources.open(info.source, info.revision).directory is not None, "the registered revision is here"
    with pytest.raises(CheckpointInvalid, match="register it again"):
        sources_at(tmp_path / "empty").open(info.source, info.revision)
