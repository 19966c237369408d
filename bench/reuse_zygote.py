"""A zygote whose engines book or borrow their KV cache, for bench.reuse.

THAW_BENCH_KV chooses it: `booked` engines have memory of their own for the whole cache, `elastic`
ones borrow pages of the device as sequences grow. Run as `python -m bench.reuse_zygote SOCKET`.
"""

from __future__ import annotations

import os
import sys

from services.engine import app, zygote

VARIABLE = "THAW_BENCH_KV"
KINDS = ("booked", "elastic")


def apply(kind: str) -> None:
    """Choose the KV cache of the engines that this process forks.

    Raises:
        ValueError: An unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"{VARIABLE} is {kind!r}; allowed: {', '.join(KINDS)}")
    app.borrows_pages = lambda start: kind == "elastic" and start.separate_memory


if __name__ == "__main__":
    apply(os.environ.get(VARIABLE, "booked"))
    sys.exit(zygote.main())
