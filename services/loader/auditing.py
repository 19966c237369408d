"""Audit device memory: on request, and in the background after changes (invariant 12).

A violation counts only if two audits in succession find it, because the records and the mappings of
processes cannot be read at the same moment.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace

from services.loader.domain.ownership import instances_on, unowned_arenas
from services.loader.loop import Loop
from shared.contracts.audit import DeviceAudit
from weights.store.auditing import Audit, confirm

log = logging.getLogger(__name__)
_CONFIRM_AFTER_S = 0.5
_BETWEEN_AUDITS_S = 5.0


class Auditor:
    """Audits the devices of a loader.

    Attributes:
        violations: Violations that the latest audit found, by device.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.violations: Mapping[str, tuple[str, ...]] = {}

    async def audit(self) -> tuple[DeviceAudit, ...]:
        """Audit all cpu devices with memory of their own."""
        found = await self._audit_once()
        if any(a.violations for a in found.values()):
            await asyncio.sleep(_CONFIRM_AFTER_S)
            again = await self._audit_once()
            # A GPU that was opened meanwhile was audited once: nothing of it is confirmed yet.
            found = {d: confirm(found[d], a) if d in found else replace(a, violations=()) for d, a in again.items()}
        self._record({d: a.violations for d, a in found.items()})
        return tuple(self._result(d, a) for d, a in found.items())

    async def keep_audited(self) -> None:
        """Audit now and after changes of the state, at most every few seconds. Never returns."""
        while True:
            change = self._loop.next_change
            try:
                await self.audit()
            except OSError:
                log.exception("failed to audit device memory")
            await change.wait()
            await asyncio.sleep(_BETWEEN_AUDITS_S)

    async def _audit_once(self) -> dict[str, Audit]:
        copies = self._loop.runs.copies
        if copies is None:
            return {}
        found = await asyncio.to_thread(copies.audit)
        state = self._loop.state
        return {d: replace(a, violations=(*a.violations, *unowned_arenas(state, arenas))) for d, (a, arenas) in found.items()}

    def _record(self, violations: Mapping[str, tuple[str, ...]]) -> None:
        for device, found in violations.items():
            for text in sorted(set(found) - set(self.violations.get(device, ()))):
                log.error("device memory is not conserved", extra={"device": device, "violation": text})
        if violations != self.violations:
            self._loop.changed.set()  # the next status has them
        self.violations = violations

    def _result(self, device: str, audit: Audit) -> DeviceAudit:
        store = audit.snapshot.store
        instances, missing = instances_on(self._loop.state, device)
        return DeviceAudit(
            device_id=device,
            total_pages=store.count,
            free_pages=len(store.free),
            mapped_pages=store.mapped_pages,
            reusable_pages=store.reusable_pages,
            lent_pages=store.lent_pages,
            held_back_pages=audit.held_back_pages,
            unclaimed_pages=audit.unclaimed_pages,
            units=len(store.units),
            instances=instances,
            missing_instances=missing,
            processes=audit.processes,
            violations=audit.violations,
            changed_units=audit.snapshot.changed_units,
        )
