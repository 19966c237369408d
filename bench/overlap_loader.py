"""A loader without a mesh, for `bench.overlap`: one load to one separate cpu device.

    python -m bench.overlap_loader HOME MODEL GROUP_BYTES BYTES_PER_SECOND TOUCHED

It prints the model's card, waits for a line, loads, and prints the reply to an attach until the
index and until the last byte. It ends with its standard input. BYTES_PER_SECOND paces the copies; 0
does not. TOUCHED is 1 if the device's pages have memory before the load.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

from services.loader.adapters.device_copies import Copies
from services.loader.adapters.reclaim import Reclaimer
from services.loader.adapters.records import Records
from services.loader.adapters.run import Threads
from services.loader.adapters.runs import Runs
from services.loader.domain.events import Event
from services.loader.handlers import Loader
from services.loader.local_socket import LocalReaders, listening
from shared.contracts.loader import AttachWeights, Inspected, InspectModel
from shared.contracts.loader_socket import loader_socket
from shared.contracts.models import ModelCard, ModelSpec
from shared.contracts.segment import segment_prefix
from weights.cache.store import SsdCache
from weights.pool.chunks import Chunks
from weights.pool.memory import PoolMemory
from weights.pool.shm import SHM
from weights.sources.sources import Sources
from weights.store.generations import file_name
from weights.store.node_devices import NodeDevices
from weights.store.separate import SeparateDevice
from weights.store.units import PAGE_BYTES

NODE, INSTANCE, DEVICE = "bench", "instance", "cpu:1"
_POOL_BYTES = 4 << 30


async def serve(home: Path, model: str, group_bytes: int, bytes_per_second: float, touched: bool) -> None:
    node = home / "nodes" / NODE
    (node / "loader" / "weights").mkdir(parents=True)
    records = Records(node / "loader", segment_prefix(home, NODE))
    sources = Sources(SsdCache(home / "cache", 0), (home / "small",))
    pool = PoolMemory(records.pool_name, _POOL_BYTES)
    pages = file_name(records.prefix, DEVICE, "bench")
    weights_bytes = sum(f.stat().st_size for f in Path(model).glob("*.safetensors"))
    device = SeparateDevice(
        DEVICE,
        2 * weights_bytes + PAGE_BYTES,
        pages,
        host_bytes_per_second=bytes_per_second or None,
        group_bytes=group_bytes,
    )
    if touched:
        allocate(SHM / pages)

    def workers(emit: Callable[[Event], None]) -> tuple[Runs, Reclaimer]:
        copies = Copies(NodeDevices({DEVICE: device}), pool, emit)
        return Runs(pool, sources, emit, Threads(), copies=copies), Reclaimer(pool, emit)

    loader = Loader(NODE, "bench", records, sources, workers, Chunks(pool.count, _POOL_BYTES))
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    try:
        async with listening(loader_socket(node), LocalReaders(loader, SHM, "bench")):
            spec = ModelSpec(name="m", source=model)
            found = await loader.handle(InspectModel(spec=spec))
            assert isinstance(found, Inspected)
            card = ModelCard(spec=spec, info=found.info, created=0)
            print(card.model_dump_json(), flush=True)
            await lines.readline()
            for until in ("index", "complete"):
                ask = AttachWeights(instance_id=INSTANCE, card=card, until=until, device=DEVICE)
                print((await loader.handle(ask)).model_dump_json(), flush=True)
            await lines.read()
    finally:
        await loader.stop()
        pool.close(unlink=True)
        (SHM / pages).unlink(missing_ok=True)  # an engine still maps it, so that closing keeps it


def allocate(file: Path) -> None:
    """Give all pages of a file their memory."""
    fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def main() -> None:
    home, model, group, rate, touched = sys.argv[1:]
    asyncio.run(serve(Path(home), model, int(group), float(rate), touched == "1"))


if __name__ == "__main__":
    main()
