"""Frozen objects are not collected during a term, and are collected afterwards."""

from __future__ import annotations

import gc

from services.scheduler.adapters.gc_tuning import freeze_heap, unfreeze_heap


class Ring:
    def __init__(self) -> None:
        self.me = self


def test_frozen_objects_are_skipped_and_new_garbage_is_collected() -> None:
    unfreeze_heap()  # other tests of this process may have set other thresholds
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    settled = [[n] for n in range(1000)]
    freeze_heap()
    try:
        assert gc.get_freeze_count() >= frozen + len(settled)
        assert gc.get_threshold() != before
        Ring()
        assert gc.collect() >= 1
    finally:
        unfreeze_heap()
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == before
    gc.freeze()  # the tests' own objects, as after their collection (tests/conftest.py)
