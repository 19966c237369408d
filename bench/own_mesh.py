"""A mesh that a benchmark starts for itself, under a state directory of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.ports import free_port


@contextmanager
def own_mesh(*options: str, port: int | None = None) -> Iterator[dict[str, str]]:
    """Start `thaw up` in the background, and stop it at the end.

    Args:
        options: More options of `thaw up`.
        port: Of its gateway; a free one by default.

    Yields:
        The environment in which `thaw` finds this mesh.
    """
    with tempfile.TemporaryDirectory(prefix="thaw-bench-") as directory:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("THAW_")}
        environment["THAW_HOME"] = str(Path(directory) / "home")
        up = [sys.executable, "-m", "thaw", "up", "--detach", "--port", str(port or free_port()), *options]
        try:
            subprocess.run(up, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=600)
            yield environment
        finally:
            subprocess.run([sys.executable, "-m", "thaw", "down"], env=environment, check=False, stdout=subprocess.DEVNULL)
