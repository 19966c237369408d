"""How many bytes of requests a gateway holds, in all and for each key and model.

A request's bytes count from the first that is read of its body until its answer is out: they stay in memory that long, since another engine
may have to be given them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from types import TracebackType

from shared.errors import PayloadTooLarge, QueueFull, ThawError

_RETRY_MS = 1_000


@dataclass(frozen=True)
class ByteLimits:
    """Bytes of open requests that a gateway holds: of all, of one key's (or address's, without keys), of one model's."""

    gateway: int
    key: int
    model: int


class Admission:
    """Counts what is held. Only the event loop calls it."""

    def __init__(self, limits: ByteLimits) -> None:
        self._limits = limits
        self.total = 0
        self.by_key: Counter[str] = Counter()
        self.by_model: Counter[str] = Counter()

    def begin(self, key: str) -> Reservation:
        """An account of a request that is about to be read for the client that `key` names."""
        return Reservation(self, key)

    def refusal(self, key: str, model: str | None, more: int, held: int) -> ThawError | None:
        """Why a request that holds `held` bytes may not hold `more` besides; None: it may."""
        limits = self._limits
        sums = [("this gateway", self.total, limits.gateway), ("this API key", self.by_key[key], limits.key)]
        if model is not None:
            sums.append((model, self.by_model[model], limits.model))
        for holder, sum_, limit in sums:
            if held + more > limit:
                return PayloadTooLarge(f"The body is over the {limit} bytes that requests of {holder} may have together")
            if sum_ + more > limit:
                return QueueFull(
                    f"Open requests of {holder} hold {sum_} bytes, and {limit} is the limit. Repeat the request when some are answered",
                    retry_after_ms=_RETRY_MS,
                )
        return None

    def add(self, key: str, model: str | None, count: int) -> None:
        """Hold `count` more bytes (fewer, if negative)."""
        self.total += count
        for sums, name in ((self.by_key, key), (self.by_model, model)):
            if name is not None:
                sums[name] += count
                if not sums[name]:
                    del sums[name]


class Reservation:
    """One request's bytes; given back when the `with` block ends."""

    def __init__(self, admission: Admission, key: str) -> None:
        self._admission = admission
        self._key = key
        self._model: str | None = None
        self._held = 0

    def grow(self, count: int) -> None:
        """Hold `count` more bytes.

        Raises:
            QueueFull: Others hold too many.
            PayloadTooLarge: It alone would hold too many.
        """
        error = self._admission.refusal(self._key, self._model, count, self._held)
        if error is not None:
            raise error
        self._admission.add(self._key, self._model, count)
        self._held += count

    def name_model(self, model: str) -> None:
        """The model is known now: its requests hold these bytes as well. Raises as `grow`."""
        admission, held = self._admission, self._held
        admission.add(self._key, self._model, -held)
        error = admission.refusal(self._key, model, held, 0)
        self._model = self._model if error is not None else model
        admission.add(self._key, self._model, held)
        if error is not None:
            raise error

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._admission.add(self._key, self._model, -self._held)
        self._held = 0
