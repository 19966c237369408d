"""A device with memory of its own: sharing, reuse, reclaiming, damage, and earlier loaders.

On cpu, and on a GPU by the stand-in driver.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared.contracts.segment import PagesHandle, SegmentTensor
from shared.errors import InsufficientMemory
from tests.unit.loader.devices.behaviour import SEGMENT, DeviceBehaviour, Host
from tests.unit.loader.pools import mapper
from tests.unit.loader.store.separate_devices import (
    COUNT,
    GPUS,
    HEAD,
    PREFIX,
    TENSOR,
    Model,
    check,
    close,
    fill,
    load,
    made,
    made_on_gpu,
    pages_of,
    seen,
)
from weights.devices.port import Arena, Device, Place
from weights.pool import shm
from weights.store import checking, copying
from weights.store.arena import PagedArena
from weights.store.cost import Tier
from weights.store.device_pages import COUNT_EARLIER_S
from weights.store.generations import EARLIER, file_name, remove_unmapped, retire
from weights.store.residency import KnownUnits
from weights.store.separate import SeparateDevice
from weights.store.units import PAGE_BYTES


@pytest.fixture(params=["cpu", "gpu"])
def device(request: pytest.FixtureRequest) -> Iterator[SeparateDevice]:
    device = made() if request.param == "cpu" else made_on_gpu()
    yield device
    assert device.audit() == []
    close(device)
    assert shm.segments(PREFIX) == []


class TestSeparate(DeviceBehaviour):
    RELEASED = 0

    def made(self) -> SeparateDevice:
        return made()

    @pytest.fixture
    def device(self) -> Iterator[Device]:
        device = self.made()
        yield device
        close(device)

    def read(self, arena: Arena, nbytes: int) -> bytes:
        [found] = seen(arena, [SegmentTensor(name="", dtype="U8", shape=(nbytes,), offset=0, nbytes=nbytes)])
        return found

    def test_a_reader_may_wait_for_the_first_bytes_only(self, arena: Arena, host: Host) -> None:
        """A unit is copied whole: the first one is there while the second is missing."""
        device, model = self.made(), Model("two", 1, 2)
        two = device.allocate(model.place())
        two.fill(0, model.address, HEAD + TENSOR)
        assert two.wait(HEAD + TENSOR)
        assert (two.watermark, two.handle()) == (HEAD + TENSOR, None)
        close(device)

    def test_the_bytes_count_as_queued_until_they_are_there(self, device: Device, host: Host) -> None:
        arena = device.allocate(Place("w", SEGMENT, ""))
        arena.fill(0, host.address, 100)
        assert device.queued_bytes == 100


class TestOnGpu(TestSeparate):
    def made(self) -> SeparateDevice:
        return made_on_gpu()


@pytest.mark.parametrize("hashed", [True, False], ids=["converted", "other"])
def test_the_next_load_of_a_model_copies_nothing(device: SeparateDevice, hashed: bool) -> None:
    model = Model("m", 1, 2, 3)
    load(device, model, hashed=hashed).release()
    assert pages_of(device.pages()) == (9, 0, 3, 0)
    again = device.allocate(model.place(hashed=hashed))
    assert again.wait(model.nbytes), "complete before any byte is in host memory"
    check(again, model)
    assert pages_of(device.pages()) == (9, 3, 0, 0)
    assert (again.copied_bytes, device.pages().copied_bytes) == (0, 3 * TENSOR)
    fill(again, model)
    assert device.pages().copied_bytes == 3 * TENSOR


@pytest.mark.parametrize("hashed", [True, False], ids=["converted", "other"])
def test_fine_tunes_share_their_equal_units(device: SeparateDevice, hashed: bool) -> None:
    base, tuned = Model("base", 1, 2, 3, 4, 5), Model("tuned", 1, 2, 3, 4, 9)
    one, two = load(device, base, hashed=hashed), load(device, tuned, hashed=hashed)
    check(one, base)
    check(two, tuned)
    assert (one.copied_bytes, two.copied_bytes) == (5 * TENSOR, TENSOR)
    used = device.pages()
    assert pages_of(used) == (6, 6, 0, 0), "both together hold 1.2 of one"
    assert [(m.model, m.mapped_bytes, m.shared_bytes) for m in used.models] == [
        ("base", 5 * PAGE_BYTES, 4 * PAGE_BYTES),
        ("tuned", 5 * PAGE_BYTES, 4 * PAGE_BYTES),
    ]
    one.release()
    check(two, tuned)
    assert pages_of(device.pages()) == (6, 5, 1, 0)


def test_loads_at_the_same_time_share_as_well(device: SeparateDevice) -> None:
    base, tuned = Model("base", 1, 2, 3), Model("tuned", 1, 2, 4)
    one, two = device.allocate(base.place()), device.allocate(tuned.place())
    assert pages_of(device.pages()) == (6, 6, 0, 0), "pages of all missing units are reserved"
    fill(one, base)
    fill(two, tuned)
    assert pages_of(device.pages()) == (8, 4, 0, 0)
    check(one, base)
    check(two, tuned)


def test_equal_tensors_of_one_model_share_pages(device: SeparateDevice) -> None:
    model = Model("m", 1, 1, 2)
    arena = load(device, model)
    check(arena, model)
    assert pages_of(device.pages()) == (10, 2, 0, 0)


def test_a_load_that_ends_early_frees_its_pages(device: SeparateDevice) -> None:
    model = Model("m", 1, 2, 3)
    arena = device.allocate(model.place())
    arena.fill(0, model.address, HEAD + TENSOR)
    assert arena.wait(HEAD + TENSOR)
    arena.release()
    assert pages_of(device.pages()) == (11, 0, 1, 0), "the unit that was complete stays"


def test_wrong_hashes_of_an_index_do_not_spread(device: SeparateDevice) -> None:
    forged, honest = Model("forged", 66), Model("honest", 1)
    forged.digests = honest.digests
    check(load(device, forged), forged)
    check(load(device, honest), honest)
    assert pages_of(device.pages()) == (10, 2, 0, 0)


def test_content_reclaimed_while_it_is_found_is_copied(device: SeparateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit that is here when its content is hashed may be reclaimed before it is shared."""
    load(device, Model("first", 1)).release()
    second = Model("second", 1)
    second.digests = Model("other", 66).digests

    def reclaim(*_: object, **__: object) -> None:
        device.allocate(Model("large", *range(20, 20 + COUNT - 1)).place()).release()
        assert device.pages().reusable_bytes == 0

    # The copying thread logs the wrong hash between hashing and sharing.
    monkeypatch.setattr(copying.log, "warning", reclaim)
    check(load(device, second), second)


