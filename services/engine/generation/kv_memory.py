"""Address space for keys and values, backed by memory where it is written.

A range is as long as the longest context and has no memory at first. The kernel adds a page with
the first write to it, so a growing context is never copied. All pages are freed with the last
tensor that refers to the range.
"""

from __future__ import annotations

import contextlib
import mmap

import torch

PAGE = mmap.PAGESIZE
_MAP_NORESERVE = 0x4000
_MADV_NOHUGEPAGE = 15
_MADV_DONTDUMP = 16


def reserve(nbytes: int) -> torch.Tensor:
    """Reserve `nbytes` of addresses, as bytes on the CPU.

    They use small pages only: with huge ones, the memory of a short context would depend on the
    number of layers and heads rather than on its tokens.

    Raises:
        OSError: The kernel commits no more than it has (`vm.overcommit_memory=2`).
    """
    mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    for advice in (_MADV_NOHUGEPAGE, _MADV_DONTDUMP):
        with contextlib.suppress(OSError):  # a kernel built without it
            mapped.madvise(advice)
    return torch.frombuffer(mapped, dtype=torch.uint8)
