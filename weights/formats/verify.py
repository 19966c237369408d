"""Verification of a converted checkpoint: each tensor's SHA-256 against the index."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from shared.errors import CheckpointInvalid
from weights.formats.checkpoint import Checkpoint, WeightFile, open_checkpoint, read_small
from weights.formats.converted import INDEX_NAME, MAX_INDEX_BYTES, parse_index
from weights.formats.root import mode_of
from weights.formats.safetensors import TensorEntry

_PIECE_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class Verified:
    """The result of a verification.

    Attributes:
        bytes: Read and hashed; those of tied tensors count once.
    """

    ranks: int
    tensors: int
    bytes: int


def verify(directory: Path, *, threads: int = 2, on_bytes: Callable[[int], None] | None = None) -> Verified:
    """Compare every tensor of the converted checkpoint in `directory` with its hash.

    The function reads all partitions and blocks; hashing releases the GIL.

    Args:
        on_bytes: `on_bytes(n)` is called with the number of bytes hashed, from one thread at a
            time.

    Raises:
        CheckpointInvalid: A tensor differs (the message names the file and the tensor), or
            `directory` is not a converted checkpoint (other layouts have no hashes).
    """
    path = directory / INDEX_NAME
    if mode_of(path) is None:
        raise _not_hashed(str(directory))
    ranks = parse_index(read_small(path, MAX_INDEX_BYTES), str(path)).ranks
    found = Verified(ranks, 0, 0)
    for rank in range(ranks):
        one = verify_checkpoint(open_checkpoint(directory, rank, ranks), threads=threads, on_bytes=on_bytes)
        found = Verified(ranks, found.tensors + one.tensors, found.bytes + one.bytes)
    return found


def check_hashed(checkpoint: Checkpoint, where: str) -> None:
    """Raise `CheckpointInvalid` for a checkpoint without hashes."""
    if not any(t.sha256 for file in checkpoint.files for t in file.header.tensors):
        raise _not_hashed(where)


def _not_hashed(where: str) -> CheckpointInvalid:
    return CheckpointInvalid(f"{where} is not converted: only converted checkpoints carry hashes; thaw convert {where} DST")


def verify_checkpoint(checkpoint: Checkpoint, *, threads: int = 2, on_bytes: Callable[[int], None] | None = None) -> Verified:
    """Verify one rank's files, which are open already."""
    work = [(file, t) for file in checkpoint.files for t in drop_tied(file.header.tensors)]
    lock = threading.Lock()

    def report(count: int) -> None:
        if on_bytes is not None:
            with lock:
                on_bytes(count)

    with ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool:
        try:
            for _ in pool.map(lambda pair: _check(pair[0], pair[1], report), work):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return Verified(1, sum(len(f.header.tensors) for f in checkpoint.files), sum(t.nbytes for _, t in work))


def drop_tied(tensors: tuple[TensorEntry, ...]) -> list[TensorEntry]:
    """The first of those that are tied."""
    found: dict[tuple[int, int], TensorEntry] = {}
    for tensor in tensors:
        found.setdefault((tensor.offset, tensor.nbytes), tensor)
    return list(found.values())


def _check(file: WeightFile, tensor: TensorEntry, on_bytes: Callable[[int], None]) -> None:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(min(_PIECE_BYTES, max(1, tensor.nbytes))))
    try:
        fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            done = 0
            while done < tensor.nbytes:
                got = os.preadv(fd, [buffer[: tensor.nbytes - done]], tensor.offset + done)
                if got == 0:
                    raise CheckpointInvalid(f"{file.path} ends inside tensor {tensor.name!r}; convert the model again")
                digest.update(buffer[:got])
                done += got
                on_bytes(got)
        finally:
            os.close(fd)
    except OSError as e:
        raise CheckpointInvalid(f"{file.path} cannot be read: {e.strerror}; check its permissions and the disk") from e
    if tensor.sha256 and digest.hexdigest() != tensor.sha256:
        raise make_damaged_error(tensor, str(file.path))


def make_damaged_error(tensor: TensorEntry, where: str) -> CheckpointInvalid:
    return CheckpointInvalid(
        f"{where}: the bytes of tensor {tensor.name!r} are not those that were converted; convert the model again"
    )
