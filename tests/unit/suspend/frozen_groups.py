"""Control groups that record freezes, and processes that are frozen."""

from __future__ import annotations

from services.nodeagent.suspend.cgroups import Cgroups
from tests.unit.suspend.fake_driver import FakeDriver

GIB = 1 << 30
A, B, C = 7_000_001, 7_000_002, 7_000_003
"""No process can have these pids."""


class Frozen(Cgroups):
    """Records freezes and thaws among the driver's calls."""

    def __init__(self, driver: FakeDriver) -> None:
        super().__init__("n", None, None)
        self._driver = driver
        self.fails: Exception | None = None

    @property
    def available(self) -> bool:
        return True

    def freeze(self, instance_id: str) -> None:
        self._driver.calls.append(("freeze", 0))
        if self.fails is not None:
            raise self.fails

    def thaw(self, instance_id: str) -> None:
        self._driver.calls.append(("thaw", 0))
