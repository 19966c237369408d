"""Becomes an engine's program, bound to its host.

Run `python -IS spawn.py PARENT CGROUP_FILES NICENESS NETWORK -- PROGRAM ARGUMENT…`.

It joins the control groups whose `cgroup.procs` files are given (separated by colons), sets the
niceness, enters a network namespace if NETWORK requests one, asks the kernel to kill it when its
parent dies, and executes the program. It runs by file name in a bare interpreter, so that it needs
neither the host's modules nor code between fork and exec.

NETWORK is empty for the machine's network, `own` for a namespace with only a loopback, or
`PORT:SOCKET` for one with a relay from the Unix socket SOCKET to that port of the loopback.
`python -IS spawn.py --try-network` exits with 0 where that is possible.
"""

import ctypes
import fcntl
import os
import signal
import socket
import struct
import sys

PR_SET_PDEATHSIG = 1
NOT_STARTED = 127
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
SIOCSIFFLAGS = 0x8914
IFF_UP = 1
_TRY = "--try-network"


def main() -> int:
    if sys.argv[1:] == [_TRY]:
        _own_network()
        return 0
    parent, files, niceness, network, separator, *program = sys.argv[1:]
    assert separator == "--"
    for path in filter(None, files.split(":")):
        with open(path, "w") as file:  # noqa: PTH123  # only necessary imports
            file.write("0")
    _lower_priority(int(niceness))
    if network:
        _own_network()
        port, _, path = network.partition(":")
        if path:
            _relay(path, port)
    # After the network: a change of credentials clears this setting.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        return NOT_STARTED  # the host died before the setting took effect
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(program[0], program)
    except OSError as e:
        sys.stderr.write(f"{program[0]} cannot be started: {e.strerror}\n")
        return NOT_STARTED


def _own_network() -> None:
    """Enter a new network namespace.

    Root needs no user namespace for it. Raises `OSError`.
    """
    uid, gid = os.geteuid(), os.getegid()
    try:
        _unshare(CLONE_NEWNET)
    except PermissionError:
        _unshare(CLONE_NEWUSER | CLONE_NEWNET)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123
                file.write(text)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))


def _unshare(flags: int) -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(flags):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _relay(path: str, port: str) -> None:
    """Start the relay in the engine's session, but not as its child.

    Engines may wait for any child of theirs.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(4096)
    child = os.fork()
    if not child:
        if os.fork():
            os._exit(0)
        listener.set_inheritable(True)
        program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "relay.py")  # noqa: PTH100, PTH118, PTH120
        os.execv(sys.executable, [sys.executable, "-IS", program, str(listener.fileno()), port])
    os.waitpid(child, 0)
    listener.close()


def _lower_priority(niceness: int) -> None:
    os.nice(niceness)
    try:
        # With autogrouping, niceness counts only within the session; the group's niceness counts
        # against other sessions.
        with open("/proc/self/autogroup", "w") as file:  # noqa: PTH123
            file.write(str(niceness))
    except OSError:
        pass  # no autogrouping


if __name__ == "__main__":
    sys.exit(main())
