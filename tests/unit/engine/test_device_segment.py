"""Tensors bound in a block of device memory; the host's memory stands in for it."""

from __future__ import annotations

import base64
import sys

import pytest
import torch

from services.engine.model.device_segment import DeviceSegment, open_on_gpu
from shared.contracts.segment import CudaIpcHandle, SegmentIndex, SegmentTensor
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
