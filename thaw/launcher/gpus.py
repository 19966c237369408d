"""The machine's NVIDIA GPUs, read from NVML."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU.

    Attributes:
        device_id: "cuda:0" and so on, in NVML's order.
        free_bytes: Free device memory when it was read.
    """

    device_id: str
    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Gpus:
    """The GPUs of this machine, and the version of their driver ("" without a driver)."""

    driver: str = ""
    devices: tuple[Gpu, ...] = ()


class NvmlFailed(Exception):
    """NVML does not answer."""


def read_gpus() -> Gpus:
    """Return the GPUs; none where there is no NVIDIA driver.

    Raises:
        ImportError: The package nvidia-ml-py is not installed.
        NvmlFailed: The driver answers with an error.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return Gpus()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        memory = [pynvml.nvmlDeviceGetMemoryInfo(h) for h in handles]
        devices = tuple(
            Gpu(f"cuda:{i}", str(pynvml.nvmlDeviceGetName(h)), int(m.total), int(m.free))
            for i, (h, m) in enumerate(zip(handles, memory, strict=True))
        )
        return Gpus(str(pynvml.nvmlSystemGetDriverVersion()), devices)
    except pynvml.NVMLError as e:
        raise NvmlFailed(str(e)) from e
    finally:
        pynvml.nvmlShutdown()
