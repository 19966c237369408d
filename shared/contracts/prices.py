"""Prices of what requests use, and the cost of sums of usage.

Amounts are exact decimals: the cost of a sum of tokens is the sum of their costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from shared.contracts.base import Frozen

DeviceKind = Literal["cpu", "cuda"]
MemoryKind = Literal["cpu", "cuda", "host", "cache"]
"""Memory of devices by their kind; of a node, host: for suspended engines, cache: for weights."""
GIB_HOUR = float(2**30 * 3600)
"""Byte-seconds of a GiB-hour."""
Amount = Annotated[Decimal, Field(ge=0, le=10**9, max_digits=21, decimal_places=12)]
_MILLION = Decimal(1_000_000)
_MILLIONTH = Decimal("0.000001")
"""Measured amounts are rounded to it before they are priced: seconds to microseconds."""


class TokenPrices(Frozen):
    """Prices of a million tokens. None: as the mesh's price, or for cached tokens as prompts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: Amount | None = None
    cached: Amount | None = None
    completion: Amount | None = None


class Cost(Frozen):
    """An amount of money by what it is for.

    `compute`: device-seconds of computing; `cold_starts`: those of cold starts; `memory`: GiB-hours
    held; `cache`: those of cached weights; `clearing`: device-seconds until the memory of starts
    was free.
    """

    prompt: Decimal = Decimal(0)
    cached: Decimal = Decimal(0)
    completion: Decimal = Decimal(0)
    compute: Decimal = Decimal(0)
    cold_starts: Decimal = Decimal(0)
    memory: Decimal = Decimal(0)
    cache: Decimal = Decimal(0)
    clearing: Decimal = Decimal(0)
    total: Decimal = Decimal(0)

    def plus(self, other: Cost) -> Cost:
        return Cost(**{name: getattr(self, name) + getattr(other, name) for name in Cost.model_fields})


class Prices(Frozen):
    """The prices of a mesh (`prices:` in thaw.yaml).

    Attributes:
        currency: Its name, as ISO 4217 has it (`EUR`), or an internal one (`credits`).
        tokens: Prices of a million tokens of every model.
        compute_seconds: Price of a second that one device computed for requests, by its kind.
        device_seconds: Price of a second of one device in a cold start, by its kind.
        clearing_seconds: Price of a second of one device while a start waits for its victims to
            leave, beside `device_seconds`, by its kind.
        gib_hours: Price of a GiB held for an hour, by the kind of the memory: of devices (cpu,
            cuda), host memory and swap that suspended engines take (host), or host memory with
            weights that no instance uses (cache).
        models: Other prices of tokens for models by name or pattern; the first that matches holds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    currency: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9 _-]{0,31}$")
    tokens: TokenPrices = TokenPrices()
    compute_seconds: dict[DeviceKind, Amount] = Field(default_factory=dict)
    device_seconds: dict[DeviceKind, Amount] = Field(default_factory=dict)
    clearing_seconds: dict[DeviceKind, Amount] = Field(default_factory=dict, exclude_if=lambda prices: not prices)
    gib_hours: dict[MemoryKind, Amount] = Field(default_factory=dict)
    models: dict[str, TokenPrices] = Field(default_factory=dict, max_length=1_000)

    def of_model(self, model: str) -> TokenPrices:
        """Return the prices of a model's tokens, without None."""
        own = self.models.get(model)
        if own is None:
            own = next((p for pattern, p in self.models.items() if fnmatchcase(model, pattern)), TokenPrices())
        prompt = _choose(own.prompt, self.tokens.prompt)
        return TokenPrices(
            prompt=prompt,
            cached=_choose(own.cached, self.tokens.cached if own.prompt is None else None, prompt),
            completion=_choose(own.completion, self.tokens.completion),
        )

    def request_cost(self, prices: TokenPrices, tokens: tuple[int, int, int], compute_us: Mapping[str, int]) -> Decimal:
        """Price one request; the total of `cost`, for the path of requests.

        Args:
            prices: Those of its model, of `of_model`.
            tokens: As in `cost`.
            compute_us: As in `cost`.
        """
        prompt_tokens, cached_tokens, completion_tokens = tokens
        assert prices.prompt is not None
        assert prices.cached is not None
        assert prices.completion is not None
        millionths = prices.completion * completion_tokens
        if cached := min(cached_tokens, prompt_tokens):
            millionths += prices.cached * cached
        if computed := prompt_tokens - cached:
            millionths += prices.prompt * computed
        for kind, microseconds in compute_us.items():
            price = self.compute_seconds.get(kind)  # type: ignore[call-overload] # any text may be asked for
            if price is not None:
                millionths += price * microseconds
        return millionths * _MILLIONTH

    def _price_computing(self, compute_us: Mapping[str, int]) -> Decimal:
        if not self.compute_seconds:
            return Decimal(0)
        return _price({kind: us * _MILLIONTH for kind, us in compute_us.items()}, self.compute_seconds)

    def cost(
        self,
        model: str,
        tokens: tuple[int, int, int],
        device_s: Mapping[str, float] | None = None,
        byte_s: Mapping[str, float] | None = None,
        compute_us: Mapping[str, int] | None = None,
        clearing_s: Mapping[str, float] | None = None,
    ) -> Cost:
        """Price an amount of usage.

        Args:
            tokens: Prompt tokens with those from a cache, tokens from a cache, completion tokens.
            device_s: Device-seconds of cold starts by the kind of the device.
            byte_s: Byte-seconds held by the kind of the memory.
            compute_us: Device-microseconds of computing by the kind of the device.
            clearing_s: Device-seconds of clearing by the kind of the device.
        """
        prompt, cached, completion = _price_tokens(self.of_model(model), tokens)
        compute = self._price_computing(compute_us or {})
        cold = _price(device_s or {}, self.device_seconds)
        clearing = _price(clearing_s or {}, self.clearing_seconds)
        gib_h = {kind: amount / GIB_HOUR for kind, amount in (byte_s or {}).items()}
        cache = _price({"cache": gib_h.pop("cache", 0.0)}, self.gib_hours)
        memory = _price(gib_h, self.gib_hours)
        return Cost(
            prompt=prompt,
            cached=cached,
            completion=completion,
            compute=compute,
            cold_starts=cold,
            memory=memory,
            cache=cache,
            clearing=clearing,
            total=prompt + cached + completion + compute + cold + memory + cache + clearing,
        )


def _price_tokens(prices: TokenPrices, tokens: tuple[int, int, int]) -> tuple[Decimal, Decimal, Decimal]:
    """Price prompt, cached and completion tokens, with prices without None."""
    prompt_tokens, cached_tokens, completion_tokens = tokens
    assert prices.prompt is not None
    assert prices.cached is not None
    assert prices.completion is not None
    cached_tokens = min(cached_tokens, prompt_tokens)
    return (
        prices.prompt * (prompt_tokens - cached_tokens) / _MILLION,
        prices.cached * cached_tokens / _MILLION,
        prices.completion * completion_tokens / _MILLION,
    )


def _price(measured: Mapping[str, float | Decimal], prices: Mapping[Any, Decimal]) -> Decimal:
    """Price measured amounts by kind, rounded to millionths; a kind without a price is free."""
    return sum((Decimal(n).quantize(_MILLIONTH) * prices[kind] for kind, n in measured.items() if kind in prices), Decimal(0))


def _choose(*prices: Decimal | None) -> Decimal:
    return next((price for price in prices if price is not None), Decimal(0))
