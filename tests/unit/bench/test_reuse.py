"""bench.reuse: ways to reclaim, remapping, and the ratios to whole-model loads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from bench import reuse_engines, reuse_loader, reuse_models, reuse_remap, reuse_zygote
from bench.papers.constants import tangram as c
from bench.reuse import Arm, report
from bench.reuse_engines import Measured
from services.engine import app
from shared.contracts.engine import EngineStart
from tests.integration.nodeagent.harness import card
from tests.unit.loader.store.separate_devices import Model, load, made
from weights.store import device_pages
from weights.store.device_pages import DevicePages
from weights.store.separate import SeparateDevice
from weights.store.units import PAGE_BYTES


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
    whole.seconds.update({("L3", 0, "a"): [4.0, 4.0], ("L3", 0, "b"): [2.0], ("L3", 1, "a"): [2.0], ("L1", 0, "a"): [9.0]})
    ours.seconds.update({("L3", 0, "a"): [4.0, 0.0], ("L3", 0, "b"): [1.0], ("L3", 1, "a"): [1.0], ("L1", 0, "a"): [9.0]})
    figures = report([whole, ours], ["L3"])
    found = {name.removeprefix("L3_cost_"): value for name, value in figures.items() if name.startswith("L3_cost_")}
    assert found == {
        "load_ms": 1500.0,
        "load_p50_ms": 1000.0,
        "sooner": 2.0,
        "sooner_best_model": 2.0,
        "sooner_least_model": 2.0,
        "sooner_best_seed": 2.0,
        "sooner_least_seed": 2.0,
    }
    assert "paced" in capsys.readouterr().out


def test_engines_are_compared_by_locality_and_batch(capsys: pytest.CaptureFixture[str]) -> None:
    found = {
        ("L3", 16, "whole"): [("a", Measured(2.0, 4.0, 3.0, 0.5)), ("b", Measured(1.0, 2.0, 1.0, 0.5))],
        ("L3", 16, "elastic"): [("a", Measured(0.0, 2.0, 1.0, 0.75)), ("b", Measured(1.0, 1.0, 1.0, 0.25))],
    }
    figures = reuse_engines.report(found)
    ours = {name.removeprefix("engines_L3_batch_16_elastic_"): n for name, n in figures.items() if "elastic" in name}
    expected = {"load_ms": 500.0, "ttft_ms": 1500.0, "first_ms": 1000.0, "keepable": 0.5, "load_sooner": 3.0, "ttft_shorter": 0.5}
    assert ours == expected
    assert "paced" in capsys.readouterr().out


def test_models_of_the_engines_have_the_paper_s_sizes(tmp_path: Path) -> None:
    models = reuse_models.write_models(tmp_path, (c.MODELS[-1], c.MODELS[-3]), 100.0)
    sizes = [reuse_models.pages(m) * PAGE_BYTES for m in models.values()]
    assert sizes == [pytest.approx(n * reuse_models.LAYER_BYTES + (4 << 20), rel=0.2) for n in (1, 2)]
    assert reuse_models.device_bytes(list(models.values())) == pytest.approx(sizes[1] * 45 / 41.1, abs=PAGE_BYTES)


@pytest.mark.parametrize("kind", reuse_zygote.KINDS)
def test_kv_caches_are_booked_or_elastic(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "borrows_pages", app.borrows_pages)
    reuse_zygote.apply(kind)
    start = EngineStart(instance_id="i", node="n", card=card(), device="cpu:1", separate_memory=True, kv_bytes=1, log_path="")
    assert app.borrows_pages(start) is (kind == "elastic")
    with pytest.raises(ValueError, match="allowed: booked, elastic"):
        reuse_zygote.apply("other")
