"""The private endpoint between a host and its engine (ADR 0050).

No other user of the machine should reach it.

1. The engine listens on a Unix socket in a directory that only this user may enter.
2. The engine listens on the loopback of its own network namespace, and a relay in that namespace
   listens on such a socket.
3. The engine listens on the machine's loopback, with a random key if it supports keys.
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
from services.enginehost.runtimes.reaper import read_start_time
from shared.contracts.models import ENGINE_SOURCE, ContainerOptions
from shared.errors import EngineFailed

MAX_SOCKET_PATH = 107
"""Maximum length of a Unix socket's path in bytes."""
LOOPBACK = "127.0.0.1"
_NAME = "engine.sock"
_SHARED = "s"
CONTAINER_DIRECTORY = "/run/thaw"
"""Mount point of the socket's directory in a container."""
_LONGEST_NAME = 36
"""Bytes of the longest name of a socket in such a directory: those of vLLM are UUIDs."""
_TRIAL_WITHIN_S = 30.0
LOOPBACK_ENVIRONMENT = {
    "VLLM_HOST_IP": LOOPBACK,
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TP_SOCKET_IFNAME": "lo",
}
"""Settings for libraries that would otherwise look for another interface than the loopback."""


@dataclass(frozen=True)
class Endpoint:
    """The address at which the host connects to its engine.

    Args:
        socket: A Unix socket in `directory`; None: a port on the machine's loopback.
        engine_listens: The engine itself listens on the socket, not a relay.
        has_own_network: The engine runs in its own network namespace.
    """

    socket: Path | None = None
    engine_listens: bool = False
    has_own_network: bool = False
    directory: Path | None = None

    @property
    def is_private(self) -> bool:
        """True if no other user of the machine can reach the engine."""
        return self.socket is not None

    def close(self) -> None:
        """Remove the socket and its directory."""
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)


LOOPBACK_ENDPOINT = Endpoint()


def choose_process_endpoint(launch: Launch, *, takes_socket: bool, isolates: bool) -> Endpoint:
    """Choose the endpoint of an engine that runs as processes.

    Blocks for some milliseconds.

    Args:
        launch: The engine's parameters.
        takes_socket: The driver passes a socket to the engine.
        isolates: The driver allows a network namespace.

    Raises:
        EngineFailed: The model requires a network namespace, and this node cannot create one.
    """
    spec = launch.card.spec
    engine_listens = any("{socket}" in part for part in spec.command) if spec.command else takes_socket
    wanted = spec.network == "private" or (spec.network is None and _is_local(launch) and isolates and not spec.command)
    has_own_network = wanted and can_isolate()
    if spec.network == "private" and not has_own_network:
        raise EngineFailed(
            f"{launch.card.name} requires a private network, and this node may not create one. Run the node as root, allow user "
            "namespaces, or set `network: host`"
        )
    if not engine_listens and not has_own_network:
        return LOOPBACK_ENDPOINT
    directory = make_directory(launch.settings.node_state)
    return Endpoint(directory / _NAME, engine_listens, has_own_network, directory)


def choose_container_endpoint(launch: Launch, options: ContainerOptions, *, takes_socket: bool) -> Endpoint:
    """Choose the endpoint of an engine in a container. Blocks for some milliseconds.

    The container's process may run as another user, and only root may connect to another user's
    socket: other nodes use a port.
    """
    takes = any("{socket}" in part for part in options.args) if options.args is not None else takes_socket
    if not takes or os.geteuid():
        return LOOPBACK_ENDPOINT
    directory = make_directory(launch.settings.node_state)
    inside = directory / _SHARED
    inside.mkdir()
    inside.chmod(0o777)  # for any user in the container; other users cannot enter the parent directory
    alone = launch.card.spec.network == "private" or (launch.card.spec.network is None and _is_local(launch))
    return Endpoint(inside / _NAME, True, alone, directory)


def _is_local(launch: Launch) -> bool:
    """True if the engine has the whole model on this node."""
    return not launch.remote and not launch.card.info.source.startswith(ENGINE_SOURCE)


def make_directory(node_state: Path) -> Path:
    """Create a directory that only this user may enter, named after this process."""
    parent = node_state / "run"
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    _sweep(parent)
    name = f"{os.getpid()}-{read_start_time(os.getpid())}-{secrets.token_hex(4)}"
    if len(os.fsencode(parent / name)) + 1 + _LONGEST_NAME > MAX_SOCKET_PATH:
        return Path(tempfile.mkdtemp(prefix="thaw-engine-"))
    (parent / name).mkdir(mode=0o700)
    return parent / name


def _sweep(parent: Path) -> None:
    """Remove directories of dead hosts whose reapers were killed too."""
    for directory in parent.iterdir():
        with contextlib.suppress(ValueError):
            pid, start, _ = directory.name.split("-")
            if read_start_time(int(pid)) != int(start):
                shutil.rmtree(directory, ignore_errors=True)


@cache
def can_isolate() -> bool:
    """True if this node can create a network namespace with a loopback."""
    argv = [sys.executable, "-IS", spawn.__file__, "--try-network"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(argv, capture_output=True, timeout=_TRIAL_WITHIN_S, check=False).returncode == 0
    return False
