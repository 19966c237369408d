"""The calls of CUDA's virtual memory management, with the types of the installed cuda-bindings."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from shared.errors import DeviceFailed, DeviceMissing, InsufficientMemory
from weights.devices.cuda_virtual_memory import CudaVirtualMemory, load_virtual_memory
from weights.devices.virtual_memory import Allocation

GRANULARITY = 2 * 1024 * 1024
UNIT = Allocation(77)


@pytest.fixture
def api() -> Any:
    return pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings (the extra cuda) is not installed")


class Recorded:
    """The package's types and names, with calls that are recorded and answered.

    Attributes:
        answers: Results of the next calls, by name.
    """

    def __init__(self, api: Any) -> None:
        self._api = api
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.answers: dict[str, Any] = {}
        self.status = api.CUresult.CUDA_SUCCESS

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._api, name)
        if not name.startswith("cu"):
            return found

        def call(*arguments: Any) -> tuple[Any, ...]:
            if name == "cuGetErrorString":
                return (self._api.CUresult.CUDA_SUCCESS, b"words of CUDA")
            self.calls.append((name, arguments))
            return (self.status, *((self.answers[name],) if name in self.answers else ()))

        call.__name__ = name
        return call


def test_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(DeviceMissing, match=r"pip install 'thaw-mesh\[cuda\]'"):
        load_virtual_memory()


def test_package_has_the_calls_with_the_expected_arguments(api: Any) -> None:
    """A call with another number of arguments is a TypeError before the driver is looked for."""
    for call, count in (
        (api.cuDeviceGetAttribute, 2),
        (api.cuMemGetAllocationGranularity, 2),
        (api.cuMemCreate, 3),
        (api.cuMemRelease, 1),
        (api.cuMemExportToShareableHandle, 3),
        (api.cuMemImportFromShareableHandle, 2),
        (api.cuMemAddressReserve, 4),
        (api.cuMemAddressFree, 2),
        (api.cuMemMap, 5),
        (api.cuMemUnmap, 2),
        (api.cuMemSetAccess, 4),
    ):
        signature = call.__doc__.split("\n")[0]
        assert signature.count(",") + 1 == count, signature


def test_values_of_the_header_are_those_of_the_package(api: Any) -> None:
    """As in cuda.h."""
    assert int(api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED) == 1
    assert int(api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE) == 1
    assert int(api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) == 1
    assert int(api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ) == 1
    assert int(api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE) == 3
    assert int(api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM) == 0


def test_without_a_driver_every_call_is_accepted_up_to_the_driver(api: Any) -> None:
    """Wrong arguments are TypeErrors; right ones reach the missing driver."""
    memory = CudaVirtualMemory(api)
    calls: list[Callable[[], object]] = [
        lambda: memory.is_supported(0),
        lambda: memory.granularity(0),
        lambda: memory.create(0, GRANULARITY),
        lambda: memory.release(UNIT),
        lambda: memory.export_descriptor(UNIT),
        lambda: memory.import_descriptor(5),
        lambda: memory.reserve(GRANULARITY),
        lambda: memory.free_reservation(GRANULARITY, GRANULARITY),
        lambda: memory.map(GRANULARITY, GRANULARITY, UNIT),
        lambda: memory.unmap(GRANULARITY, GRANULARITY),
        lambda: memory.set_access(GRANULARITY, GRANULARITY, 0, writable=False),
    ]
    try:
        api.cuDriverGetVersion()
    except RuntimeError:
        for call in calls:
            with pytest.raises(RuntimeError, match="NVIDIA driver library"):
                call()
    else:
        pytest.skip("this machine has a CUDA driver: tests/gpu runs the real calls")


def test_allocations_are_pinned_exportable_memory_of_the_device(api: Any) -> None:
    recorded = Recorded(api)
    recorded.answers = {"cuMemCreate": api.CUmemGenericAllocationHandle(77), "cuMemGetAllocationGranularity": GRANULARITY}
    memory = CudaVirtualMemory(recorded)
    assert memory.create(3, GRANULARITY) == UNIT
    assert memory.granularity(3) == GRANULARITY
    (_, (nbytes, created, flags)), (_, (asked, option)) = recorded.calls
    assert (nbytes, flags, option) == (GRANULARITY, 0, api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM)
    for found in (created, asked):
        assert found.type == api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        assert found.location.type == api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        assert found.location.id == 3
        assert found.requestedHandleTypes == api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def test_memory_of_kv_caches_is_not_exportable(api: Any) -> None:
    recorded = Recorded(api)
    recorded.answers = {"cuMemCreate": api.CUmemGenericAllocationHandle(77)}
    CudaVirtualMemory(recorded).create(3, GRANULARITY, exportable=False)
    ((_, (_, created, _)),) = recorded.calls
    assert created.requestedHandleTypes == api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
    assert created.location.id == 3


@pytest.mark.parametrize(("writable", "flags"), [(True, "READWRITE"), (False, "READ")])
def test_access_is_for_the_device_alone(api: Any, flags: str, *, writable: bool) -> None:
    recorded = Recorded(api)
    CudaVirtualMemory(recorded).set_access(4 * GRANULARITY, GRANULARITY, 2, writable=writable)
    ((_, (address, nbytes, (access,), count)),) = recorded.calls
    assert (address, nbytes, count) == (4 * GRANULARITY, GRANULARITY, 1)
    assert access.flags == getattr(api.CUmemAccess_flags, f"CU_MEM_ACCESS_FLAGS_PROT_{flags}")
    assert (access.location.type, access.location.id) == (api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 2)


def test_other_calls_pass_their_arguments_in_order(api: Any) -> None:
    recorded, kind = Recorded(api), api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    recorded.answers = {
        "cuMemExportToShareableHandle": 9,
        "cuMemImportFromShareableHandle": api.CUmemGenericAllocationHandle(78),
        "cuMemAddressReserve": api.CUdeviceptr(4 * GRANULARITY),
        "cuDeviceGetAttribute": 1,
    }
    memory = CudaVirtualMemory(recorded)
    assert memory.export_descriptor(UNIT) == 9
    assert memory.import_descriptor(9) == 78
    assert memory.reserve(GRANULARITY) == 4 * GRANULARITY
    memory.map(4 * GRANULARITY, GRANULARITY, UNIT)
    memory.unmap(4 * GRANULARITY, GRANULARITY)
    memory.free_reservation(4 * GRANULARITY, GRANULARITY)
    memory.release(UNIT)
    assert recorded.calls == [
        ("cuMemExportToShareableHandle", (UNIT, kind, 0)),
        ("cuMemImportFromShareableHandle", (9, kind)),
        ("cuMemAddressReserve", (GRANULARITY, 0, 0, 0)),
        ("cuMemMap", (4 * GRANULARITY, GRANULARITY, 0, UNIT, 0)),
        ("cuMemUnmap", (4 * GRANULARITY, GRANULARITY)),
        ("cuMemAddressFree", (4 * GRANULARITY, GRANULARITY)),
        ("cuMemRelease", (UNIT,)),
    ]
    assert memory.is_supported(0)
    recorded.answers["cuDeviceGetAttribute"] = 0
    assert not memory.is_supported(0)


def test_errors_have_the_words_of_cuda_and_missing_memory_is_its_own(api: Any) -> None:
    recorded = Recorded(api)
    memory = CudaVirtualMemory(recorded)
    recorded.status = api.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(InsufficientMemory, match=r"cuMemCreate: words of CUDA \(CUDA_ERROR_OUT_OF_MEMORY\)"):
        memory.create(0, GRANULARITY)
    recorded.status = api.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(DeviceFailed, match=r"cuMemMap: words of CUDA \(CUDA_ERROR_INVALID_VALUE\)"):
        memory.map(GRANULARITY, GRANULARITY, UNIT)
