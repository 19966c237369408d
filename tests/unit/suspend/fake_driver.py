"""A CUDA driver made of dictionaries: states and bytes by pid, calls, and faults."""

from __future__ import annotations

from services.nodeagent.devices.port import DeviceInfo
from services.nodeagent.suspend.cuda import State
from services.nodeagent.suspend.gpu_pairs import Pairs
from shared.errors import EngineFailed

LEGAL = {
    ("lock", State.RUNNING): State.LOCKED,
    ("checkpoint", State.LOCKED): State.CHECKPOINTED,
    ("restore", State.CHECKPOINTED): State.LOCKED,
    ("unlock", State.LOCKED): State.RUNNING,
}


class FakeDriver:
    """A fake driver. A process has device bytes while it is not checkpointed.

    Attributes:
        held: Device bytes by process.
        fails: Calls that fail, as (call, pid).
        uuids: GPUs that a restore may be mapped to.
    """

    def __init__(self, held: dict[int, int]) -> None:
        self.held = held
        self.states = dict.fromkeys(held, State.RUNNING)
        self.calls: list[tuple[str, int]] = []
        self.fails: set[tuple[str, int]] = set()
        self.keeps = False
        self.uuids: set[str] = set()
        self.restored_by: dict[int, Pairs] = {}

    def version(self) -> int:
        return 580

    def state(self, pid: int) -> State | None:
        return self.states.get(pid)

    def lock(self, pid: int, timeout_ms: int) -> None:
        self._call("lock", pid)

    def checkpoint(self, pid: int) -> None:
        self._call("checkpoint", pid)

    def restore(self, pid: int, pairs: Pairs = ()) -> None:
        """Restore as the driver does: the pairs must have every GPU, each once on either side."""
        if pairs and not ({o for o, _ in pairs} == {n for _, n in pairs} == self.uuids):
            self.calls.append(("restore", pid))
            raise EngineFailed(f"restore of pid {pid} failed: CUDA_ERROR_INVALID_VALUE")
        self._call("restore", pid)
        self.restored_by[pid] = pairs

    def can_move(self) -> bool:
        return bool(self.uuids)

    def unlock(self, pid: int) -> None:
        self._call("unlock", pid)

    def _call(self, name: str, pid: int) -> None:
        self.calls.append((name, pid))
        after = LEGAL.get((name, self.states[pid]))
        if after is None or (name, pid) in self.fails:
            raise EngineFailed(f"{name} of pid {pid} failed: CUDA_ERROR_ILLEGAL_STATE")
        self.states[pid] = after

    def device_bytes(self) -> dict[int, int]:
        return {p: n for p, n in self.held.items() if self.keeps or self.states[p] is not State.CHECKPOINTED}


class FakeGpu:
    """`cuda:0` as NVML reports it."""

    info = DeviceInfo("cuda:0", "cuda", "fake", 100, 100)

    def __init__(self, driver: FakeDriver, *, sees_pids: bool = True) -> None:
        self._driver = driver
        self._sees_pids = sees_pids

    def private_bytes(self, pids: object) -> dict[int, int]:
        return dict(self._driver.device_bytes()) if self._sees_pids else {}

    def used_bytes(self, private_bytes: int, shared_bytes: int) -> int:
        return sum(self._driver.device_bytes().values())
