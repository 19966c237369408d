"""How long two paced devices take to get the weights of one instance, each its part or all of them:
`python -m bench.rank_parts [--rounds N] [--size SIZE] [--pace-mib N] [--json FILE]`.

Each load is one by a fresh loader to two cpu devices with memory of their own, whose links have a
pace. Rounds are interleaved. The time is from `PrepareWeights` to the last byte on each device.

all       both devices get all weights, at the same time
ranks     each device gets the part of a tensor-parallel rank, at the same time
in_turn   the same, the second rank after the first
stages    each device gets the layers of a pipeline stage, at the same time
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from bench.report import median, spread, write
from services.loader.adapters.device_copies import Copies
from services.loader.adapters.reclaim import Reclaimer
from services.loader.adapters.records import Records
from services.loader.adapters.run import Threads
from services.loader.adapters.runs import Runs
from services.loader.domain.events import Event
from services.loader.handlers import Loader
from shared.contracts.loader import AttachWeights, Inspected, InspectModel, PrepareWeights, WeightsAttached
from shared.contracts.models import ModelCard, ModelSpec
from shared.contracts.segment import PagesHandle, segment_prefix
from shared.contracts.stages import DevicePart, RankOf, split_layers, stage_holder
from thaw.demo.models import make_demo_model
from weights.cache.store import SsdCache
from weights.pool.chunks import Chunks
from weights.pool.memory import PoolMemory
from weights.pool.shm import SHM
from weights.sources.sources import Sources
from weights.store.generations import file_name
from weights.store.node_devices import NodeDevices
from weights.store.separate import SeparateDevice
from weights.store.units import PAGE_BYTES

CASES = ("all", "ranks", "in_turn", "stages")
DEVICES = ("cpu:1", "cpu:2")
_POOL_BYTES = 4 << 30
_MIB = 1 << 20


def parts_of(case: str, card: ModelCard) -> tuple[DevicePart, ...]:
    """Return what each device gets in a case."""
    sizes = card.info.layers
    assert sizes is not None
    stages = split_layers(sizes.count, len(DEVICES)) if case == "stages" else (None,) * len(DEVICES)
    is_ranked = case in ("ranks", "in_turn")
    ranks = [RankOf(index=i, count=len(DEVICES)) if is_ranked else None for i in range(len(DEVICES))]
    return tuple(
        DevicePart(holder=stage_holder("i", index), device=device, layers=stages[index], rank=ranks[index])
        for index, device in enumerate(DEVICES)
    )


async def load(case: str, model: Path, bytes_per_second: float) -> tuple[list[float], list[int]]:
    """Load once. Return the seconds until each device has its bytes, and these bytes."""
    async with _loader(model, bytes_per_second) as loader:
        spec = ModelSpec(name="m", source=str(model))
        found = await loader.handle(InspectModel(spec=spec))
        assert isinstance(found, Inspected)
        card = ModelCard(spec=spec, info=found.info, created=0)
        parts, began = parts_of(case, card), time.monotonic()
        rounds = [(p,) for p in parts] if case == "in_turn" else [parts]
        seconds, nbytes = [], []
        for together in rounds:
            await loader.handle(PrepareWeights(token=1, instance_id="i", card=card, parts=together))
            for ended, size in await asyncio.gather(*(_attach(loader, card, p) for p in together)):
                seconds.append(ended - began)
                nbytes.append(size)
        return seconds, nbytes


@asynccontextmanager
async def _loader(model: Path, bytes_per_second: float) -> AsyncIterator[Loader]:
    with tempfile.TemporaryDirectory(prefix="thaw-b-") as place:
        home, node = Path(place), Path(place) / "nodes" / "bench"
        (node / "loader" / "weights").mkdir(parents=True)
        records = Records(node / "loader", segment_prefix(home, "bench"))
        pool = PoolMemory(records.pool_name, _POOL_BYTES)
        size = 2 * sum(f.stat().st_size for f in model.glob("*.safetensors")) // PAGE_BYTES * PAGE_BYTES
        files = {name: file_name(records.prefix, name, "bench") for name in DEVICES}
        devices = {name: SeparateDevice(name, size, file, host_bytes_per_second=bytes_per_second) for name, file in files.items()}
        sources = Sources(SsdCache(home / "cache", 0), (home / "small",))

        def workers(emit: Callable[[Event], None]) -> tuple[Runs, Reclaimer]:
            copies = Copies(NodeDevices(devices), pool, emit)
            return Runs(pool, sources, emit, Threads(), copies=copies), Reclaimer(pool, emit)

        loader = Loader("bench", "bench", records, sources, workers, Chunks(pool.count, _POOL_BYTES))
        try:
            yield loader
        finally:
            await loader.stop()
            pool.close(unlink=True)
            for file in files.values():
                (SHM / file).unlink(missing_ok=True)


async def _attach(loader: Loader, card: ModelCard, part: DevicePart) -> tuple[float, int]:
    ask = AttachWeights(
        instance_id=part.holder, card=card, until="complete", device=part.device, layers=part.layers, rank=part.rank
    )
    found = await loader.handle(ask)
    assert isinstance(found, WeightsAttached)
    assert isinstance(found.handle, PagesHandle), found.device_error
    return time.monotonic(), sum(u.nbytes for u in found.handle.units)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="loads of each case")
    parser.add_argument("--size", default="60m", help="of the demo model")
    parser.add_argument("--pace-mib", type=float, default=24, help="MiB per second of each device's link")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    seconds: dict[str, list[float]] = defaultdict(list)
    sizes: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory(prefix="thaw-b-") as place:
        model = make_demo_model(Path(place) / "m", options.size)
        for _ in range(options.rounds):
            for case in CASES:
                took, sizes[case] = asyncio.run(load(case, model, options.pace_mib * _MIB))
                seconds[case].append(max(took))
    figures: dict[str, float] = {}
    for case in CASES:
        each = ", ".join(f"{n / _MIB:.1f}" for n in sizes[case])
        ratio = median(seconds[case]) / median(seconds["all"])
        print(
            f"{case:8} {each} MiB to each device, both there after {spread([s * 1e3 for s in seconds[case]])} ms ({ratio:.2f} of all)",
            flush=True,
        )
        figures |= {f"{case}_s": median(seconds[case]), f"{case}_device_mib": max(sizes[case]) / _MIB, f"{case}_ratio": ratio}
    write(options.json, figures)


if __name__ == "__main__":
    main()
