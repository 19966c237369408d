"""A device with memory of its own under random loads, failures and releases."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.errors import InsufficientMemory
from tests.unit.loader.store.separate_devices import Model, check, close, fill, made, made_on_gpu, pages_of
from weights.store.arena import PagedArena
from weights.store.separate import SeparateDevice
from weights.store.units import PAGE_BYTES

MODELS = [Model("a", 1, 2), Model("b", 1, 3), Model("c", 4, 5, 6), Model("d", 2, 2)]


class DeviceMachine(RuleBasedStateMachine):
    """Loads, failures and releases in any order, with real bytes in five pages."""

    def __init__(self) -> None:
        super().__init__()
        self.device = self.make()
        self.arenas: list[tuple[PagedArena, Model]] = []

    @rule(model=st.sampled_from(MODELS), hashed=st.booleans(), whole=st.booleans())
    def load(self, model: Model, hashed: bool, whole: bool) -> None:
        used = self.device.pages()
        try:
            arena = self.device.allocate(model.place(hashed=hashed))
        except InsufficientMemory:
            assert pages_of(self.device.pages()) == pages_of(used)
            assert (used.free_bytes + used.reusable_bytes) // PAGE_BYTES < len(model.seeds) + 3
            return
        self.arenas.append((arena, model))
        if not whole:
            return
        try:
            fill(arena, model)
        except InsufficientMemory:  # pages are reserved as units of unknown content are hashed
            assert not hashed
            self.arenas.pop()
            arena.release()

    @precondition(lambda self: self.arenas)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        arena, _ = self.arenas.pop(data.draw(st.integers(0, len(self.arenas) - 1)))
        arena.release()

    @invariant()
    def is_conserved(self) -> None:
        assert self.device.audit() == []
        pages_of(self.device.pages())

    @invariant()
    def every_complete_arena_has_its_bytes(self) -> None:
        for arena, model in self.arenas:
            if arena.handle() is not None:
                check(arena, model)

    def make(self) -> SeparateDevice:
        return made("machine", pages=5)

    def teardown(self) -> None:
        for arena, _ in self.arenas:
            arena.release()
        assert self.device.pages().mapped_bytes == 0
        close(self.device)


TestDevice = DeviceMachine.TestCase
TestDevice.settings = settings(max_examples=6, stateful_step_count=10, deadline=None)


class GpuMachine(DeviceMachine):
    """The same on a GPU whose memory is the five pages: allocations never exceed them."""

    def make(self) -> SeparateDevice:
        return made_on_gpu(pages=5)


TestGpu = GpuMachine.TestCase
TestGpu.settings = TestDevice.settings
