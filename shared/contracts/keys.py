"""Define the API keys that the mesh stores, and the log of their changes.

The bucket `subjects.KEYS_BUCKET` has a record under each key's SHA-256 in hexadecimal. The key
itself is stored nowhere. A key that is being rotated has two records of the same name.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from shared.contracts.base import Frozen, Message

KEY_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,99}$"
HASH_PATTERN = r"^[0-9a-f]{64}$"
MAX_MODEL_PATTERNS = 256
MAX_PRIORITY = 100
MAX_OVERLAP_S = 30 * 24 * 3600
MAX_DEVICE_SECONDS = 1e12
DeviceSeconds = Annotated[float, Field(gt=0, le=MAX_DEVICE_SECONDS, allow_inf_nan=False)]
Money = Annotated[Decimal, Field(gt=0, max_digits=21, decimal_places=6)]
Scope = Literal["inference", "read-only", "admin"]


class KeyLimits(Frozen):
    """The limits of a key, over all gateways together. None: no limit.

    Attributes:
        models: Names of models, or patterns as of a shell (`qwen*`); empty: all models. Other
            models do not exist for the key.
        expires: Unix seconds after which the key is refused.
        requests_per_minute: Rate of requests, with bursts up to as many.
        tokens_per_minute: Rate of prompt and completion tokens, with bursts up to as many.
        concurrent_requests: Requests that are active at the same time, waiting ones included.
        tokens_per_day: Budget of prompt and completion tokens of a day in UTC.
        tokens_per_month: The same of a calendar month in UTC.
        device_seconds_per_day: Budget of the seconds of a day in UTC for which devices computed for
            the key's requests or started instances for them, times the devices of the instance.
        device_seconds_per_month: The same of a calendar month in UTC.
        money_per_day: Budget in the currency of the mesh's prices; without prices nothing costs.
        money_per_month: The same of a calendar month.
        priority: The highest priority of its requests (-100 to 100; higher is served first), and
            that of requests that ask for none if it is below 0. None: 0.
        weight: Its share of a model relative to other keys of the same priority. None: 1.
    """

    models: tuple[str, ...] = Field(default=(), max_length=MAX_MODEL_PATTERNS)
    expires: int | None = Field(default=None, ge=0)
    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    concurrent_requests: int | None = Field(default=None, ge=1)
    tokens_per_day: int | None = Field(default=None, ge=1)
    tokens_per_month: int | None = Field(default=None, ge=1)
    device_seconds_per_day: DeviceSeconds | None = None
    device_seconds_per_month: DeviceSeconds | None = None
    money_per_day: Money | None = None
    money_per_month: Money | None = None
    priority: int | None = Field(default=None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    weight: float | None = Field(default=None, ge=0.001, le=1000)

    @property
    def has_budget(self) -> bool:
        """True if any budget of a day or month is set."""
        return not (
            self.tokens_per_day is None
            and self.tokens_per_month is None
            and self.money_per_day is None
            and self.money_per_month is None
            and self.device_seconds_per_day is None
            and self.device_seconds_per_month is None
        )

    @property
    def has_device_seconds_budget(self) -> bool:
        """True if a budget of device-seconds is set."""
        return not (self.device_seconds_per_day is None and self.device_seconds_per_month is None)


class ApiKey(KeyLimits):
    name: str = Field(pattern=KEY_NAME_PATTERN)
    scope: Scope = "inference"
    created: int = Field(description="Unix seconds.")


class NewKey(KeyLimits):
    """Request for a new API key at the admin API.

    Attributes:
        sha256: Digest of a key that the caller has generated, so that no other process ever sees
            the key.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=KEY_NAME_PATTERN)
    scope: Scope = "inference"
    sha256: str = Field(pattern=HASH_PATTERN)


class ChangeKey(KeyLimits):
    """Change of a key's limits at the admin API. Fields that are not given keep their value."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RotateKey(Frozen):
    """Replacement of a key by a new one of the same name and limits.

    Attributes:
        sha256: Digest of the new key.
        overlap_s: Seconds for which the old key stays valid.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    sha256: str = Field(pattern=HASH_PATTERN)
    overlap_s: int = Field(default=3600, ge=0, le=MAX_OVERLAP_S)


class KeySpending(Frozen):
    """The usage of a key with a budget in the present day and month (UTC)."""

    day_tokens: int = 0
    month_tokens: int = 0
    day_device_s: float = 0.0
    month_device_s: float = 0.0
    day_money: Decimal = Decimal(0)
    month_money: Decimal = Decimal(0)


class KeyList(Frozen):
    """The list of API keys.

    Attributes:
        spending: By the name of the key; of keys with budgets only.
        configured: Inference keys of the gateway's settings instead.
        required: Inference needs a key, even if there are none.
    """

    keys: tuple[ApiKey, ...] = ()
    spending: dict[str, KeySpending] = Field(default_factory=dict)
    configured: int = 0
    required: bool = False


class KeyChanged(Message):
    """An entry of the audit log: who changed which API key, when and how.

    It is written before the change. `failed` follows if the change was then not made.
    """

    kind: Literal["key_changed"] = "key_changed"
    at: float = Field(description="Unix seconds.")
    actor: str = Field(description="Name of the admin key, or the source of the permission.")
    address: str = Field(default="", description="Address of the client.")
    action: Literal["add", "change", "rotate", "revoke", "failed"]
    key: str = Field(description="Name of the key.")
    details: dict[str, Any] = Field(default_factory=dict)


class KeyLog(Frozen):
    """The latest entries of the audit log, the latest first."""

    entries: tuple[KeyChanged, ...] = ()
