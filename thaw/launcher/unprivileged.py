"""Run a program without root: `python -I unprivileged.py [--setuid UID] PROGRAM`.

PostgreSQL refuses to run as root. In a user namespace of its own, root appears to it as an ordinary
user, while its files stay root's under the state directory. Where namespaces are refused (some
containers), `--setuid` becomes another user for good. Imports only the standard library: it runs by
path, before anything else.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

CLONE_NEWUSER = 0x10000000
CHECK = "--check"
"""Enter a user namespace and end; the exit status shows whether it worked."""
INSIDE_ID = 1000
"""The id of root inside the namespace; any id but 0 works."""


def enter_user_namespace() -> None:
    """Become user INSIDE_ID in a new user namespace.

    Raises:
        OSError: The kernel or a container refuses it.
    """
    user, group = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUSER) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{INSIDE_ID} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{INSIDE_ID} {group} 1")


def namespaces_work() -> bool:
    """True if a child of this process can enter a user namespace.

    The child executes this file: only a process with one thread may enter a namespace, and
    libraries (OpenTelemetry's exporters) start their threads again in a forked one.
    """
    if not sys.platform.startswith("linux"):
        return False
    import subprocess  # not needed when this file is executed

    command = (sys.executable, "-I", str(Path(__file__).resolve()), CHECK)
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 0


def main(arguments: list[str]) -> None:
    if arguments == [CHECK]:
        enter_user_namespace()
        return
    if arguments[0] == "--setuid":
        user = int(arguments[1])
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
        arguments = arguments[2:]
    else:
        enter_user_namespace()
    os.execvp(arguments[0], arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
