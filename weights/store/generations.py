"""Files of pages, one for each life of a loader (ADR 0054).

A restarted loader never writes to the file of an earlier one, whose pages engines may still map. It
renames that file, so that no engine opens it any more, and then frees the pages that no process
maps. The others count against the device until their processes end. An engine maps first and then
checks that the file still has its name; so the loader sees the mapping, or the engine sees the
change.
"""

from __future__ import annotations

import contextlib
import logging

from weights.pool import shm
from weights.pool.memory import PoolMemory
from weights.store.units import PAGE_BYTES

log = logging.getLogger(__name__)
CURRENT, EARLIER = "pages-", "left-"


def is_page_file(name: str, prefix: str) -> bool:
    """True for the name of a file of pages, in use or left by an earlier loader."""
    return name.startswith((prefix + CURRENT, prefix + EARLIER))


def file_name(prefix: str, device_id: str, boot_id: str) -> str:
    """Return the name under /dev/shm of a device's pages in one life of the loader."""
    return f"{prefix}{CURRENT}{device_id.replace(':', '')}-{boot_id[:8]}"


class EarlierPages:
    """The pages of an earlier loader's file that processes still map."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._memory = PoolMemory(name, PAGE_BYTES, chunk_bytes=PAGE_BYTES, keep=True)
        self._left = frozenset(range(self._memory.count))

    def free_unmapped(self) -> int:
        """Free the pages that no process maps, and return the number of mapped pages."""
        mapped = self._memory.mapped_by_others()
        self._memory.punch(page for page in sorted(self._left) if page not in mapped)
        self._left = frozenset(mapped)
        return len(mapped)

    def close(self, *, unlink: bool) -> None:
        self._memory.close(unlink=unlink)


def retire(prefix: str, device_id: str) -> list[EarlierPages]:
    """Rename the files of a device's earlier loaders, so that no new loader uses them.

    Returns:
        The files with pages that a process maps; the others are removed.
    """
    device = device_id.replace(":", "") + "-"
    for name in shm.segments(prefix + CURRENT + device):
        (shm.SHM / name).rename(shm.SHM / (prefix + EARLIER + name.removeprefix(prefix + CURRENT)))
    found = []
    for name in shm.segments(prefix + EARLIER + device):
        earlier = EarlierPages(name)
        if pages := earlier.free_unmapped():
            log.info("engines map pages of an earlier loader", extra={"file": name, "pages": pages})
            found.append(earlier)
        else:
            earlier.close(unlink=True)
    return found


def remove_unmapped(prefix: str, devices: frozenset[str]) -> None:
    """Remove the files of devices that the node no longer has.

    Engines that map them keep the memory.
    """
    known = tuple(f"{prefix}{kind}{d.replace(':', '')}-" for d in devices for kind in (CURRENT, EARLIER))
    for name in shm.segments(prefix):
        if is_page_file(name, prefix) and not name.startswith(known):
            with contextlib.suppress(FileNotFoundError):
                (shm.SHM / name).unlink()
