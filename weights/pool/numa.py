"""Bind memory to a NUMA node (`mbind`), and read a binding back (`get_mempolicy`)."""

from __future__ import annotations

import ctypes
import errno
import os
import platform

_CALLS = {"x86_64": (237, 239), "aarch64": (235, 236)}
"""The numbers of mbind and get_mempolicy: no library has to be installed for two calls."""
_BIND, _OF_ADDRESS = 2, 2  # MPOL_BIND, MPOL_F_ADDR
_WORD = ctypes.sizeof(ctypes.c_ulong) * 8
_NODES = 1024
"""Most nodes that a kernel is built for (CONFIG_NODES_SHIFT is at most 10)."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def bind(address: int, nbytes: int, node: int) -> None:
    """Take the memory of these addresses from one node only.

    The binding of shared memory belongs to the file, and applies to whichever process allocates the
    memory. Memory that is already allocated stays where it is.

    Raises:
        OSError: The node does not exist or is not allowed (EINVAL), the kernel has no NUMA
            (ENOSYS), or a container forbids the call (EPERM).
    """
    mask = (ctypes.c_ulong * (_NODES // _WORD))()
    mask[node // _WORD] = 1 << node % _WORD
    _call(
        0,
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_ulong(_BIND),
        mask,
        ctypes.c_ulong(_NODES + 1),
        ctypes.c_ulong(0),
    )


def bound_to(address: int) -> tuple[int, ...] | None:
    """Return the nodes that the memory at this address is bound to; None without a binding.

    Raises:
        OSError: As `bind`.
    """
    mode, mask = ctypes.c_int(), (ctypes.c_ulong * (_NODES // _WORD))()
    _call(1, ctypes.byref(mode), mask, ctypes.c_ulong(_NODES), ctypes.c_void_p(address), ctypes.c_ulong(_OF_ADDRESS))
    if mode.value != _BIND:
        return None
    return tuple(i for i in range(_NODES) if mask[i // _WORD] >> i % _WORD & 1)


def _call(which: int, *arguments: object) -> None:
    numbers = _CALLS.get(platform.machine())
    if numbers is None:
        raise OSError(errno.ENOSYS, f"the calls of NUMA are not known for {platform.machine()}")
    if _libc.syscall(ctypes.c_long(numbers[which]), *arguments):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
