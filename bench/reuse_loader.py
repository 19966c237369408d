"""The loader with another way to reclaim units, for bench.reuse: `python -m bench.reuse_loader`.

THAW_BENCH_RECLAIM chooses it:

    cost     the loader's own: bytes, tier, and how often each model was loaded (Tangram Eq. 2)
    lru      the unit that was used least recently
    random   any unit
    none     no reuse: units are freed with their last instance, so that every load copies the
             whole model
"""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from typing import Any

from services.loader.app import run
from services.loader.settings import LoaderSettings
from shared.runtime import run_service
from weights.store import device_pages
from weights.store.device_pages import DevicePages
from weights.store.pages import Cost, condemn
from weights.store.separate import SeparateDevice

VARIABLE = "THAW_BENCH_RECLAIM"
POLICIES = ("none", "random", "lru", "cost")


def count_loads() -> None:
    """Report to each device how often its models were loaded, as a scheduler would."""
    allocate, loads = SeparateDevice.allocate, Counter[str]()

    def count_and_allocate(self: SeparateDevice, place: Any, *rest: Any) -> Any:
        loads[place.weights_id] += 1
        self.expect({w: n / loads.total() for w, n in loads.items()})
        return allocate(self, place, *rest)

    setattr(SeparateDevice, "allocate", count_and_allocate)  # noqa: B010  # of this process alone; mypy refuses an assignment


def reclaim_by(cost: Cost) -> None:
    """Replace the expected reload cost."""
    setattr(device_pages, "reload_cost", lambda *_: cost)  # noqa: B010  # of this process alone


def free_at_once() -> None:
    """Free units with their last holder."""
    release = DevicePages.release

    def release_and_condemn(self: DevicePages, holder: str) -> None:
        release(self, holder)
        for key in [k for k, u in self.store.units.items() if u.is_reusable]:
            self.store = condemn(self.store, key, 0)

    DevicePages.release = release_and_condemn  # type: ignore[method-assign]  # of this process alone


def apply(policy: str) -> None:
    """Replace the loader's way to reclaim units.

    Raises:
        ValueError: An unknown policy.
    """
    drawn = random.Random(0)
    match policy:
        case "cost":
            count_loads()
        case "lru":
            reclaim_by(lambda unit: unit.used_at)
        case "random":
            reclaim_by(lambda _: drawn.random())
        case "none":
            free_at_once()
        case _:
            raise ValueError(f"{VARIABLE} is {policy!r}; allowed: {', '.join(POLICIES)}")


if __name__ == "__main__":
    apply(os.environ.get(VARIABLE, "cost"))
    sys.exit(run_service("loader", LoaderSettings, run))
