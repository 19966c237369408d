"""CUDA devices through NVML: inventory, and memory by process.

Without the NVIDIA driver there are none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from services.nodeagent.devices.driver_thread import DriverThread
from services.nodeagent.devices.port import DeviceInfo
from shared.errors import DeviceFailed

log = logging.getLogger(__name__)
OPENS_WITHIN_S = 60.0
"""Without persistence mode, the driver initialises each GPU when a process first asks for it, which
takes seconds.
"""


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
        self._handle = self._ask(nvml.nvmlDeviceGetHandleByIndex, index, OPENS_WITHIN_S)
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

    def _ask(self, call: Callable[[Any], Any], argument: Any, within_s: float | None = None) -> Any:
        return _call(self._nvml, self._thread, partial(call, argument), self._id, within_s)


def load_nvml(thread: DriverThread | None = None, within_s: float = OPENS_WITHIN_S) -> Any | None:
    """Initialise NVML. Blocking.

    Args:
        thread: Makes the call; None: a new one.
        within_s: Seconds in which NVML has to answer.

    Returns:
        The module `pynvml`; None if there is no driver or no binding. The reason is logged.

    Raises:
        DeviceFailed: NVML does not answer.
    """
    try:
        import pynvml
    except ImportError:
        log.info("no CUDA devices: the package nvidia-ml-py is not installed")
        return None
    try:
        _call(pynvml, thread or DriverThread(), pynvml.nvmlInit, "the driver", within_s)
    except DeviceFailed as fault:
        if not isinstance(fault.__cause__, pynvml.NVMLError):
            raise
        log.info("no CUDA devices", extra={"reason": str(fault.__cause__)})
        return None
    return pynvml


def count_gpus(nvml: Any, thread: DriverThread) -> int:
    """Return the number of the machine's GPUs. Blocking. Raises `DeviceFailed`."""
    return int(_call(nvml, thread, nvml.nvmlDeviceGetCount, "the number of GPUs", OPENS_WITHIN_S))


def _call(nvml: Any, thread: DriverThread, call: Callable[[], Any], what: str, within_s: float | None = None) -> Any:
    """Make a call of NVML about `what`. Raises `DeviceFailed`."""
    limit_s = within_s if within_s is not None else thread.within_s
    try:
        return thread.call_within(limit_s, call)
    except (nvml.NVMLError, TimeoutError) as e:
        why = f"no answer within {limit_s:g} s" if isinstance(e, TimeoutError) else e
        raise DeviceFailed(f"NVML cannot read {what}: {why}. See `nvidia-smi` and the kernel's log (`dmesg`)") from e


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
