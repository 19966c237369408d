"""Read the weight files of a model that is in host memory, for other nodes' loaders (ADR 0089).

A segment has whole weight files, so their ranges are ranges of the segment. Nothing is held: a
reader checks afterwards that the weights were still there, and discards what it has read otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shared.contracts.model_info import ModelInfo
from weights.cache.journal import FileHead
from weights.cache.store import EntryRecord
from weights.formats.segment import Layout
from weights.pool.chunks import CHUNK_BYTES
from weights.pool.region import Region
from weights.tiers.port import TierFile


class ResidentFiles:
    """The weight files of one complete segment.

    Attributes:
        record: The files, as a peer lists them. Small files are not among them.
    """

    def __init__(
        self, info: ModelInfo, files: Sequence[TierFile], layout: Layout, region: Region, is_resident: Callable[[], bool]
    ) -> None:
        """Serve a segment.

        Args:
            info: The model.
            files: All its files.
            layout: Of the segment.
            region: The segment's memory.
            is_resident: True as long as no chunk of `region` is freed or reused.
        """
        self._starts = {place.file.name: place.offset for place in layout.places}
        heads = tuple(
            FileHead(name=f.name, size=f.size, version=f.version, sha256=f.sha256, md5=f.md5)
            for f in files
            if f.name in self._starts
        )
        self.record = EntryRecord(revision=info.revision, source=info.source, files=heads)
        self._sizes = {head.name: head.size for head in heads}
        self._region, self._is_resident = region, is_resident

    def size(self, name: str) -> int | None:
        """Return the bytes of a file; None if it is none of these."""
        return self._sizes.get(name)

    def read(self, name: str, offset: int, into: memoryview) -> bool:
        """Fill `into` from a file; false if the weights have left memory."""
        at, done = self._starts[name] + offset, 0
        while done < len(into):
            room = CHUNK_BYTES - at % CHUNK_BYTES
            with into[done : done + room] as part:
                done += (got := self._region.read(at, part))
            if not got:
                return False
            at += got
        return self._is_resident()
