"""A minimal loader: checkpoint files written as a segment, and replies over NATS."""

from __future__ import annotations

import asyncio
import json
import secrets
from pathlib import Path
from typing import Any

from shared.contracts import subjects
from shared.contracts.base import Done, Message
from shared.contracts.loader import LOADER_COMMAND, AttachWeights, LoaderCommand, ReleaseWeights, WeightsAttached, WeightsReleased
from shared.contracts.model_info import ModelInfo
from shared.contracts.models import ModelCard, ModelSpec
from shared.contracts.phases import Phase, PhaseSpan
from shared.contracts.segment import HEADER_BYTES, PAGE, SegmentHeader, SegmentIndex, SegmentTensor
from shared.contracts.stages import LayerRange, part_id
from shared.errors import ThawError
from shared.messaging import Mesh
from weights.formats.checkpoint import open_checkpoint
from weights.formats.segment import lay_out

SHARED_MEMORY = Path("/dev/shm")
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def _page(n: int) -> int:
    return -(-n // PAGE) * PAGE


def _header(file: Path) -> tuple[int, dict[str, Any]]:
    with file.open("rb") as f:
        size = int.from_bytes(f.read(8), "little")
        return 8 + size, json.loads(f.read(size))


class WrittenSegment:
    """A segment under a test's own name.

    A loader calls `write_index`, then `write_data`.
    """

    def __init__(self, directory: Path) -> None:
        self.name = f"thaw-test-{secrets.token_hex(6)}"
        self._files = sorted(directory.glob("*.safetensors"))
        tensors: list[SegmentTensor] = []
        offsets: list[int] = []
        # The index precedes the data, and its length depends on the offsets in it: reserve enough
        # space.
        self._data_offset = HEADER_BYTES + _page(1024 + 200 * sum(len(_header(f)[1]) for f in self._files))
        at = self._data_offset
        for file in self._files:
            start, header = _header(file)
            offsets.append(at)
            for name, t in header.items():
                if name != "__metadata__":
                    low, high = t["data_offsets"]
                    tensors.append(
                        SegmentTensor(name=name, dtype=t["dtype"], shape=t["shape"], offset=at + start + low, nbytes=high - low)
                    )
            at += _page(file.stat().st_size)
        self._offsets = offsets
        self.total_bytes = at
        self.index = SegmentIndex(tensors=tuple(tensors), files=tuple(f.name for f in self._files))

    @property
    def path(self) -> Path:
        return SHARED_MEMORY / self.name

    def write_index(self) -> None:
        index = self.index.model_dump_json().encode()
        assert HEADER_BYTES + len(index) <= self._data_offset
        header = SegmentHeader(
            weights_id=self.name, index_bytes=len(index), data_offset=self._data_offset, total_bytes=self.total_bytes
        )
        with self.path.open("wb") as f:
            f.write(header.model_dump_json().encode().ljust(HEADER_BYTES, b"\0") + index)
            f.truncate(self.total_bytes)

    def write_data(self) -> None:
        with self.path.open("r+b") as f:
            for file, offset in zip(self._files, self._offsets, strict=True):
                f.seek(offset)
                f.write(file.read_bytes())

    def write(self) -> WrittenSegment:
        self.write_index()
        self.write_data()
        return self

    @classmethod
    def part(cls, directory: Path, layers: LayerRange) -> WrittenSegment:
        """Write the part of a stage, as the loader lays it out."""
        made = cls(directory)
        layout = lay_out(open_checkpoint(directory), made.name, layers)
        made.total_bytes = layout.total_bytes
        with made.path.open("wb") as f:
            f.write(layout.head)
            f.truncate(layout.total_bytes)
            for place in layout.places:
                f.seek(place.offset)
                f.write(place.file.path.read_bytes()[place.start : place.start + place.size])
        return made

    def attached(self) -> WeightsAttached:
        """Return the loader's description of it."""
        total = self.total_bytes
        return WeightsAttached(weights_id=self.name, segment=self.name, directory="", total_bytes=total, loaded_bytes=total)

    def unlink(self) -> None:
        self.path.unlink(missing_ok=True)


def card_of(directory: Path, *, name: str = "demo", task: str = "generate", **spec: Any) -> ModelCard:
    """Return the part of a loader's inspection of `directory` that the engine needs."""
    config = json.loads((directory / "config.json").read_text())
    tensors = [t for f in sorted(directory.glob("*.safetensors")) for n, t in _header(f)[1].items() if n != "__metadata__"]
    context = config.get("max_position_embeddings") or config.get("n_positions") or 512
    info = ModelInfo(
        source=str(directory),
        revision="test",
        architecture=(config.get("architectures") or ["?"])[0],
        model_type=config.get("model_type", "?"),
        task="embed" if task == "embed" else "generate",
        weights_bytes=sum(t["data_offsets"][1] - t["data_offsets"][0] for t in tensors),
        parameters=1,
        dtype=_DTYPES[tensors[0]["dtype"]] if tensors else "float32",
        context_length=context,
        kv_bytes_per_token=0,
    )
    return ModelCard(spec=ModelSpec(name=name, source=str(directory), **spec), info=info, created=0)


class FakeLoader:
    """Answers `AttachWeights` for one node from segments it writes.

    Args:
        hold: Hold data back until `release_data`.
        error: Refuse every attach with this error.
    """

    def __init__(self, mesh: Mesh, node: str, *, hold: bool = False, error: ThawError | None = None) -> None:
        self._mesh = mesh
        self._node = node
        self._error = error
        self._complete = asyncio.Event()
        self._segments: dict[str, WrittenSegment] = {}
        self.asked: list[str] = []
        self.holders: list[str] = []
        self._asked = asyncio.Condition()
        self.released: asyncio.Queue[str] = asyncio.Queue()
        if not hold:
            self._complete.set()

    async def start(self) -> None:
        await self._mesh.respond(subjects.loader_command(self._node), LOADER_COMMAND, self._answer, concurrent=True).start()
        await self._mesh.flush()

    async def held(self, holders: set[str]) -> None:
        """Return when all of them have requested weights."""
        async with self._asked:
            await self._asked.wait_for(lambda: holders <= set(self.holders))

    def hold_data(self) -> None:
        self._complete.clear()

    def release_data(self) -> None:
        self._complete.set()

    async def _answer(self, command: LoaderCommand) -> Message:
        match command:
            case AttachWeights():
                return await self._attach(command)
            case ReleaseWeights(instance_id=holder):
                self.released.put_nowait(holder)
                return WeightsReleased(freed_bytes=0)
            case _:
                return Done()

    async def _attach(self, command: AttachWeights) -> WeightsAttached:
        self.asked.append(command.until)
        async with self._asked:
            self.holders.append(command.instance_id)
            self._asked.notify_all()
        directory = command.card.spec.source
        key = part_id(directory, command.layers)
        segment = self._segments.get(key)
        if segment is None and command.layers is not None:
            segment = self._segments[key] = WrittenSegment.part(Path(directory), command.layers)
        if segment is None:
            segment = self._segments[key] = WrittenSegment(Path(directory))
            segment.write_index()
        if command.until == "complete":
            await self._complete.wait()
            if self._error is not None:
                raise self._error
            if command.layers is None:
                segment.write_data()
        return WeightsAttached(
            weights_id=segment.name,
            segment=segment.name,
            directory=directory,
            total_bytes=segment.total_bytes,
            loaded_bytes=segment.total_bytes,
            phases=(PhaseSpan(phase=Phase.LOAD, start_ms=-5, duration_ms=5, process="loader"),),
        )

    def replace(self) -> None:
        """Replace the segment under the same name, as a restarted loader does."""
        for segment in self._segments.values():
            segment.unlink()
            segment.write_index()

    def close(self) -> None:
        for segment in self._segments.values():
            segment.unlink()
