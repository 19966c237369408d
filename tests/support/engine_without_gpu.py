"""An engine whose CUDA IPC handles name files under /dev/shm, and which maps the stand-in's units.

Run `python -m tests.support.engine_without_gpu SPEC`.
"""

from __future__ import annotations

import base64
import sys
from pathlib import Path

import torch

from services.engine import __main__
from services.engine.model import device_segment
from shared.contracts.segment import CudaIpcHandle
from tests.support import mapped_gpu_units

SHARED_MEMORY = Path("/dev/shm")


def opened(handle: CudaIpcHandle) -> torch.Tensor:
    path = SHARED_MEMORY / base64.b64decode(handle.ipc_handle).rstrip(b"\0").decode()
    return torch.from_file(str(path), shared=True, size=handle.nbytes, dtype=torch.uint8)


if __name__ == "__main__":
    device_segment.open_on_gpu = opened
    mapped_gpu_units.install()
    sys.exit(__main__.main())
