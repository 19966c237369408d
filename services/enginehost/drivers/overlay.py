"""A directory that lends vLLM Thaw's plug-in without installing anything: links to our packages, and the entry point that vLLM looks for.

Our own environment on its PYTHONPATH would do too, and would bring our torch along.
"""

from __future__ import annotations

import contextlib
import os
from importlib.util import find_spec
from pathlib import Path

_PACKAGES = ("weights", "shared")
_METADATA = "Metadata-Version: 2.1\nName: thaw-vllm-plugin\nVersion: 1\n"
_ENTRY_POINTS = "[vllm.general_plugins]\nthaw = weights.vllm_plugin:register\n"


def plugin_path(directory: Path) -> Path:
    """Make the overlay in `directory` if it is not there; hosts may do so at the same time. Raises `OSError`."""
    told = directory / "thaw_vllm_plugin-1.dist-info"
    told.mkdir(parents=True, exist_ok=True)
    for name, text in (("METADATA", _METADATA), ("entry_points.txt", _ENTRY_POINTS)):
        temporary = told / f".{name}.{os.getpid()}"
        temporary.write_text(text)
        temporary.replace(told / name)
    for package in _PACKAGES:
        spec = find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        temporary = directory / f".{package}.{os.getpid()}"
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        temporary.symlink_to(Path(spec.origin).parent)
        temporary.replace(directory / package)
    return directory
