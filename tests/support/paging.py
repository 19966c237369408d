"""Requirements of tests that page out: free swap, a freezer, and capabilities.

Tests are skipped, with the reason, if one is missing.
"""

from __future__ import annotations

import pytest

from services.nodeagent.suspend.cgroups import open_cgroups
from services.nodeagent.suspend.cpu import PageOut
from services.nodeagent.suspend.memory import swap_space

LEAST_MIB = 512


def skip_unless_able(mib: int = LEAST_MIB) -> None:
    """Skip the test if engines of `mib` together cannot be paged out."""
    if why := PageOut(open_cgroups("trial")).explain_unavailable():
        pytest.skip(f"cannot suspend by page-out here: {why}")
    skip_unless_swap(mib)


def skip_unless_swap(mib: int = LEAST_MIB) -> None:
    if (free := swap_space().free >> 20) < mib:
        pytest.skip(f"needs {mib} MiB of free swap, and {free} MiB are (`thaw doctor --fix` sets some up)")
