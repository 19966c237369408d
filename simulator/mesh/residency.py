"""The simulated loader's record of the weights on a device with memory of its own.

A load reserves the memory of its weights at its begin. Weights without an instance are reusable. If
a load needs memory, the loader evicts reusable weights, whole or in part, those first that are
least likely to be loaded again, weighted by latency sensitivity (Tangram Eq. 2). Simulated models
share no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

from shared.contracts.loader import DeviceMemory, WeightsOnDevice
from simulator.instances import SimDevice


class Residency:
    """The weights of one device."""

    def __init__(self, device: SimDevice) -> None:
        self._device = device
        self._holders: dict[str, set[str]] = {}
        """Instances by model."""
        self._nbytes: dict[str, int] = {}
        """Sizes of all weights that the device has had, by model."""
        self._incomplete: set[str] = set()
        self.likelihood: Mapping[str, float] = {}
        """Probability that a model is requested soon, times its latency sensitivity, by model."""

    def reserve(self, model: str, nbytes: int, instance: str) -> int:
        """Reserve the memory of a load, and return the bytes that the device lacks."""
        self._nbytes[model] = nbytes
        holders = self._holders.setdefault(model, set())
        holders.add(instance)
        if len(holders) > 1:
            return 0
        missing = nbytes - self._device.drop(model)
        self._incomplete.add(model)
        over = self.mapped_bytes + self._device.kept_bytes - self._device.budget
        for kept in sorted(self._device.kept.values(), key=lambda k: (self.likelihood.get(k.model, 0.0), k.last_used)):
            if over <= 0:
                break
            over -= self._device.drop(kept.model, over)
        return missing

    def complete(self, model: str) -> None:
        self._incomplete.discard(model)

    def release(self, model: str, instance: str, now: float) -> None:
        """Remove an instance. Complete weights without one become reusable."""
        holders = self._holders.get(model)
        if holders is None or instance not in holders:
            return
        holders.remove(instance)
        if holders:
            return
        del self._holders[model]
        if model not in self._incomplete:
            self._device.keep(model, self._nbytes[model], now)
        self._incomplete.discard(model)

    def count_copyable(self, model: str) -> int:
        """Return the bytes that another device can copy from here."""
        if model in self._holders:
            return 0 if model in self._incomplete else self._nbytes[model]
        kept = self._device.kept.get(model)
        return kept.nbytes if kept is not None else 0

    @property
    def mapped_bytes(self) -> int:
        return sum(self._nbytes[m] for m in self._holders)

    def clear(self) -> None:
        """Forget all weights, because the node has failed."""
        for model in list(self._device.kept):
            self._device.drop(model)
        self._holders.clear()
        self._incomplete.clear()

    def memory(self, others: Mapping[str, Residency]) -> DeviceMemory:
        """Return the loader's report.

        Args:
            others: The node's other devices, from which weights are copied.
        """
        mapped, kept = self.mapped_bytes, self._device.kept_bytes
        here = sorted({*self._holders, *self._device.kept})
        return DeviceMemory(
            device_id=f"cuda:{self._device.index}",
            total_bytes=self._device.budget,
            free_bytes=self._device.budget - mapped - kept,
            mapped_bytes=mapped,
            reusable_bytes=kept,
            weights=tuple(self._on_device(m, others) for m in here),
        )

    def _on_device(self, model: str, others: Mapping[str, Residency]) -> WeightsOnDevice:
        total, kept = self._nbytes[model], self._device.kept.get(model)
        if model in self._holders:
            return WeightsOnDevice(
                weights_id=model, total_bytes=total, missing_bytes=0, read_bytes=0, unmapped_bytes=0, exclusive_bytes=total
            )
        missing = total - (kept.nbytes if kept is not None else 0)
        return WeightsOnDevice(
            weights_id=model,
            total_bytes=total,
            missing_bytes=missing,
            read_bytes=missing,
            unmapped_bytes=total,
            peer_bytes={device_id: n for device_id, other in others.items() if (n := min(missing, other.count_copyable(model)))},
        )
