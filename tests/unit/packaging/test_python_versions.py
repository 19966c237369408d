"""Every pinned package can be installed with the oldest Python that Thaw declares."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[3]


def test_pinned_packages_accept_the_oldest_python() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    oldest = declared.removeprefix(">=") + ".2"  # of Debian 12
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)

    needs = {}
    for package in pinned:
        try:
            needs[package] = importlib.metadata.metadata(package)["Requires-Python"] or ""
        except importlib.metadata.PackageNotFoundError:  # of another platform
            continue
    assert len(needs) > 100
    refusing = {package: need for package, need in needs.items() if oldest not in SpecifierSet(need)}
    assert refusing == {}
