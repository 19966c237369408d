"""Fork a sibling instead of a child, and give it a command line and an environment of its own.

`os.fork` makes children of the calling process. A sibling (`CLONE_PARENT`) is a child of the
caller's parent, which waits for it, signals it and learns its exit status like that of any process
it started itself.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct
import sys
from pathlib import Path

_CLONE_PARENT = 0x00008000
_CLONE_CHILD_CLEARTID = 0x00200000
_CLONE_CHILD_SETTID = 0x01000000
_PR_SET_MM = 35
_PR_SET_MM_MAP = 14
_PR_GET_TID_ADDRESS = 40
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}
_KEPT: list[ctypes.Array[ctypes.c_char]] = []
"""Buffers that the kernel reads for /proc/PID/cmdline and environ."""


def supports_cloning() -> bool:
    """Return whether this system can fork siblings.

    It takes Linux, a known architecture and a kernel with checkpoint support, as distributions
    build it.
    """
    if not sys.platform.startswith("linux") or platform.machine() not in _SYS_CLONE:
        return False
    own = Path("/proc/self")
    return _tid_address() is not None and _rename((own / "cmdline").read_bytes(), (own / "environ").read_bytes())


def fork_sibling() -> int:
    """Fork, as a child of this process's parent.

    This process must have no other thread. Handlers that C libraries registered with
    `pthread_atfork` do not run; those of `os.register_at_fork` do.

    Returns:
        0 in the sibling, and its pid in this process.
    """
    python = ctypes.pythonapi
    # PyDLL keeps the interpreter's lock during the call: the sibling returns from it, too.
    libc = ctypes.PyDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    # As in fork(3) of glibc: the kernel stores the sibling's thread id where glibc caches it.
    tid = ctypes.c_void_p(_tid_address())
    none = ctypes.c_void_p(None)
    flags = ctypes.c_long(_CLONE_PARENT | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID | signal.SIGCHLD)
    last = (tid, none) if platform.machine() == "x86_64" else (none, tid)
    python.PyOS_BeforeFork()
    pid: int = libc.syscall(ctypes.c_long(_SYS_CLONE[platform.machine()]), flags, none, none, *last)
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    if pid < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return pid


def set_identity(arguments: list[str], environment: dict[str, str]) -> None:
    """Set what other processes read as this process's command line and environment.

    `os.environ` is not changed.
    """
    command = b"".join(os.fsencode(a) + b"\0" for a in arguments)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    if not _rename(command, variables):
        raise OSError("the kernel does not let a process set its command line")


def _tid_address() -> int | None:
    address = ctypes.c_void_p()
    found = ctypes.CDLL(None).prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0)
    return address.value if found == 0 else None


def _rename(command: bytes, variables: bytes) -> bool:
    """Move the kernel's pointers to the command line and the environment to copies of these."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start_code, end_code, start_stack = (int(f) for f in fields[23:26])
    start_data, end_data, start_brk = (int(f) for f in fields[42:45])
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    brk = libc.sbrk(0)
    buffers = [ctypes.create_string_buffer(text, max(1, len(text))) for text in (command, variables)]
    (arguments, argument_end), (environment, environment_end) = (
        (at := ctypes.addressof(buffer), at + len(text)) for buffer, text in zip(buffers, (command, variables), strict=True)
    )
    # struct prctl_mm_map, with no auxiliary vector and no executable.
    memory = struct.pack(
        "=11QQIi",
        *(start_code, end_code, start_data, end_data, start_brk, brk, start_stack),
        *(arguments, argument_end, environment, environment_end),
        *(0, 0, -1),
    )
    done = libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.c_char_p(memory), ctypes.c_ulong(len(memory)), 0)
    if done != 0:
        return False
    _KEPT[:] = buffers
    return True
