"""Find what a machine lacks for the steps of `python -m bench.gpu`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from bench.loader_gpu import no_disk_because
from services.nodeagent.devices.cpu import available_bytes
from services.nodeagent.devices.cuda import load_nvml
from services.nodeagent.suspend.cuda import open_driver
from shared.errors import DeviceMissing, ThawError
from weights.devices.cuda_runtime import load_cuda
from weights.devices.cuda_virtual_memory import load_virtual_memory

GPU_BYTES, HOST_BYTES, DISK_BYTES = 79 * 10**9, 64 * 10**9, 48 * 10**9
"""Requirements of the largest step: memory of the GPU, and free bytes of the host and of the work
directory's disk.
"""
_GB = 10**9


def find_missing(device: str, work: Path | None = None, *, only_device: bool = False) -> list[str]:
    """Return what is missing, one sentence each.

    Args:
        device: Such as `cuda:0`.
        work: Directory for the models; None: the temporary directory.
        only_device: Look for the device alone.
    """
    kind, _, number = device.partition(":")
    if kind != "cuda" or not number.isdigit():
        return [f"{device} is no GPU: name one as cuda:N"]
    try:
        cuda = load_cuda()
        if int(number) >= (found := cuda.count()):
            raise DeviceMissing(f"There is no {device}: CUDA finds {found} GPUs")
        facts = cuda.facts(int(number))
    except ThawError as e:
        return [e.message, *([] if only_device else find_missing_on_host(work))]
    if only_device:
        return []
    missing = [] if facts.total_bytes >= GPU_BYTES else [_too_small(f"memory of {device}", facts.total_bytes, GPU_BYTES)]
    if not load_virtual_memory().is_supported(int(number)):
        missing.append(f"{device} has no allocations that can be exported by file descriptor (steps remap, reuse)")
    if reason := open_driver(load_nvml())[1]:
        missing.append(f"{reason} (steps checkpoint, suspended, hot_swap)")
    return missing + find_missing_on_host(work)


def find_missing_on_host(work: Path | None) -> list[str]:
    """Return what the host lacks, whatever GPU it has."""
    import torch

    missing = []
    if not torch.cuda.is_available():
        missing.append("torch here cannot use CUDA: install its build for CUDA (all steps that serve models)")
    if (free := available_bytes()) < HOST_BYTES:
        missing.append(_too_small("available host memory", free, HOST_BYTES))
    if (free := shutil.disk_usage(work or Path(os.environ.get("TMPDIR", "/tmp"))).free) < DISK_BYTES:
        missing.append(_too_small("free space of the work directory", free, DISK_BYTES) + "; name another one with --work")
    if why := no_disk_because(work):
        missing.append(f"{why} (step ssd)")
    if not os.environ.get("THAW_VLLM_PYTHON"):
        missing.append("THAW_VLLM_PYTHON names no vLLM for CUDA (vLLM is left out of step hot_swap)")
    return missing


def _too_small(what: str, found: int, wanted: int) -> str:
    return f"{what}: {found / _GB:.0f} GB, and {wanted / _GB:.0f} GB are needed"
