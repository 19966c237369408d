"""Container engines with a Docker API: Docker and Podman, with the test image."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.docker.engine import run

_LIMITS = '[containers]\ndefault_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]\n[engine]\nruntime = "runc"\n'
"""Podman raises limits beyond a container user's rights, and crun refuses machines with both
versions of control groups.
"""


@dataclass(frozen=True)
class Boxes:
    """A container engine.

    Attributes:
        command: Its command line.
        socket: Its API.
    """

    command: str
    socket: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __call__(self, *arguments: str, within: float = 180) -> str:
        """Return the output of `docker ARGUMENTS` or `podman ARGUMENTS`."""
        return run(self.command, *arguments, within=within, env={**os.environ, **self.environment})

    def containers(self, instance: str) -> list[str]:
        return self("ps", "-aq", "--filter", f"label=thaw.instance={instance}").split()


def docker_boxes() -> Boxes:
    return Boxes("docker", Path("/var/run/docker.sock"))


@contextlib.contextmanager
def podman_boxes(directory: Path) -> Iterator[Boxes]:
    """Run `podman system service` with its images and containers in `directory`.

    Skips the test, with the reason, if Podman is not installed.
    """
    if shutil.which("podman") is None:
        pytest.skip("needs Podman; there is no podman command (Debian: podman, catatonit, netavark)")
    configuration = directory / "containers.conf"
    configuration.write_text(_LIMITS if shutil.which("runc") else "")
    (directory / "storage.conf").write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{directory}/graph"\nrunroot = "{directory}/run"\n'
    )
    environment = {"CONTAINERS_CONF": str(configuration), "CONTAINERS_STORAGE_CONF": str(directory / "storage.conf")}
    # A socket path has a maximum length that a test's directory may exceed.
    with tempfile.TemporaryDirectory(prefix="podman-") as place, (directory / "service.log").open("wb") as log:
        boxes = Boxes("podman", Path(place) / "s", environment)
        command = ["podman", "system", "service", "--time=0", f"unix://{boxes.socket}"]
        service = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **environment})
        try:
            if not _answers(boxes.socket, service):
                pytest.skip(f"needs Podman's service; it does not answer: {(directory / 'service.log').read_text()[-300:]}")
            yield boxes
            with contextlib.suppress(subprocess.SubprocessError):
                boxes("system", "reset", "-f")
        finally:
            service.terminate()
            service.wait(120)


def _answers(path: Path, service: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and service.poll() is None:
        with socket.socket(socket.AF_UNIX) as s, contextlib.suppress(OSError):
            s.connect(str(path))
            return True
        time.sleep(0.05)
    return False
