"""Metering of finished requests: records go to a spool, and from there to the ledger.

A record is in the spool before the request is forgotten, so it survives the end of this process.
The spool also has the device time of open requests: what a gateway that is killed leaves unrecorded
is charged by the one that adopts its spool.
Reports are made in the background, from sums in memory, or from the spool where these are missing.
They name positions of the spool, and the ledger replies how far it is: whatever was lost in
between, each record counts once (docs/adr/0070).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from services.gateway.adapters.usage_spool import UsageSpool, open_own_spool, open_spools
from services.gateway.domain.followed_usage import FollowedUsage, find_followed
from services.gateway.domain.limits.spending import Unreported
from services.gateway.domain.open_usage import OpenUsage, ended_line, find_lost
from services.gateway.domain.usage_records import UsageRecord
from services.gateway.domain.usage_reports import RecentUsage, next_report, settled_line
from shared.contracts import subjects
from shared.contracts.usage import REPORT_INTERVAL_S, ReportUsage, UsageRecorded
from shared.errors import ThawError, Unreachable
from shared.messaging import Mesh
from shared.telemetry.logs import LogRateLimit

log = logging.getLogger(__name__)
_MAX_UNREPORTED_BYTES = 64 << 20
"""Beyond it records are dropped: some hundred thousand requests without a scheduler."""
_ROTATE_BYTES = 4 << 20
_ROTATE_S = 3_600.0
_REOPEN_S = 60.0
"""A spool in memory is replaced by a file as soon as one can be made; tried so often."""
_SUMMED_AT_ONCE = 256
"""Records: so many at once take less time than one by one."""
OPEN_INTERVAL_S = 0.5
"""The device time of open requests is written so often."""
_OPEN_STEP_US = 50_000
"""… of those that have used so much since the last time."""


class UsageMeter:
    """The spool of one gateway, and spools of gateways that ended.

    Attributes:
        dropped: Records that could not be written.
        unreported: Usage of keys with budgets that the ledger may not have.
        reporting: Held while a report is on its way.
        unresolved: Usage of requests of ended gateways, recorded by others or by none. `record` or
            `end` each of them.
    """

    def __init__(
        self,
        mesh: Mesh,
        gateway_id: str,
        directory: Path,
        on_summed: Callable[[Sequence[UsageRecord]], None] = lambda _: None,
    ) -> None:
        """Call `on_summed` with all records, some of them at once."""
        self.dropped = 0
        self.unreported = Unreported()
        self.reporting = asyncio.Lock()
        self._mesh = mesh
        self._id = gateway_id
        self._directory = directory
        self._own: UsageSpool | None = None
        self._recent = RecentUsage(0)
        """Sums of the newest records of this gateway's spool: those that no report has had."""
        self._unsummed: list[UsageRecord] = []
        """Records that are not in the sums yet."""
        self._on_summed = on_summed
        self._adopted: list[UsageSpool] = []
        self._number = 0
        self._opened_at = 0.0
        self._tried_at = 0.0
        self._has_records = asyncio.Event()
        self._unsettled: set[str] = set()
        self._open_us: dict[str, int] = {}
        """Device time of open requests that is in the spool."""
        self._followed: set[str] = set()
        """Requests whose responses other gateways record, unless they are lost."""
        self.unresolved: list[FollowedUsage] = []
        self._failures = LogRateLimit()

    def open(self) -> None:
        """Open the spools. Blocks. Without a writable directory the own spool is in memory."""
        name = f"{self._id}-{self._number}"
        try:
            self._own, self._adopted = open_spools(self._directory, name)
        except OSError as e:
            self._own = self._open_in_memory(name, e)
            if self._own is None:
                return
        self._opened_at = self._tried_at = time.monotonic()
        spools = {spool: _read_whole(spool) for spool in (self._own, *self._adopted)}
        for spool, data in spools.items():
            self._append_lost(spool, data)
        for usage in find_followed(spools.values()):
            self.unresolved.append(usage)
            self.note_followed(usage)  # the adopted spools are removed
        self._recent = RecentUsage(self._own.size)
        if self._adopted:
            log.info("adopted usage spools of ended gateways", extra={"spools": len(self._adopted)})
            self._has_records.set()

    def _open_in_memory(self, name: str, cause: OSError) -> UsageSpool | None:
        """Make a spool in memory because of `cause`; None if that fails too."""
        try:
            spool = UsageSpool.in_memory(name)
        except OSError as e:
            log.error("failed to open the usage spool; requests are not metered", extra={"error": str(e)})
            return None
        if self._failures.allows("memory"):
            message = "failed to open the usage spool; what the ledger does not have yet is lost if this gateway is killed"
            log.error(message, extra={"directory": str(self._directory), "error": str(cause)})
        return spool

    @staticmethod
    def _append_lost(spool: UsageSpool, data: bytes) -> None:
        """Write what the requests used that were open when their gateway ended."""
        try:
            torn = b"\n" if data and not data.endswith(b"\n") else b""
            if lost := torn + b"".join(usage.as_lost() for usage in find_lost(data)):
                spool.append(lost)
        except OSError as e:
            log.warning("failed to charge the open requests of an ended gateway", extra={"spool": spool.name, "error": str(e)})

    def note_open(self, requests: Iterable[OpenUsage]) -> None:
        """Write the device time of open requests; a failure is ignored until the next time."""
        spool = self._own
        grown = [r for r in requests if r.compute_us - self._open_us.get(r.request_id, 0) >= _OPEN_STEP_US]
        if spool is None or not grown or spool.unreported > _MAX_UNREPORTED_BYTES:
            return
        with contextlib.suppress(OSError):
            spool.append(b"".join(usage.line() for usage in grown))
            self._open_us |= {usage.request_id: usage.compute_us for usage in grown}
        self._has_records.set()

    def note_followed(self, usage: FollowedUsage) -> None:
        """Write what a request used whose response another gateway records, unless it is lost."""
        if self._own is None or self._own.unreported > _MAX_UNREPORTED_BYTES:
            return
        with contextlib.suppress(OSError):  # then it is lost if both gateways are
            self._own.append(usage.line())
            self._followed.add(usage.request_id)
        self._has_records.set()

    def end(self, request_id: str) -> None:
        """A request ended that is not recorded here."""
        if self._own is not None and self._forget(request_id):
            with contextlib.suppress(OSError):
                self._own.append(ended_line(request_id))

    def _forget(self, request_id: str) -> bool:
        """Return True if the spool has lines of the request that its end must follow."""
        is_followed = request_id in self._followed
        self._followed.discard(request_id)
        return self._open_us.pop(request_id, None) is not None or is_followed

    def record(self, record: UsageRecord, request_id: str = "") -> None:
        """Write one record; a failure is counted and logged.

        Args:
            request_id: The request that has ended, as in `note_open`.
        """
        spool = self._own
        if spool is None or spool.unreported > _MAX_UNREPORTED_BYTES:
            self._drop("the spool is full" if spool is not None else "there is no spool")
            return
        line = record.line()
        if (self._open_us or self._followed) and self._forget(request_id):
            line = ended_line(request_id) + line  # in one write: neither counts without the other
        try:
            spool.append(line)
        except OSError as e:
            self._drop(str(e))
            return
        self._unsummed.append(record)
        if len(self._unsummed) >= _SUMMED_AT_ONCE:
            self.sum_up()
        if record.answer_id:
            self._unsettled.add(record.answer_id)
        if not self._has_records.is_set():
            self._has_records.set()

    def sum_up(self) -> None:
        """Add the records to the sums."""
        records, self._unsummed = self._unsummed, []
        if self._own is not None and not all(map(self._recent.add, records)):
            self._recent = RecentUsage(self._own.size)  # those before it are read from the spool
        self._on_summed(records)

    def _drop(self, reason: str) -> None:
        self.dropped += 1
        if self._failures.allows("dropped"):
            log.error("failed to meter a request", extra={"error": reason, "dropped": self.dropped})

    def settle(self, answer_id: str) -> None:
        """No other gateway will record the usage of this response.

        The ledger need not check whether one has.
        """
        if self._own is None or answer_id not in self._unsettled:
            return
        self._unsettled.discard(answer_id)
        with contextlib.suppress(OSError):  # then the ledger checks
            self._own.append(settled_line(answer_id))

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            await self._has_records.wait()
            await asyncio.sleep(REPORT_INTERVAL_S)
            self._has_records.clear()
            if not await self.flush():
                self._has_records.set()

    async def flush(self) -> bool:
        """Report all records; return False if the ledger does not have all of them."""
        async with self.reporting:
            if (own := self._own) is not None:
                self.unreported.cut(own.size)
                is_done = await self._report_own(own)
                self.unreported.confirm(own.position)
                if not is_done:
                    return False
                self._unsettled.clear()  # reported
                if self._own is own:  # not closed meanwhile
                    self._rotate(own)
        for spool in list(self._adopted):
            if await self._report(spool) and spool in self._adopted:  # another call may have reported it
                self._adopted.remove(spool)
                spool.remove()
        return not self._adopted

    async def _report_own(self, spool: UsageSpool) -> bool:
        """Report the newest records from memory, and those before them from the spool."""
        while spool.unreported:
            self.sum_up()
            recent = self._recent
            if spool.position < recent.start:
                if not await self._report(spool, recent.start):
                    return False
                continue
            self._recent = RecentUsage(spool.size)
            if spool.position > recent.start:
                continue  # the ledger has a part of it: the rest is read from the spool
            if not await self._send(spool, recent.build(spool.name, spool.size, self._unsettled)):
                return False  # the next attempt reads these records from the spool
        return True

    async def _report(self, spool: UsageSpool, until: int | None = None) -> bool:
        """Report a spool, up to a position; return False if the ledger does not have it."""
        while spool.unreported and (until is None or spool.position < until):
            try:
                report = await asyncio.to_thread(_read_report, spool, until)
            except OSError as e:
                if self._failures.allows(f"read {spool.name}"):
                    log.error("failed to read a usage spool; retrying", extra={"spool": spool.name, "error": str(e)})
                return False
            if report is None:
                return True  # the rest is a damaged line
            if not await self._send(spool, report):
                return False
        return True

    async def _send(self, spool: UsageSpool, report: ReportUsage) -> bool:
        try:
            reply = await self._mesh.request(subjects.USAGE, report, UsageRecorded)
        except Unreachable:
            return False  # no leader now; the next attempt sends the same records
        except ThawError as e:
            log.warning("failed to report usage", extra={"error": e.message})
            return False
        spool.position = min(reply.position, spool.size)
        return True

    def _rotate(self, spool: UsageSpool) -> None:
        """Begin a new spool if the present one is large or old, and the ledger has all of it.

        The ledger forgets spools that are silent for weeks. Until then it has a row for each.
        """
        now = time.monotonic()
        is_used_up = spool.size > _ROTATE_BYTES or now - self._opened_at > _ROTATE_S
        is_due = is_used_up or (spool.is_in_memory and now - self._tried_at > _REOPEN_S)
        if not spool.size or not is_due or spool.unreported or self._followed:
            return
        self._tried_at = now
        self._number += 1
        name = f"{self._id}-{self._number}"
        fresh: UsageSpool | None = None
        try:
            fresh = open_own_spool(self._directory, name)
        except OSError as e:
            if not spool.is_in_memory:
                log.warning("failed to begin a new usage spool", extra={"error": str(e)})
            elif is_used_up:
                fresh = self._open_in_memory(name, e)
        if fresh is not None:
            self._own, self._opened_at = fresh, now
            self._recent = RecentUsage(fresh.size)
            self._open_us.clear()  # open requests are written again
            spool.remove()

    def close(self) -> None:
        """Close the files; those without unreported records are deleted."""
        for spool in (*self._adopted, *([self._own] if self._own is not None else [])):
            if spool.is_in_memory and spool.unreported:
                log.error("usage that the ledger does not have is lost", extra={"spool": spool.name, "bytes": spool.unreported})
            if spool.unreported or self._followed or spool in self._adopted:
                spool.close()
            else:
                spool.remove()
        self._own, self._adopted = None, []


def _read_whole(spool: UsageSpool) -> bytes:
    """Return the content of a spool; empty if it cannot be read."""
    try:
        return spool.read_all()
    except OSError as e:
        log.warning("failed to read a usage spool", extra={"spool": spool.name, "error": str(e)})
        return b""


def _read_report(spool: UsageSpool, until: int | None) -> ReportUsage | None:
    data = spool.read()
    return next_report(spool.name, spool.position, data if until is None else data[: until - spool.position])
