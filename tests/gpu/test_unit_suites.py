"""The suites of devices that keep units, on real GPUs: `python -m pytest tests/gpu`.

The tests are those of tests/unit/loader/store, where they run on cpu and on the stand-in driver.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.gpu.real_gpus import RealGpus, load_gpus
from tests.unit.loader.store import test_partial_loads, test_peers, test_separate, test_separate_live
from tests.unit.loader.store.gpu import Gpu, Gpus
from tests.unit.loader.store.peer_nodes import GpuNode, Node
from tests.unit.loader.store.separate_bench import PAGES, GpuSeparateBench
from tests.unit.loader.store.separate_devices import COUNT, GPUS
from weights.store.residency import KnownUnits
from weights.store.separate import SeparateDevice

pytestmark = pytest.mark.gpu

test_reuse = test_separate.test_the_next_load_of_a_model_copies_nothing
test_sharing = test_separate.test_fine_tunes_share_their_equal_units
test_sharing_while_loading = test_separate.test_loads_at_the_same_time_share_as_well
test_equal_tensors = test_separate.test_equal_tensors_of_one_model_share_pages
test_early_end = test_separate.test_a_load_that_ends_early_frees_its_pages
test_wrong_hashes = test_separate.test_wrong_hashes_of_an_index_do_not_spread
test_reclaimed_content = test_separate.test_content_reclaimed_while_it_is_found_is_copied
test_order_of_reclaiming = test_separate.test_reclaiming_takes_what_is_cheapest_to_load_again
test_pins = test_separate.test_pinned_and_mapped_units_are_never_reclaimed
test_changed_bytes = test_separate.test_a_unit_whose_bytes_have_changed_is_copied_again
test_sample_of_checks = test_separate.test_the_sample_takes_the_units_in_turn
test_threads = test_separate.test_many_loads_from_several_threads
test_second_load = test_separate_live.test_a_second_load_copies_nothing_and_a_fine_tune_a_fifth
test_partial_reuse = test_partial_loads.test_a_load_of_units_that_are_there_reads_no_weights
test_partial_fine_tune = test_partial_loads.test_the_second_of_two_fine_tunes_starts_with_a_fifth_of_the_bytes
test_readers_of_host_memory = test_partial_loads.test_readers_of_host_memory_load_the_weights_as_a_whole
test_wrong_bytes = test_partial_loads.test_bytes_that_differ_from_the_index_fail_a_partial_load
test_peer_copy = test_peers.test_units_of_another_device_need_no_bytes_in_host_memory
test_partial_peer_copy = test_peers.test_only_units_that_no_device_has_are_read
test_held_for_a_copy = test_peers.test_units_being_copied_are_not_reclaimed_there
test_slow_peer = test_peers.test_host_memory_takes_what_a_slow_device_has_not_copied
test_damaged_peer = test_peers.test_a_damaged_unit_of_another_device_is_taken_from_host_memory
test_closing_peer = test_peers.test_a_device_that_closes_midway_is_no_source_any_more


@pytest.fixture
def device() -> Iterator[SeparateDevice]:
    machine = RealGpus(COUNT)
    gpu = Gpu(machine=machine)
    GPUS[gpu.device] = gpu
    yield gpu.device
    assert gpu.device.audit() == []
    del GPUS[gpu.device]
    machine.close()


class RealNode(GpuNode):
    def make_gpus(self, known: KnownUnits, *, verify: bool, reuse_pages: int | None = None) -> Gpus:
        return RealGpus(8, 2, verify=verify, known=known, reuse_pages=reuse_pages)


@pytest.fixture
def make() -> type[RealNode]:
    load_gpus(2)
    return RealNode


@pytest.fixture
def node(make: type[RealNode]) -> Iterator[Node]:
    node = make(verify=True)
    yield node
    node.close()


class RealBench(GpuSeparateBench):
    def make_gpus(self) -> Gpus:
        return RealGpus(PAGES)

    def check_pins(self) -> None:
        """Check nothing: the driver does not list what is page-locked."""


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[RealBench]:
    load_gpus()
    bench = RealBench(tmp_path / "home")
    await bench.start()
    yield bench
    await bench.stop()
