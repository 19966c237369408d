"""CUDA devices through NVML: inventory, and memory by process.

Without the NVIDIA driver there are none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from services.nodeagent.devices.driver_thread import DriverThread
from services.nodeagent.devices.port import DeviceInfo
from shared.errors import DeviceFailed

log = logging.getLogger(__name__)


class CudaDevice:
    """`cuda:N`, numbered as NVML does.

    `info.budget_bytes` is the limit for all engines together.

    The constructor and readings raise `DeviceFailed`.
    """

    def __init__(
        self, nvml: Any, index: int, share: float | None, budget_bytes: int | None, thread: DriverThread | None = None
    ) -> None:
        """Open the device.

        Args:
            nvml: The module `pynvml`, initialised.
            index: NVML's index of the device.
            share: Part of its memory that is the budget, unless `budget_bytes` is set.
            budget_bytes: The budget.
            thread: Makes NVML's calls; None: one of this device alone.
        """
        self._nvml = nvml
        self._thread = thread or DriverThread()
        self._id = f"cuda:{index}"
        self._handle = self._ask(nvml.nvmlDeviceGetHandleByIndex, index)
        total = int(self._ask(nvml.nvmlDeviceGetMemoryInfo, self._handle).total)
        budget = budget_bytes if budget_bytes is not None else int(total * (share or 1.0))
        name, uuid = self._ask(nvml.nvmlDeviceGetName, self._handle), self._ask(nvml.nvmlDeviceGetUUID, self._handle)
        self.info = DeviceInfo(self._id, "cuda", _text(name), total, budget, _text(uuid))

    def private_bytes(self, pids: Iterable[int]) -> dict[int, int]:
        """Bytes by process, as the driver accounts them.

        The result is empty in a container with its own pid namespace, whose pids are not NVML's,
        and where the driver does not account processes.
        """
        wanted = set(pids)
        try:
            running = self._ask(self._nvml.nvmlDeviceGetComputeRunningProcesses, self._handle)
        except DeviceFailed as fault:
            if getattr(fault.__cause__, "value", None) == self._nvml.NVML_ERROR_NOT_SUPPORTED:
                return {}
            raise
        return {p.pid: int(p.usedGpuMemory) for p in running if p.pid in wanted and p.usedGpuMemory is not None}

    def used_bytes(self, private_bytes: int, shared_bytes: int) -> int:
        """Return all bytes in use on the device, by any process; the arguments have no effect."""
        return int(self._ask(self._nvml.nvmlDeviceGetMemoryInfo, self._handle).used)

    def _ask(self, call: Callable[[Any], Any], argument: Any) -> Any:
        try:
            return self._thread.call(call, argument)
        except (self._nvml.NVMLError, TimeoutError) as e:
            why = f"no answer within {self._thread.within_s:g} s" if isinstance(e, TimeoutError) else e
            raise DeviceFailed(f"NVML cannot read {self._id}: {why}. See `nvidia-smi` and the kernel's log (`dmesg`)") from e


def load_nvml() -> Any | None:
    """Initialise NVML. None if there is no driver or no binding; the reason is logged."""
    try:
        import pynvml
    except ImportError:
        log.info("no CUDA devices: the package nvidia-ml-py is not installed")
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as e:
        log.info("no CUDA devices", extra={"reason": str(e)})
        return None
    return pynvml


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
