"""Pools with weights in them, without a loader."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from shared.contracts.segment import Extent
from tests.support.stopping import killed_at_exit
from weights.formats.checkpoint import open_checkpoint
from weights.formats.segment import lay_out
from weights.pool.chunks import parts
from weights.pool.memory import PoolMemory
from weights.pool.region import Region
from weights.transfer.fill import Filling
from weights.transfer.link import Link
from weights.transfer.pieces import cut
from weights.transfer.reader import FilesReader

ROOT = Path(__file__).resolve().parents[3]


def fill(pool: PoolMemory, directory: Path, chunks: Sequence[int], weights_id: str = "w") -> Region:
    """Load the checkpoint in `directory` into as many of `chunks` as it needs."""
    layout = lay_out(open_checkpoint(directory), weights_id)
    region = Region(pool, chunks[: len(parts(layout.total_bytes))], layout.total_bytes)
    pieces = cut(layout)
    filling, link = Filling(layout, region, pieces), Link("test", 2)
    try:
        filling.write_head()
        filling.run(FilesReader(layout.places, pieces, region), link)
    finally:
        link.close()
    region.zap_all()
    return region


@contextmanager
def mapper(path: Path, extents: Sequence[Extent]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that maps these extents of the pool.

    It unmaps them when it reads a line.
    """
    listed = [(e.offset, e.nbytes) for e in extents]
    script = (
        "from shared.mapping import map_extents\nfrom shared.contracts.segment import Extent\n"
        f"m = map_extents({str(path)!r}, [Extent(offset=o, nbytes=n) for o, n in {listed}])\n"
        "print('mapped', flush=True)\ninput()\nm.close()\nprint('unmapped', flush=True)\ninput()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with killed_at_exit(
        subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"mapped\n"
        try:
            yield process
        finally:
            process.kill()
