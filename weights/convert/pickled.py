"""Read PyTorch files (.bin, .pt, .pth) without executing anything in them.

The reader is `torch.load(weights_only=True)`. Files of torch 1.6 and later are zip archives and are
mapped; older files are read whole, one at a time. Only this module imports torch.
"""

from __future__ import annotations

import pickle
import re
import struct
import warnings
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.dtypes import TORCH_NAMES
from shared.errors import CheckpointInvalid, InsufficientMemory
from weights.convert.tensor import SourceTensor
from weights.formats.checkpoint import TORCH_SUFFIXES

if TYPE_CHECKING:
    import torch

TORCH_SINGLE = "pytorch_model.bin"
TORCH_INDEX = "pytorch_model.bin.index.json"
TORCH_ADAPTER = "adapter_model.bin"
_NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "scaler")
_WRAPPERS = ("state_dict", "model", "module")
_ZIP = b"PK\x03\x04"
_SHOWN = 3
_BROKEN = (
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    IndexError,
    KeyError,
    MemoryError,
    NotImplementedError,
    OSError,
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    struct.error,
    zipfile.BadZipFile,
)
"""Exceptions of torch.load and zipfile for files of another form."""


def torch_names(present: Collection[str]) -> tuple[str, ...] | None:
    """Return the PyTorch file with the weights, or the index of several files.

    None without such a file, or if the choice is ambiguous.
    """
    for name in (TORCH_SINGLE, TORCH_INDEX, TORCH_ADAPTER):
        if name in present:
            return (name,)
    others = [n for n in present if n.endswith(TORCH_SUFFIXES) and not n.startswith(_NO_WEIGHTS)]
    return (others[0],) if len(others) == 1 else None


@dataclass(frozen=True)
class TorchShard:
    """One file of `size` bytes."""

    path: Path
    size: int

    @contextmanager
    def tensors(self) -> Iterator[Sequence[SourceTensor]]:
        """Read the tensors of the file.

        Raises `CheckpointInvalid`, or `InsufficientMemory` for an old file that does not fit.
        """
        before = _stamp(self.path)
        weights = _state_dict(self.path, _load(self.path, self.size))
        yield [_describe(self.path, name, tensor) for name, tensor in weights.items()]
        if _stamp(self.path) != before:
            raise CheckpointInvalid(f"{self.path} changed while it was read; wait until it is written, then convert again")


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        stat = path.stat()
    except OSError as e:
        raise CheckpointInvalid(f"{path} cannot be read: {e.strerror}; check its permissions and the disk") from e
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def _load(path: Path, size: int) -> Any:
    import torch

    try:
        with path.open("rb") as file:
            zipped = file.read(len(_ZIP)) == _ZIP
        if zipped:
            _check_archive(path, size)
        else:
            _check_fits(path, size)
        with warnings.catch_warnings():
            # About torch's own old formats: converting is what is done about them.
            warnings.simplefilter("ignore", UserWarning)
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as e:
        raise CheckpointInvalid(
            f"{path} holds more than weights, or is damaged ({_objection(e)}): it was not executed; save its state_dict alone, or take "
            "another file"
        ) from e
    except _BROKEN as e:
        raise CheckpointInvalid(f"{path} is no readable PyTorch file ({_first_line(e)}); download it again") from e


def _objection(e: pickle.UnpicklingError) -> str:
    """Return what torch found in the file, without its advice on how to execute it."""
    message = re.sub(r"\s+", " ", str(e))
    found = re.search(
        r"(Unsupported (?:global|operand|class)\S* .{1,120}?|Trying to load unsupported .{1,120}?)(?: was not | whose | Please | Check |$)",
        message,
    )
    return found[1] if found is not None else "it is not what torch.save writes"


def _first_line(e: BaseException) -> str:
    return f"{type(e).__name__}: {e}".splitlines()[0][:200]


def _check_archive(path: Path, size: int) -> None:
    """Check the archive's checksums, which torch does not when it maps one."""
    with zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
        if any(i.compress_type != zipfile.ZIP_STORED for i in infos) or sum(i.file_size for i in infos) > size:
            raise zipfile.BadZipFile("its records are compressed or overlap, which torch.save never does")
        # torch.serialization.set_crc32_options(False) leaves zeros.
        if any(i.CRC for i in infos) and (bad := archive.testzip()) is not None:
            raise zipfile.BadZipFile(f"the checksum of its record {bad} is wrong")


