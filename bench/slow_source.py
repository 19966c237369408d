"""Serve files with a fixed number of bytes per second for each connection.

The server is a slow source with a reproducible bandwidth.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.ports import free_port
from tests.support.servers import wait_for_port

_TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


@contextmanager
def slow_source(directory: Path, bytes_per_second: int) -> Iterator[str]:
    """The URL of `directory`, served by nginx.

    Raises RuntimeError where there is none.
    """
    nginx = shutil.which("nginx")
    if nginx is None:
        raise RuntimeError("this needs nginx: apt install nginx-light")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="thaw-bench-web-") as work:
        configuration = Path(work) / "nginx.conf"
        temporary = " ".join(f"{kind}_temp_path {work}/{kind};" for kind in _TEMPORARY)
        configuration.write_text(
            f"daemon off; pid {work}/pid; error_log {work}/error.log; worker_processes 1; user root;\n"
            "events { worker_connections 256; }\n"
            f"http {{ access_log off; sendfile on; limit_rate {bytes_per_second}; {temporary}\n"
            f"server {{ listen 127.0.0.1:{port}; root {directory}; }} }}\n"
        )
        process = subprocess.Popen(
            [nginx, "-c", str(configuration), "-p", work], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            wait_for_port(port, process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(10)
