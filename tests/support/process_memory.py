"""Memory of processes, apart from what starts and ends of other processes change.

A page of a file counts in the PSS of a process by the number of processes that map it. The PSS
grows if another one ends.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path


def count_memory(pids: Iterable[int]) -> Counter[str]:
    """Return the sums of all fields of `smaps_rollup` of the processes that exist, in bytes.

    `RssShmem` is that of `status`.
    """
    found: Counter[str] = Counter()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            _, *lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            lines += [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssShmem:")]
            for name, _, value in (line.partition(":") for line in lines):
                found[name] += int(value.split()[0]) * 1024
    return found


def held_bytes(pids: Iterable[int]) -> int:
    """Return the memory of the processes without pages of files, resident or in swap.

    Pages that forked processes share count in each of them.
    """
    memory = count_memory(pids)
    return memory["Anonymous"] + memory["Pss_Shmem"] + memory["Swap"]


def bounds_of_pss(pids: Iterable[int]) -> tuple[int, int]:
    """Return the bounds of the PSS: other processes may map the same files, or none may."""
    memory = count_memory(pids)
    least = memory["Pss_Anon"] + memory["Pss_Shmem"]
    return least, least + memory["Rss"] - memory["Anonymous"] - memory["RssShmem"]
