"""A directory on vLLM's PYTHONPATH that provides Thaw's plug-in.

It has links to the packages, and the entry point.

Thaw's own site-packages would work too, but would also shadow vLLM's torch.
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
    """Create the overlay in `directory` if it does not exist.

    Hosts may do so concurrently. Raises `OSError`.
    """
    metadata = directory / "thaw_vllm_plugin-1.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    for name, text in (("METADATA", _METADATA), ("entry_points.txt", _ENTRY_POINTS)):
        temporary = metadata / f".{name}.{os.getpid()}"
        temporary.write_text(text)
        temporary.replace(metadata / name)
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
