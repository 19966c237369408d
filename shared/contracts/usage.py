"""Metering: gateways report what requests used, and operators ask for sums.

A gateway appends a record of each finished request to a file (its spool), and reports the records
from one position of the file to another. The ledger remembers how far it has recorded each spool,
so that no record counts twice or is lost, whichever process ends in between (docs/adr/0070).
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Literal

from pydantic import Field

from shared.contracts.base import Deadline, Frozen, Message, Request
from shared.contracts.keys import KeySpending
from shared.contracts.prices import GIB_HOUR, Cost, Prices

REPORT_INTERVAL_S = 2.0
MAX_ROWS_PER_REPORT = 1_000
MAX_ROWS_VIEWED = 50_000
HOURS_PER_DAY = 24
RETENTION_HOURS = 400 * HOURS_PER_DAY
HOURLY_HOURS = 62 * HOURS_PER_DAY
"""Older hours are summed up by day: those before the present and the last month."""
MAX_HOUR = 10_000_000
"""Hours since 1970, of the year 3110."""
MAX_COUNT = 1 << 53
MAX_NAME_CHARACTERS = 1_000
MAX_KEYS_PER_VIEW = 1_000
Dimension = Literal["key", "model", "adapter", "hour", "day"]


class Counts(Frozen):
    """The usage of requests.

    Attributes:
        requests: Finished requests that engines worked on.
        failed: The part of them without a complete response, abandoned ones included.
        prompt_tokens: Tokens of prompts, those from a cache included.
        cached_tokens: Prompt tokens that an engine had in its cache.
        compute_cpu_us: Microseconds that cpu devices computed for the requests: a step's time is
            split by its tokens, and counts for each device of the instance. 0 of engines that do
            not measure it. With `background_s`.
        compute_cuda_us: The same of cuda devices.
        background_s: The part of both, in seconds, for no request: charged to the owner of the
            model, or shared by the requests that waited for a start whose migrations caused it.
        cold_requests: Requests that waited for a cold start.
        cold_start_s: Their shares of the seconds of these starts, and of the restarts that these
            caused. The requests that waited for a start share it equally.
        cold_device_s: The same, times the devices of the instance that started.
        held_cpu_byte_s: Bytes that models had reserved on cpu devices, times seconds. Charged to
            the owner of the model, whether it was used, kept alive, prewarmed or pinned.
        held_cuda_byte_s: The same of cuda devices.
        held_host_byte_s: Bytes of snapshots of suspended engines in host memory and swap, times
            seconds.
        held_cache_byte_s: Bytes of weights in host memory that no instance used, times seconds.
            Models with the same weights share it.
        victims: Shares of the instances that left for these starts: evicted, preempted, or with
            their requests migrated.
        clearing_s: Shares of the seconds from the decision until the victims' memory was free.
        clearing_device_s: The same, times the devices of the instance that started.
        restart_s: The part of `cold_start_s` for restarts of models that these starts preempted,
            and for starts of destinations of migrated requests.
    """

    requests: int = Field(default=0, ge=0, le=MAX_COUNT)
    failed: int = Field(default=0, ge=0, le=MAX_COUNT)
    prompt_tokens: int = Field(default=0, ge=0, le=MAX_COUNT)
    cached_tokens: int = Field(default=0, ge=0, le=MAX_COUNT)
    completion_tokens: int = Field(default=0, ge=0, le=MAX_COUNT)
    compute_cpu_us: int = Field(default=0, ge=0, le=MAX_COUNT)
    compute_cuda_us: int = Field(default=0, ge=0, le=MAX_COUNT)
    background_s: float = Field(default=0.0, ge=0)
    cold_requests: int = Field(default=0, ge=0, le=MAX_COUNT)
    cold_start_s: float = Field(default=0.0, ge=0)
    cold_device_s: float = Field(default=0.0, ge=0)
    held_cpu_byte_s: float = Field(default=0.0, ge=0)
    held_cuda_byte_s: float = Field(default=0.0, ge=0)
    held_host_byte_s: float = Field(default=0.0, ge=0)
    held_cache_byte_s: float = Field(default=0.0, ge=0)
    victims: float = Field(default=0.0, ge=0)
    clearing_s: float = Field(default=0.0, ge=0)
    clearing_device_s: float = Field(default=0.0, ge=0)
    restart_s: float = Field(default=0.0, ge=0)

    @property
    def compute_s(self) -> float:
        """Device-seconds of computing, of all kinds of devices."""
        return (self.compute_cpu_us + self.compute_cuda_us) / 1e6

    @property
    def held_gib_h(self) -> float:
        """GiB-hours held on devices of all kinds."""
        return (self.held_cpu_byte_s + self.held_cuda_byte_s) / GIB_HOUR

    @property
    def parked_gib_h(self) -> float:
        """GiB-hours of suspended engines in host memory and swap."""
        return self.held_host_byte_s / GIB_HOUR

    @property
    def cached_gib_h(self) -> float:
        """GiB-hours of weights in host memory that no instance used."""
        return self.held_cache_byte_s / GIB_HOUR


class UsageRow(Frozen):
    """Counts of one key, model and LoRA adapter in one hour.

    Attributes:
        hour: Hours since 1970 in UTC, of the requests' ends.
        key: Name of the API key; empty: none.
        adapter: Empty: the model itself.
    """

    hour: int = Field(ge=0, le=MAX_HOUR)
    key: str = Field(default="", max_length=MAX_NAME_CHARACTERS)
    model: str = Field(max_length=MAX_NAME_CHARACTERS)
    adapter: str = Field(default="", max_length=MAX_NAME_CHARACTERS)
    counts: Counts


class ColdWait(Frozen):
    """Requests that waited for one start of an instance.

    Attributes:
        plan_id: The plan of the start.
        start_s: Seconds of the whole start.
        device_kind: Kind of the instance's devices (cpu, cuda); empty: unknown.
        devices: How many devices it has.
    """

    plan_id: str = Field(max_length=MAX_NAME_CHARACTERS)
    hour: int = Field(ge=0, le=MAX_HOUR)
    key: str = Field(default="", max_length=MAX_NAME_CHARACTERS)
    model: str = Field(max_length=MAX_NAME_CHARACTERS)
    adapter: str = Field(default="", max_length=MAX_NAME_CHARACTERS)
    requests: int = Field(ge=1, le=MAX_COUNT)
    start_s: float = Field(ge=0, allow_inf_nan=False)
    device_kind: str = Field(default="", max_length=20)
    devices: int = Field(default=1, ge=1, le=10_000)


class ResponseUsage(Frozen):
    """Usage of one response that another gateway may report as well.

    With an Idempotency-Key a gateway takes over from one that was lost, and cannot know what that
    one reported.

    Attributes:
        answer_id: Id of the response; reports of the same id count once.
        row: One request.
        wait: The start that it waited for.
    """

    answer_id: str = Field(min_length=1, max_length=MAX_NAME_CHARACTERS)
    row: UsageRow
    wait: ColdWait | None = None


class ReportUsage(Request):
    """Records of a spool between two positions, summed up.

    Attributes:
        responses: Records that are not in `rows` and `waits`, because another gateway may have
            reported them.
    """

    deadline_ms: Deadline = 5_000
    kind: Literal["report_usage"] = "report_usage"
    spool: str = Field(min_length=1, max_length=100)
    start: int = Field(ge=0, description="Position in bytes of the first record.")
    end: int = Field(ge=0, description="Position after the last record.")
    rows: tuple[UsageRow, ...] = Field(max_length=MAX_ROWS_PER_REPORT)
    waits: tuple[ColdWait, ...] = Field(default=(), max_length=MAX_ROWS_PER_REPORT)
    responses: tuple[ResponseUsage, ...] = Field(default=(), max_length=MAX_ROWS_PER_REPORT)


class UsageRecorded(Message):
    """The position up to which the ledger has a spool; the next report starts there."""

    kind: Literal["usage_recorded"] = "usage_recorded"
    position: int = Field(ge=0)


class Period(Frozen):
    """The present day and month in UTC, as hours since 1970: of their beginnings and ends."""

    day: int = Field(ge=0, le=MAX_HOUR)
    day_end: int = Field(ge=0, le=MAX_HOUR)
    month: int = Field(ge=0, le=MAX_HOUR)
    month_end: int = Field(ge=0, le=MAX_HOUR)

    @classmethod
    def of_hour(cls, hour: int) -> Period:
        month = datetime.fromtimestamp(hour * 3600, UTC).replace(day=1, hour=0)
        month_end = (month + timedelta(days=32)).replace(day=1)
        day = hour // 24 * 24
        return cls(day=day, day_end=day + 24, month=int(month.timestamp()) // 3600, month_end=int(month_end.timestamp()) // 3600)


class Spent(KeySpending):
    """The spending of a key in the present day and month, by the ledger.

    Tokens are those of prompts and completions. Device-seconds are those of computing and of cold
    starts, which contain clearing. Money is their cost, and that of starts, of
    clearing and of memory held; 0 without prices.
    """


class ViewSpending(Request):
    """Ask what keys have used in the present day and month.

    Attributes:
        has_device_seconds_budget: The device-seconds of cold starts are needed, even if they have
            no price.
    """

    deadline_ms: Deadline = 2_000
    kind: Literal["view_spending"] = "view_spending"
    keys: tuple[str, ...] = Field(max_length=MAX_KEYS_PER_VIEW)
    has_device_seconds_budget: bool = False


class SpendingViewed(Message):
    """The spending of the requested keys, by the ledger; keys without usage are left out.

    Attributes:
        prices: The mesh's prices. Gateways price usage with them that the ledger does not have yet.
    """

    kind: Literal["spending_viewed"] = "spending_viewed"
    period: Period
    keys: dict[str, Spent] = Field(default_factory=dict)
    prices: Prices | None = None


class ViewUsage(Request):
    """Ask for sums of an interval by some dimensions.

    Attributes:
        since: First hour, in hours since 1970.
        until: Hour after the last; None: now.
        model: Of this model only; None: of all. Schedulers of version 0.1 ignore it.
    """

    deadline_ms: Deadline = 15_000
    kind: Literal["view_usage"] = "view_usage"
    since: int = Field(ge=0, le=MAX_HOUR)
    until: int | None = Field(default=None, ge=0, le=MAX_HOUR)
    model: str | None = Field(default=None, max_length=MAX_NAME_CHARACTERS)
    by: tuple[Dimension, ...] = Field(default=("key", "model"), max_length=5)


class UsageSum(Frozen):
    """Counts of one combination of the dimensions; None: summed over all.

    Attributes:
        hour: Hours since 1970 in UTC; the first of its day for hours older than `HOURLY_HOURS`.
        day: The first hour of the day in UTC.
        cold_start_phases_s: The parts of `cold_start_s` by phase, of the critical paths of the
            starts. Starts whose phases were not recorded have no part.
        cost: The counts at the present prices; None: the mesh has no prices.
    """

    key: str | None = None
    model: str | None = None
    adapter: str | None = None
    hour: int | None = None
    day: int | None = None
    counts: Counts
    cold_start_phases_s: dict[str, float] = Field(default_factory=dict)
    cost: Cost | None = None


class UsageViewed(Message):
    """The sums, largest number of tokens first. `complete`: no row was left off.

    Attributes:
        currency: Of the costs; None: the mesh has no prices.
    """

    kind: Literal["usage_viewed"] = "usage_viewed"
    rows: tuple[UsageSum, ...] = ()
    complete: bool = True
    currency: str | None = None