def test_reclaiming_takes_what_is_cheapest_to_load_again(device: SeparateDevice) -> None:
    tiers: dict[str, Tier] = {"far": "remote", "near": "dram", "disk": "ssd"}
    device.price_by(tiers.__getitem__)
    for n, name in enumerate(("near", "far", "disk")):
        load(device, Model(name, *range(10 * n, 10 * n + 4))).release()
    tiers["new"] = "ssd"
    arena = load(device, Model("new", 90, 91, 92, 93, 94))
    held = {m.model: m.reusable_bytes // PAGE_BYTES for m in device.pages().models}
    assert held == {"far": 4, "disk": 3, "new": 0}
    check(arena, Model("new", 90, 91, 92, 93, 94))


def test_pinned_and_mapped_units_are_never_reclaimed(device: SeparateDevice) -> None:
    load(device, Model("pinned", 1, 2, 3), pinned=True).release()
    mapped = load(device, Model("mapped", 4, 5, 6))
    load(device, Model("free", 7)).release()
    with pytest.raises(InsufficientMemory, match=f"need 14 MiB more of {device.device_id}, of which 12 MiB") as refused:
        device.allocate(Model("new", *range(20, 27)).place())
    assert refused.value.should_retry
    assert pages_of(device.pages()) == (5, 3, 4, 0)
    check(mapped, Model("mapped", 4, 5, 6))


def test_no_pinned_unit_is_reclaimed_to_spare_short_runs() -> None:
    """Of 65 pages 23 are free, in a run shorter than a spared one, and the others are pinned."""
    device = made(pages=65)
    load(device, Model("pinned", *range(42)), pinned=True).release()
    new = Model("new", *range(50, 73))
    load(device, new).release()
    assert pages_of(device.pages()) == (0, 0, 65, 0)
    device.close()


def test_units_that_a_process_still_maps_are_not_reclaimed() -> None:
    device = made()
    arena = load(device, Model("m", 1, 2, 3))
    handle = arena.handle()
    assert isinstance(handle, PagesHandle)
    with mapper(shm.SHM / handle.file, handle.extents[:1]):
        arena.release()
        with pytest.raises(InsufficientMemory):
            device.allocate(Model("new", *range(20, 20 + COUNT)).place())
    load(device, Model("new", *range(20, 20 + COUNT))).release()
    device.close()


def corrupt(arena: PagedArena) -> None:
    if (gpu := GPUS.get(arena._device)) is not None:
        gpu.overwrite(arena, 0, b"damaged")
        return
    handle = arena.handle()
    assert isinstance(handle, PagesHandle)
    with (shm.SHM / handle.file).open("r+b") as file:
        file.seek(handle.extents[0].offset)
        file.write(b"damaged")


@pytest.mark.parametrize("held", [False, True], ids=["reusable", "mapped"])
def test_a_unit_whose_bytes_have_changed_is_copied_again(device: SeparateDevice, held: bool) -> None:
    model = Model("m", 1, 2, 3)
    first = load(device, model)
    corrupt(first)
    if not held:
        first.release()
    second = load(device, model)
    check(second, model)
    assert second.copied_bytes == TENSOR
    assert device.pages().changed_units == device.snapshot().changed_units == 1
    assert pages_of(device.pages())[1] == (4 if held else 3)
    first.release()
    assert pages_of(device.pages()) == (9, 3, 0, 0)


def test_the_sample_takes_the_units_in_turn(device: SeparateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "SAMPLE_BYTES", 1)
    model = Model("m", 1, 2, 3)
    first = load(device, model)
    corrupt(first)
    copied = [load(device, model).copied_bytes for _ in range(3)]
    assert sum(copied) == TENSOR, "one of three loads checked it"


def test_the_sample_leaves_out_what_was_checked_lately() -> None:
    now = [0.0]
    device, model = (
        SeparateDevice("cpu:1", COUNT * PAGE_BYTES, file_name(PREFIX, "cpu:1", "x"), clock=lambda: now[0]),
        Model("m", 1),
    )
    load(device, model).release()
    load(device, model).release()  # checked
    arena = load(device, model)
    corrupt(arena)
    arena.release()
    now[0] += checking.CHECKED_FOR_S / 2
    again = load(device, model)
    assert again.copied_bytes == 0, "it was checked a moment ago"
    again.release()
    now[0] += checking.CHECKED_FOR_S / 2
    last = load(device, model)
    assert last.copied_bytes == TENSOR
    check(last, model)
    close(device)


@pytest.mark.parametrize("make", [made, made_on_gpu])
def test_verify_checks_all_reused_units(monkeypatch: pytest.MonkeyPatch, make: Callable[..., SeparateDevice]) -> None:
    monkeypatch.setattr(checking, "SAMPLE_BYTES", 1)
    device, model = make(verify=True), Model("m", 3, 2, 1)
    corrupt(load(device, model))
    assert load(device, model).copied_bytes == TENSOR
    close(device)


def test_the_status_counts_pages_of_an_earlier_loader_again_without_a_load() -> None:
    now = [0.0]
    first, model = made("first"), Model("m", 1, 2, 3)
    handle = load(first, model).handle()
    assert isinstance(handle, PagesHandle)
    with mapper(shm.SHM / handle.file, handle.extents) as engine:
        name, earlier = file_name(PREFIX, "cpu:1", "second"), retire(PREFIX, "cpu:1")
        second = SeparateDevice("cpu:1", COUNT * PAGE_BYTES, name, earlier=earlier, clock=lambda: now[0])
        engine.kill()
        engine.wait()
    assert pages_of(second.pages()) == (9, 0, 0, 3), "counted a moment ago"
    now[0] += COUNT_EARLIER_S
    assert pages_of(second.pages()) == (12, 0, 0, 0)
    close(second)
    close(first)


def test_pages_of_an_earlier_loader_count_until_they_are_unmapped() -> None:
    first, model = made("first"), Model("m", 1, 2, 3)
    handle = load(first, model).handle()
    assert isinstance(handle, PagesHandle)
    with mapper(shm.SHM / handle.file, handle.extents) as engine:
        second = made("second")  # as after a kill of the first
        assert not (shm.SHM / handle.file).exists(), "no engine can open it any more"
        assert pages_of(second.pages()) == (9, 0, 0, 3)
        arena = load(second, model)
        check(arena, model)
        assert pages_of(second.pages()) == (6, 3, 0, 3)
        with pytest.raises(InsufficientMemory):
            second.allocate(Model("big", *range(30, 37)).place())
        engine.kill()
        engine.wait()
    load(second, Model("big", *range(30, 37)))
    assert pages_of(second.pages()) == (2, 10, 0, 0)
    assert not any(name.startswith(PREFIX + EARLIER) for name in shm.segments(PREFIX))
    second.close()
    first.close()


def test_a_file_stays_while_an_engine_maps_it_and_no_longer() -> None:
    device = made("first")
    handle = load(device, Model("m", 1)).handle()
    assert isinstance(handle, PagesHandle)
    with mapper(shm.SHM / handle.file, handle.extents) as engine:
        device.close()
        assert (shm.SHM / handle.file).exists()
        remove_unmapped(PREFIX, frozenset({"cpu:1"}))
        assert (shm.SHM / handle.file).exists()
        engine.kill()
        engine.wait()
    assert retire(PREFIX, "cpu:1") == []
    assert shm.segments(PREFIX) == []


def test_files_of_devices_that_are_gone_are_removed() -> None:
    (shm.SHM / file_name(PREFIX, "cpu:2", "boot")).touch()
    remove_unmapped(PREFIX, frozenset({"cpu:1"}))
    assert shm.segments(PREFIX) == []


def test_an_empty_file_of_an_earlier_loader_is_removed() -> None:
    Path(shm.SHM / file_name(PREFIX, "cpu:1", "boot")).touch()
    assert retire(PREFIX, "cpu:1") == []
    assert shm.segments(PREFIX) == []


def test_a_paced_device_copies_no_faster_than_its_pace() -> None:
    device, model = SeparateDevice("cpu:1", COUNT * PAGE_BYTES, None, host_bytes_per_second=40 * TENSOR), Model("m", 1, 2, 3, 4)
    began = time.monotonic()
    load(device, model)
    assert time.monotonic() - began >= 0.1
    assert device.pages().paced_bytes_per_second == 40 * TENSOR
    assert 0 < (device.bytes_per_second or 0.0) <= 40 * TENSOR
    assert device.copied_bytes == 4 * TENSOR
    device.close()


def test_a_paced_copy_ends_with_its_arena() -> None:
    device, model = SeparateDevice("cpu:1", COUNT * PAGE_BYTES, None, host_bytes_per_second=1.0), Model("m", 1)
    arena = device.allocate(model.place())
    arena.fill(0, model.address, model.nbytes)
    arena.release()
    device.close()


def test_many_loads_from_several_threads(device: SeparateDevice) -> None:
    models = [Model("a", 1, 2, 3), Model("b", 1, 2, 4), Model("c", 5, 6)]
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        chosen = random.Random(seed)
        try:
            for _ in range(6):
                model = chosen.choice(models)
                arena = load(device, model, hashed=chosen.random() < 0.5)
                check(arena, model)
                arena.release()
        except InsufficientMemory:
            return
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert failures == []
    assert pages_of(device.pages())[1] == 0


def test_hashes_that_one_device_has_computed_serve_another() -> None:
    known = KnownUnits()
    one = SeparateDevice("cpu:1", COUNT * PAGE_BYTES, None, known=known)
    two = SeparateDevice("cpu:2", COUNT * PAGE_BYTES, None, known=known)
    model, other = Model("m", 1, 2, 3), Model("other", 1, 2, 4)
    load(one, model, hashed=False)
    load(two, other, hashed=False).release()
    [row] = [w for w in two.pages().weights if w.weights_id == "m"]
    assert (row.total_bytes, row.missing_bytes) == (3 * TENSOR, TENSOR)
    arena = two.allocate(model.place(hashed=False))
    assert arena.reused_bytes == 2 * TENSOR, "known before the load"
    arena.release()
    one.close()
    two.close()


def test_units_of_expected_models_are_reclaimed_last() -> None:
    device = SeparateDevice("cpu:1", 4 * PAGE_BYTES, None)
    a, b = Model("a", 1, 2), Model("b", 3, 4)
    load(device, a).release()
    load(device, b).release()
    device.expect({"a": 0.9, "b": 0.1})
    load(device, Model("c", 5, 6)).release()
    assert [w.weights_id for w in device.pages().weights] == ["a", "c"]
    device.expect({"c": 0.9, "a": 0.1})
    load(device, b).release()
    assert [w.weights_id for w in device.pages().weights] == ["b", "c"]
    device.close()
