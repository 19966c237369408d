"""Common parts of all benchmarks: the machine's description, medians, and JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from services.nodeagent.devices.cuda import load_nvml


def machine() -> dict[str, str | int]:
    """The machine that the figures were measured on."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = [
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count() or 1,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "nats-py", "pydantic")},
        **gpus(load_nvml()),
    }


def gpus(nvml: Any | None) -> dict[str, str | int]:
    """Describe the GPUs and their driver; empty without a GPU.

    Args:
        nvml: The module `pynvml`, initialised; None if NVML does not work.
    """
    if nvml is None:
        return {}
    names = []
    for index in range(nvml.nvmlDeviceGetCount()):
        device = nvml.nvmlDeviceGetHandleByIndex(index)
        names.append(f"{_text(nvml.nvmlDeviceGetName(device))}, {nvml.nvmlDeviceGetMemoryInfo(device).total >> 30} GiB")
    return {"gpus": "; ".join(names), "nvidia_driver": _text(nvml.nvmlSystemGetDriverVersion())} if names else {}


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> str:
    """Median with the least and the most, in the unit of the values."""
    return f"{median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def write(path: Path | None, figures: dict[str, float], *, add: bool = False) -> None:
    """Write `{"figures", "machine", "commands"}` to the file of `--json`.

    Args:
        add: Keep the figures of other runs in the file.
    """
    if path is None:
        return
    before = json.loads(path.read_text()) if add and path.exists() else {"figures": {}, "commands": []}
    command = " ".join(["python", "-m", _module(), *sys.argv[1:]])
    document = {
        "figures": before["figures"] | {name: round(value, 4) for name, value in figures.items()},
        "machine": machine(),
        "commands": [*(c for c in before["commands"] if c != command), command],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")
    print(f"wrote {path}", file=sys.stderr)


def _module() -> str:
    """Return the name of the module that runs as a program."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return Path(sys.argv[0]).stem if spec is None else str(spec.name).removesuffix(".__main__")
