"""The overlay that adds Thaw's plug-in to vLLM."""

from __future__ import annotations

import re
from pathlib import Path

from services.enginehost.drivers.overlay import plugin_path


def test_overlay_links_the_package_of_its_entry_point(tmp_path: Path) -> None:
    overlay = plugin_path(tmp_path / "plugin")
    entry_points = next(overlay.glob("*.dist-info")) / "entry_points.txt"
    module = re.search(r"= ([\w.]+):", entry_points.read_text())
    assert module is not None
    assert (
        overlay.joinpath(*module[1].split("."), "__init__.py").exists()
        or overlay.joinpath(*module[1].split(".")).with_suffix(".py").exists()
    )
    assert (overlay / "shared" / "__init__.py").exists()
