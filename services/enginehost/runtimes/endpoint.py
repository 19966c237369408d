"""How a host reaches its engine, so that no other user of the machine does (ADR 0050).

1. The engine listens on a Unix socket itself, in a directory that only this user may enter.
2. The engine listens on the loopback of a network of its own, and a relay in there listens on such a socket.
3. The engine listens on the machine's loopback, with a random key where it asks for one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from services.enginehost.drivers.port import Launch
from services.enginehost.runtimes import spawn
from services.enginehost.runtimes.reaper import started
from shared.contracts.models import ENGINE_SOURCE, ContainerOptions
from shared.errors import EngineFailed

MAX_SOCKET_PATH = 107
"""Bytes that a Unix socket's address can hold."""
LOOPBACK = "127.0.0.1"
_NAME = "engine.sock"
_SHARED = "s"
CONTAINER_DIRECTORY = "/run/thaw"
"""Where a container finds its socket's directory."""
_TRIED_WITHIN_S = 30.0
ALONE = {
    "VLLM_HOST_IP": LOOPBACK,
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TP_SOCKET_IFNAME": "lo",
}
"""What libraries would otherwise look for in a network that has nothing but a loopback."""


@dataclass(frozen=True)
class Reach:
    """`socket`: where the host connects to, in `directory`; None: the machine's loopback. `is_engines`: the engine itself listens there, not a relay.
    `has_own_network`: the engine runs in a network namespace of its own."""

    socket: Path | None = None
    is_engines: bool = False
    has_own_network: bool = False
    directory: Path | None = None

    @property
    def is_private(self) -> bool:
        """True if no other user of the machine reaches the engine."""
        return self.socket is not None

    def close(self) -> None:
        """Remove the socket and its directory."""
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)


ON_LOOPBACK = Reach()


def choose_reach(launch: Launch, *, takes_socket: bool, isolates: bool) -> Reach:
    """Decide how an engine that runs as processes is reached. Blocks for some milliseconds.

    Args:
        launch: What is started.
        takes_socket: The engine's driver passes a socket to it.
        isolates: The engine's driver allows a network of its own.

    Raises:
        EngineFailed: If the model asks for a network of its own and this node cannot make one.
    """
    spec = launch.card.spec
    is_engines = any("{socket}" in part for part in spec.command) if spec.command else takes_socket
    wanted = spec.network == "private" or (spec.network is None and _is_local(launch) and isolates and not spec.command)
    has_own_network = wanted and can_isolate()
    if spec.network == "private" and not has_own_network:
        raise EngineFailed(
            f"{launch.card.name} asks for a network of its own, and this node may not make one. Run the node as root, allow user "
            "namespaces, or say `network: host`."
        )
    if not is_engines and not has_own_network:
        return ON_LOOPBACK
    directory = make_directory(launch.settings.node_state)
    return Reach(directory / _NAME, is_engines, has_own_network, directory)


def choose_container_reach(launch: Launch, options: ContainerOptions, *, takes_socket: bool) -> Reach:
    """Decide how an engine in a container is reached. Blocks for some milliseconds.

    Only root may connect to a socket that another user's process has made, which the container's may be: other nodes use a port.
    """
    takes = any("{socket}" in part for part in options.args) if options.args is not None else takes_socket
    if not takes or os.geteuid():
        return ON_LOOPBACK
    directory = make_directory(launch.settings.node_state)
    inside = directory / _SHARED
    inside.mkdir()
    inside.chmod(0o777)  # whoever the container runs as; nobody else comes through the directory above
    alone = launch.card.spec.network == "private" or (launch.card.spec.network is None and _is_local(launch))
    return Reach(inside / _NAME, True, alone, directory)


def _is_local(launch: Launch) -> bool:
    """True if the engine has all of its model on this node."""
    return not launch.remote and not launch.card.info.source.startswith(ENGINE_SOURCE)


def make_directory(node_state: Path) -> Path:
    """A fresh directory that only this user may enter, named after this process."""
    parent = node_state / "run"
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    _sweep(parent)
    name = f"{os.getpid()}-{started(os.getpid())}-{secrets.token_hex(4)}"
    if len(os.fsencode(parent / name / _SHARED / _NAME)) > MAX_SOCKET_PATH:
        return Path(tempfile.mkdtemp(prefix="thaw-engine-"))
    (parent / name).mkdir(mode=0o700)
    return parent / name


def _sweep(parent: Path) -> None:
    """Remove directories of hosts that have ended without doing so, and whose reapers were killed too."""
    for directory in parent.iterdir():
        with contextlib.suppress(ValueError):
            pid, start, _ = directory.name.split("-")
            if started(int(pid)) != int(start):
                shutil.rmtree(directory, ignore_errors=True)


@cache
def can_isolate() -> bool:
    """True if this node may give a process a network namespace of its own, with its loopback up."""
    argv = [sys.executable, "-I", spawn.__file__, "--try-network"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(argv, capture_output=True, timeout=_TRIED_WITHIN_S, check=False).returncode == 0
    return False
