"""Admission control by bytes of active requests, in total and per key and model.

A request counts from the first byte of its body until its response is written. It stays in memory
that long, because the gateway may have to send it to another engine.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from types import TracebackType

from shared.errors import PayloadTooLarge, QueueFull, ThawError

_RETRY_MS = 1_000


@dataclass(frozen=True)
class ByteLimits:
    """Maximum bytes of active requests: in total, per API key, and per model."""

    gateway: int
    key: int
    model: int


class Admission:
    """Count the bytes of active requests. Only the event loop calls it."""

    def __init__(self, limits: ByteLimits) -> None:
        self._limits = limits
        self.total = 0
        self.by_key: Counter[str] = Counter()
        self.by_model: Counter[str] = Counter()

    def begin(self, key: str) -> Reservation:
        """Open a reservation for a request that is about to be read.

        Args:
            key: Identifies the client.
        """
        return Reservation(self, key)

    def refusal(self, key: str, model: str | None, more: int, reserved: int) -> ThawError | None:
        """Return the error for a request that needs `more` bytes; None if it fits.

        Args:
            reserved: Bytes that the request has already.
        """
        limits = self._limits
        totals = [("this gateway", self.total, limits.gateway), ("this API key", self.by_key[key], limits.key)]
        if model is not None:
            totals.append((model, self.by_model[model], limits.model))
        for owner, total, limit in totals:
            if reserved + more > limit:
                return PayloadTooLarge(
                    f"The body exceeds the {limit} bytes allowed for all requests of {owner}. Send a smaller one"
                )
            if total + more > limit:
                error = QueueFull(
                    f"Active requests of {owner} have {total} bytes, and the limit is {limit}. Repeat the request when some have finished",
                    retry_after_ms=_RETRY_MS,
                )
                error.limit = "open_bytes"
                return error
        return None

    def add(self, key: str, model: str | None, count: int) -> None:
        """Count `count` more bytes; fewer if negative."""
        self.total += count
        for totals, name in ((self.by_key, key), (self.by_model, model)):
            if name is not None:
                totals[name] += count
                if not totals[name]:
                    del totals[name]


class Reservation:
    """The bytes of one request; released when the `with` block ends."""

    def __init__(self, admission: Admission, key: str) -> None:
        self._admission = admission
        self._key = key
        self._model: str | None = None
        self._reserved = 0

    def grow(self, count: int) -> None:
        """Reserve `count` more bytes.

        Raises:
            QueueFull: Other requests have reserved too many.
            PayloadTooLarge: This request alone exceeds a limit.
        """
        error = self._admission.refusal(self._key, self._model, count, self._reserved)
        if error is not None:
            raise error
        self._admission.add(self._key, self._model, count)
        self._reserved += count

    def name_model(self, model: str) -> None:
        """Count the reserved bytes for `model` as well. Raises as `grow`."""
        admission, reserved = self._admission, self._reserved
        admission.add(self._key, self._model, -reserved)
        error = admission.refusal(self._key, model, reserved, 0)
        self._model = self._model if error is not None else model
        admission.add(self._key, self._model, reserved)
        if error is not None:
            raise error

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._admission.add(self._key, self._model, -self._reserved)
        self._reserved = 0
