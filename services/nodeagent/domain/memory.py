"""The ledger: bytes of each device booked by instances.

An instance books its whole need (`StartInstance.reserve_bytes`, from `shared.sizing`) evenly over
its device set, all or nothing, and keeps it until its process has exited and its weights are
released. Two instances of one model revision share a weight segment, yet each books its full need:
the sum can only overstate the use, and the other booking stays right when one instance ends. On a
separate device, weights that instances share count once, as far as the loader's latest report
proves it, and so does the growth of their KV caches (shared/unit_charges.py). An executor's bytes
count once on each device: while an instance is booked that needs it, and while it runs. Actual use
is measured and reported separately (`DeviceStatus.used_bytes` counts a segment once).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from shared.errors import InsufficientMemory, NotFound, ThawError
from shared.unit_charges import BookedWeights, SharedUnits

_MIB = 1024 * 1024


@dataclass(frozen=True)
class Booking:
    """Memory that an instance has reserved.

    Attributes:
        device_ids: Its devices.
        bytes_each: Bytes on each of them.
        weights: The part of it that is in the pages of a separate device; None: no part.
    """

    device_ids: tuple[str, ...]
    bytes_each: int
    weights: BookedWeights | None = None


@dataclass(frozen=True)
class Ledger:
    """Budgets in bytes by device, and bookings by instance.

    Attributes:
        units: What the loader has reported of the units on each separate device.
        executors: Bytes of the executors that run.
    """

    budgets: Mapping[str, int]
    bookings: Mapping[str, Booking] = field(default_factory=dict)
    units: Mapping[str, SharedUnits] = field(default_factory=dict)
    executors: Mapping[str, int] = field(default_factory=dict)

    def executor_bytes(self, device_id: str) -> int:
        """Bytes of the device's executor: one that runs, or that a booked instance needs."""
        there = (b.weights.executor_bytes for b in self.bookings.values() if b.weights is not None and device_id in b.device_ids)
        return max(self.executors.get(device_id, 0), max(there, default=0))

    def sum_reserved(self, device_id: str) -> int:
        there = [b for b in self.bookings.values() if device_id in b.device_ids]
        booked = sum(b.bytes_each for b in there) + self.executor_bytes(device_id)
        units = self.units.get(device_id)
        return booked if units is None else booked - units.saving([b.weights for b in there if b.weights is not None])

    def free(self, device_id: str) -> int:
        return self.budgets[device_id] - self.sum_reserved(device_id)

    def refusal(
        self, device_ids: tuple[str, ...], total: int, but: str = "", weights: BookedWeights | None = None
    ) -> ThawError | None:
        """The reason why `total` bytes cannot be booked evenly over `device_ids`; None if they can.

        Args:
            device_ids: The device set.
            total: Bytes over all devices.
            but: An instance whose booking counts as free.
            weights: The part of it that is in a separate device's pages.

        Returns:
            The error. `should_retry` distinguishes "not now" from "never".
        """
        if not device_ids or len(set(device_ids)) != len(device_ids):
            return NotFound(f"{list(device_ids)} is not a set of devices: name at least one, each once")
        unknown = [d for d in device_ids if d not in self.budgets]
        if unknown:
            return NotFound(f"This node has no device {', '.join(unknown)}; it has {', '.join(sorted(self.budgets)) or 'none'}")
        each = _share(device_ids, total)
        others = self.remove_booking(but)
        booked = others.set_booking(but, device_ids, total, weights)
        for device in device_ids:
            free = others.free(device)
            rounding = weights.rounding_bytes if weights is not None and device in self.units else 0
            least = each + rounding + (weights.executor_bytes if weights is not None else 0)
            if least > self.budgets[device]:
                return InsufficientMemory(
                    f"{_mib(least)} can never fit {device}, whose budget is {_mib(self.budgets[device])}",
                    should_retry=False,
                )
            if booked.free(device) < 0:
                return InsufficientMemory(
                    f"{_mib(free - booked.free(device))} do not fit {device} now: {_mib(max(0, free))} of "
                    f"{_mib(self.budgets[device])} are free",
                    should_retry=True,
                )
        return None

    def book(self, instance_id: str, device_ids: tuple[str, ...], total: int, weights: BookedWeights | None = None) -> Ledger:
        """The ledger with `total` bytes booked for `instance_id`.

        Raises the error of `refusal`.
        """
        refusal = self.refusal(device_ids, total, but=instance_id, weights=weights)
        if refusal is not None:
            raise refusal
        return self.set_booking(instance_id, device_ids, total, weights)

    def set_booking(self, instance_id: str, device_ids: Iterable[str], total: int, weights: BookedWeights | None = None) -> Ledger:
        """The ledger with this booking, without a check of the budget.

        For a running instance, which holds its bytes in any case. Nothing new is granted until the
        device is within its budget again.
        """
        known = tuple(device_ids)
        return replace(self, bookings={**self.bookings, instance_id: Booking(known, _share(known, total), weights)})

    def set_executor(self, device_id: str, nbytes: int) -> Ledger:
        """The ledger with the bytes of an executor that runs; 0: none runs."""
        others = {k: n for k, n in self.executors.items() if k != device_id}
        return replace(self, executors={**others, device_id: nbytes} if nbytes else others)

    def remove_booking(self, instance_id: str) -> Ledger:
        """The ledger without the booking of `instance_id`."""
        return replace(self, bookings={k: b for k, b in self.bookings.items() if k != instance_id})


def _share(device_ids: tuple[str, ...], total: int) -> int:
    return -(-total // len(device_ids))


def _mib(value: int) -> str:
    return f"{value / _MIB:.0f} MiB"
