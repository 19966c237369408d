"""Tensors bound in a block of device memory; the host's memory stands in for it."""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.engine.model.device_segment import DeviceSegment, offsets_in_pages, open_on_gpu, open_pages, rebind
from shared.contracts.segment import CudaIpcHandle, Extent, MappedUnit, PagesHandle, SegmentIndex, SegmentTensor
from shared.errors import CheckpointInvalid, EngineFailed

DTYPES = {"F32": torch.float32, "U8": torch.uint8}
HANDLE = CudaIpcHandle(device="cuda:0", nbytes=64, bus_id="0000:00:00.0", ipc_handle=base64.b64encode(bytes(64)).decode())


def segment(*tensors: SegmentTensor) -> tuple[torch.Tensor, DeviceSegment]:
    base = torch.arange(64, dtype=torch.uint8)
    return base, DeviceSegment(base, SegmentIndex(tensors=tensors), DTYPES)


def tensor(dtype: str = "F32", shape: tuple[int, ...] = (2, 3), offset: int = 8, nbytes: int = 24) -> SegmentTensor:
    return SegmentTensor(name="w", dtype=dtype, shape=shape, offset=offset, nbytes=nbytes)


def test_tensors_share_the_segment_memory() -> None:
    base, bound = segment(tensor())
    seen = bound.tensors()["w"]
    assert seen.shape == (2, 3)
    assert bound.holds(seen)
    base[8:32] = 0
    assert seen.count_nonzero() == 0
    assert not bound.holds(torch.empty(1))


def test_scalars_and_tensors_without_elements() -> None:
    _, bound = segment(tensor(shape=(), nbytes=4), tensor(shape=(0, 5), nbytes=0).model_copy(update={"name": "none"}))
    assert bound.tensors()["w"].shape == ()
    assert bound.tensors()["none"].shape == (0, 5)


@pytest.mark.parametrize(
    ("wrong", "on_done"),
    [
        (tensor(dtype="F4"), "unknown type"),
        (tensor(nbytes=20), "does not fit"),
        (tensor(offset=60), "does not fit"),
        (tensor(offset=-8), "does not fit"),
        (tensor(offset=9), "thaw convert"),
    ],
)
def test_index_that_does_not_fit_is_refused(wrong: SegmentTensor, on_done: str) -> None:
    with pytest.raises(CheckpointInvalid, match=on_done):
        segment(wrong)[1].tensors()


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    with pytest.raises(EngineFailed, match="pip install"):
        open_on_gpu(HANDLE)


def test_the_missing_driver_is_reported() -> None:
    runtime = pytest.importorskip("cuda.bindings.runtime", reason="cuda-bindings (the extra cuda) is not installed")
    if runtime.cudaGetDeviceCount()[0] == runtime.cudaError_t.cudaSuccess:
        pytest.skip("this machine has a CUDA driver: tests/gpu opens real handles")
    with pytest.raises(EngineFailed, match=r"cudaDeviceGetByPCIBusId: .*driver"):
        open_on_gpu(HANDLE)
    with pytest.raises(EngineFailed, match="64 bytes, not 2"):
        open_on_gpu(HANDLE.model_copy(update={"ipc_handle": base64.b64encode(b"ab").decode()}))


PAGE = 4096


@pytest.fixture
def pages() -> Iterator[PagesHandle]:
    """Make a file of four pages, of which a model has the last and then the second."""
    path = Path(f"/dev/shm/thaw-test-{os.getpid()}")
    path.write_bytes(b"".join(bytes([n]) * PAGE for n in range(4)))
    yield PagesHandle(
        device="cpu:1",
        nbytes=2 * PAGE,
        file=path.name,
        extents=(Extent(offset=3 * PAGE, nbytes=PAGE), Extent(offset=PAGE, nbytes=PAGE)),
        units=(MappedUnit(offset=100, nbytes=PAGE, start=0), MappedUnit(offset=100 + PAGE, nbytes=32, start=PAGE)),
    )
    path.unlink(missing_ok=True)


def test_pages_are_one_range_whose_writes_stay_here(pages: PagesHandle) -> None:
    memory = open_pages(pages)
    assert (memory[:PAGE] == 3).all()
    assert (memory[PAGE:] == 1).all()
    memory.zero_()
    assert (open_pages(pages)[:PAGE] == 3).all()


def test_tensors_are_found_in_their_units(pages: PagesHandle) -> None:
    module = torch.nn.ParameterList([torch.zeros(8) for _ in range(3)])
    first, last, _ = (p.data_ptr() for p in module)
    places = {first: 100, last: 100 + PAGE}
    assert rebind(module, offsets_in_pages(pages, lambda t: places.get(t.data_ptr())), open_pages(pages)) == 0
    assert [bytes(p.detach().view(torch.uint8).tolist())[:1] for p in module] == [b"\3", b"\1", b"\0"]
    elsewhere = torch.zeros(1)
    assert offsets_in_pages(pages, lambda _: 100 + PAGE + 32)(elsewhere) is None
    assert offsets_in_pages(pages, lambda _: 0)(elsewhere) is None


def test_pages_of_an_earlier_loader_are_refused(pages: PagesHandle) -> None:
    Path("/dev/shm", pages.file).unlink()
    with pytest.raises(EngineFailed, match="Start the instance again"):
        open_pages(pages)
    with pytest.raises(EngineFailed):
        open_pages(pages.model_copy(update={"file": "", "nbytes": 1}))
