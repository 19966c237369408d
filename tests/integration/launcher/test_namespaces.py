"""The check for user namespaces, from a process whose forks have threads."""

from __future__ import annotations

import subprocess
import sys

from thaw.launcher.unprivileged import namespaces_work

PROGRAM = """
import os, threading
from thaw.launcher.unprivileged import namespaces_work
os.register_at_fork(after_in_child=lambda: threading.Thread(target=threading.Event().wait, daemon=True).start())
print(namespaces_work())
"""


def test_threads_of_forked_processes_do_not_count() -> None:
    """OpenTelemetry's exporters start such a thread; PostgreSQL then ran as another user."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == str(namespaces_work())
