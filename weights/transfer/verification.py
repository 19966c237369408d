"""Verify loaded weights: each tensor's SHA-256 against the index (ADR 0017)."""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor

from weights.formats.safetensors import TensorEntry
from weights.formats.segment import Layout, Place
from weights.formats.verify import drop_tied, make_damaged_error
from weights.pool.chunks import CHUNK_BYTES
from weights.pool.region import Region
from weights.tiers.port import Cancelled


def verify_region(
    layout: Layout, region: Region, *, threads: int = 2, cancelled: threading.Event | None = None, source: str | None = None
) -> int:
    """Compare the loaded tensors with the checkpoint's hashes.

    Args:
        source: Name of the files in errors, if they are not on this host.

    Returns:
        Bytes that were hashed, tied tensors once; 0 if the checkpoint has no hashes.

    Raises:
        CheckpointInvalid: A tensor differs.
        Cancelled: The load was cancelled.
    """
    work: list[tuple[Place, TensorEntry, int]] = []
    for place in layout.places:
        starts = {t.name: at for t, at in place.tensors}
        work += [(place, t, starts[t.name]) for t in drop_tied(place.file.header.tensors) if t.sha256 and t.name in starts]

    def check(place: Place, tensor: TensorEntry, at: int) -> None:
        digest = hashlib.sha256()
        end = at + tensor.nbytes
        while at < end:
            if cancelled is not None and cancelled.is_set():
                raise Cancelled
            length = min(end - at, CHUNK_BYTES - at % CHUNK_BYTES)
            with region.view(at, length) as data:
                digest.update(data)
            at += length
        if digest.hexdigest() != tensor.sha256:
            raise make_damaged_error(tensor, f"{source}/{place.file.name}" if source is not None else str(place.file.path))

    with ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool:
        try:
            for _ in pool.map(lambda item: check(*item), work):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return sum(t.nbytes for _, t, _ in work)
