"""Engine sleep followed by CUDA checkpoint.

At sleep level 1 the engine has dropped its KV cache and moved its weights to host memory, so that
little device memory is left to copy. A resume runs in the opposite order. SwapServeLLM, 3.3: the
engine's help makes the snapshot small. Whether it is faster than the checkpoint alone is measured.
"""

from __future__ import annotations

import asyncio

from services.nodeagent.domain.state import Outlook
from services.nodeagent.suspend.cuda import CudaCheckpoint
from services.nodeagent.suspend.estimates import SuspendEstimates
from services.nodeagent.suspend.memory import footprint
from services.nodeagent.suspend.memory_usage import MemoryUsage
from services.nodeagent.suspend.port import SuspendResult, Target
from services.nodeagent.suspend.sleep import Sleep
from shared.contracts.node import SuspendWay
from shared.errors import CannotSuspend, ThawError

_LEVEL = 1
_KEPT_SHARE = 0.5
"""Expected share of weights in device memory until measured; the KV cache is not kept."""


class SleepThenCheckpoint:
    """Suspends engines by sleep and checkpoint."""

    name: SuspendWay = "sleep_cuda"

    def __init__(self, cuda: CudaCheckpoint, sleep: Sleep, memory_usage: MemoryUsage) -> None:
        self._cuda = cuda
        self._sleep = sleep
        self._memory_usage = memory_usage
        self._estimates = SuspendEstimates(left=0.0, resume_bytes_per_s=5e9, least_resume_s=0.6)
        self._kept_share = _KEPT_SHARE

    def explain_unavailable(self) -> str:
        return self._cuda.explain_unavailable()

    def outlook(self, target: Target) -> Outlook:
        if _LEVEL not in target.sleep_levels:
            return Outlook(reason=f"{target.engine} has no sleep level {_LEVEL} here")
        alone = self._cuda.outlook(target)
        if alone.way is None:
            return alone
        snapshot = int((alone.left_bytes + alone.snapshot_bytes) * self._kept_share)
        return Outlook(
            way="sleep_cuda",
            left_bytes=alone.left_bytes,
            snapshot_bytes=snapshot,
            resume_s=self._estimates.resume_s(snapshot),
            moves_to=alone.moves_to,
        )

    async def suspend(self, target: Target) -> SuspendResult:
        """Suspend the engine.

        If the checkpoint fails, the engine stays asleep until it is woken.
        """
        used = await asyncio.to_thread(self._memory_usage.used_bytes, target)
        host = await asyncio.to_thread(footprint, target.pids)
        try:
            await self._sleep(target.instance_id, _LEVEL)
        except ThawError as e:
            raise CannotSuspend(f"The engine refused to sleep: {e.message}") from e
        taken = await self._cuda.suspend(target)
        now = await asyncio.to_thread(footprint, target.pids)
        snapshot = max(taken.snapshot_bytes, now.pss - host.pss)
        if used:
            self._kept_share += 0.3 * (snapshot / used - self._kept_share)
        return SuspendResult(max(used, taken.used_bytes), taken.left_bytes, snapshot)

    async def resume(self, target: Target) -> None:
        await self._cuda.resume(target)

    def explain_spill_unavailable(self) -> str:
        return self._cuda.explain_spill_unavailable()

    async def spill(self, target: Target) -> int:
        """Move the snapshot, with weights in host memory, to swap."""
        return await self._cuda.spill(target)

    def forget(self, instance_id: str) -> None:
        self._cuda.forget(instance_id)

    def rename(self, old: str, new: str) -> None:
        self._cuda.rename(old, new)

    def learn(self, snapshot_bytes: int, took_s: float) -> None:
        self._estimates = self._estimates.learn_resumed(snapshot_bytes, took_s)
