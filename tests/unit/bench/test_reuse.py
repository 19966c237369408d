"""bench.reuse: ways to reclaim, remapping, and the ratios to whole-model loads."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from bench import reuse_loader, reuse_remap
from bench.reuse import Arm, report
from tests.unit.loader.store.test_separate import Model, load, made
from weights.store import device_pages
from weights.store.device_pages import DevicePages
from weights.store.separate import SeparateDevice


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SeparateDevice]:
    """Return a device of four pages; what a policy replaces is put back."""
    for owner, name in ((DevicePages, "release"), (SeparateDevice, "allocate"), (device_pages, "reload_cost")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    device = made(pages=4)
    yield device
    assert device.audit() == []
    device.close()


def kept(device: SeparateDevice) -> dict[str, int]:
    return {m.model: m.reusable_bytes >> 21 for m in device.pages().models if m.reusable_bytes}


def test_without_reuse_nothing_stays(device: SeparateDevice) -> None:
    reuse_loader.apply("none")
    first = load(device, Model("a", 1, 2))
    second = load(device, Model("b", 1, 3))
    first.release()
    assert device.pages().mapped_bytes == second.copied_bytes + second.reused_bytes
    second.release()
    assert (kept(device), device.pages().free_bytes >> 21) == ({}, 4)


@pytest.mark.parametrize(("policy", "left"), [("lru", {"often": 1, "late": 1}), ("cost", {"often": 2})])
def test_least_recent_and_least_expected_units_go_first(device: SeparateDevice, policy: str, left: dict[str, int]) -> None:
    reuse_loader.apply(policy)
    for model in (Model("often", 1, 2), Model("often", 1, 2), Model("often", 1, 2), Model("late", 3)):
        load(device, model).release()
    load(device, Model("new", 5, 6))
    assert kept(device) == left


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="allowed: none, random, lru, cost"):
        reuse_loader.apply("fifo")


def test_runs_of_free_pages_are_mapped_once_each() -> None:
    nbytes = 256 << 20
    assert [reuse_remap.remap(nbytes, pages, 1)["mappings"] for pages in (1, 64)] == [128.0, 2.0]


def test_ratios_are_to_whole_model_loads(capsys: pytest.CaptureFixture[str]) -> None:
    whole, ours = (Arm(policy, policy, Mock()) for policy in ("none", "cost"))
    whole.seconds.update({("L3", "a"): [4.0, 4.0], ("L3", "b"): [2.0]})
    ours.seconds.update({("L3", "a"): [4.0, 0.0], ("L3", "b"): [1.0]})
    figures = report([whole, ours], ["L3"])
    assert (figures["L3_cost_sooner"], figures["L3_cost_sooner_best_model"], figures["L3_cost_load_p50_ms"]) == (2.0, 2.0, 1000.0)
    assert "paced" in capsys.readouterr().out