def _check_fits(path: Path, size: int) -> None:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:") and size > int(line.split()[1]) * 1024:
            raise InsufficientMemory(
                f"{path} is in the format of torch before 1.6, which must be read whole ({size / 1e9:.1f} GB), and this host has "
                f"{int(line.split()[1]) / 1e6:.1f} GB available: convert it on a larger host, or save it again with a newer torch"
            )


def _state_dict(path: Path, loaded: Any) -> Mapping[str, torch.Tensor]:
    """Return the tensors by name, also from inside the wrapper of a training script."""
    import torch

    if isinstance(loaded, dict):
        wrapped = [loaded[k] for k in _WRAPPERS if isinstance(loaded.get(k), dict)]
        if len(wrapped) == 1 and not any(isinstance(v, torch.Tensor) for v in loaded.values()):
            loaded = wrapped[0]
    if not isinstance(loaded, dict) or not loaded:
        raise CheckpointInvalid(f"{path} holds a {type(loaded).__name__:.80} and no tensors by name; save the model's state_dict()")
    odd = [
        f"{k!r:.80} ({type(v).__name__:.80})"
        for k, v in loaded.items()
        if not isinstance(k, str) or not isinstance(v, torch.Tensor)
    ]
    if odd:
        raise CheckpointInvalid(f"{path} holds what is no tensor: {', '.join(odd[:_SHOWN])}; save the model's state_dict() alone")
    return loaded


def _describe(path: Path, name: str, tensor: torch.Tensor) -> SourceTensor:
    dtype, shape = _dtype(path, name, tensor), tuple(tensor.shape)
    if dtype == "F4":
        if not shape:
            raise CheckpointInvalid(f"{path}: tensor {name!r} is a pair of 4-bit elements without a dimension; give it one")
        shape = (*shape[:-1], shape[-1] * 2)
    nbytes = tensor.numel() * tensor.itemsize
    storage = tensor.untyped_storage()
    if nbytes > storage.nbytes() and nbytes > path.stat().st_size:
        raise CheckpointInvalid(f"{path}: tensor {name!r} repeats a few bytes until they are {nbytes}; save it contiguous()")
    tie = (str(path), storage.data_ptr(), tensor.storage_offset(), dtype, shape, tensor.stride()) if nbytes else None
    return SourceTensor(name, dtype, shape, nbytes, _View(tensor), tie)


def _dtype(path: Path, name: str, tensor: torch.Tensor) -> str:
    """Return the name of the tensor's type.

    Raises `CheckpointInvalid` for tensors that are more, or less, than their elements.
    """
    import torch

    if tensor.is_quantized or tensor.layout != torch.strided or tensor.device.type != "cpu":
        kind = "quantised" if tensor.is_quantized else f"{tensor.layout} on {tensor.device}"
        raise CheckpointInvalid(f"{path}: tensor {name!r} is {kind}; save it as a plain tensor of its elements")
    torch_name = str(tensor.dtype).removeprefix("torch.")
    for ours, theirs in TORCH_NAMES.items():
        if theirs == torch_name:
            return ours
    raise CheckpointInvalid(f"{path}: tensor {name!r} is of the type {torch_name}, which is not known; save it as another")


class _View:
    """A tensor's row-major bytes.

    A tensor that is not contiguous is copied while it is being read.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        tensor = tensor.detach().resolve_conj().resolve_neg()
        self._tensor = tensor
        self._bytes = _bytes_of(tensor) if tensor.is_contiguous() else None
        self._copy: memoryview | None = None

    def __call__(self, offset: int, length: int) -> memoryview:
        if self._bytes is not None:
            return self._bytes[offset : offset + length]
        if self._copy is None:
            self._copy = _bytes_of(self._tensor.contiguous())
        part = self._copy[offset : offset + length]
        if offset + length == len(self._copy):
            self._copy = None
        return part


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    import torch

    count = tensor.numel() * tensor.itemsize
    start = tensor.storage_offset() * tensor.itemsize
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), start, (count,), (1,)).numpy().data
