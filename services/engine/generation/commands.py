"""Commands to the computing thread, from any thread.

They take effect between two steps.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from services.engine.generation.lora_layers import LoraAdapter
from services.engine.generation.prepared_prefixes import PrepareOrder
from services.engine.generation.request import EmbedRequest, GenerationRequest

R = TypeVar("R")


@dataclass(frozen=True)
class Cancel:
    """Drop the request; no event is delivered for it afterwards."""

    request_id: str


@dataclass(frozen=True)
class Yield:
    """Stop the request, which another engine will resume. Unknown ids are ignored.

    Its keys and values are kept for `retain_s` seconds, for that engine to read.
    """

    request_id: str
    retain_s: float = 0.0


@dataclass(frozen=True)
class DiscardPrepared:
    """Discard the sequences prepared under this name."""

    name: str


@dataclass(frozen=True)
class UnloadLora:
    """Drop all references to `adapter`, then call `forgotten` on the computing thread."""

    adapter: LoraAdapter
    forgotten: Callable[[], None]


@dataclass(frozen=True)
class SetKvBlocks:
    """Limit the KV cache to `kv_blocks`. Sequences beyond it are preempted."""

    kv_blocks: int


@dataclass(frozen=True)
class WarmUp:
    """Compute a few tokens if nothing else has been computed, then call `done`."""

    done: Callable[[], None]


@dataclass(frozen=True)
class PagesLent:
    """The KV cache has got `more` pages.

    Attributes:
        is_answer: To the latest demand.
        turn: The number of the turn that the engine has (`domain.elastic_kv`).
    """

    more: int
    is_answer: bool
    turn: int | None = None


@dataclass(frozen=True)
class ShrinkKv:
    """Return all but `keep` pages. Sequences that do not fit are preempted."""

    keep: int


@dataclass(frozen=True)
class Transfer:
    """Read or write keys and values (`generation/kv_transfers`).

    Attributes:
        run: Does it. Never raises.
        fail: Answers that it will not be done. Never raises.
    """

    run: Callable[[], None]
    fail: Callable[[Exception], None]

    @classmethod
    def create(cls, work: Callable[[], R], done: Future[R]) -> Transfer:
        """Make a command that sets `done` to the result or the error of `work`."""

        def run() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(work())
                except Exception as e:  # a thread boundary: the caller gets every error
                    done.set_exception(e)

        def fail(error: Exception) -> None:
            if done.set_running_or_notify_cancel():
                done.set_exception(error)

        return cls(run, fail)


@dataclass(frozen=True)
class Stop:
    """End the thread."""


Command = (
    GenerationRequest
    | EmbedRequest
    | PrepareOrder
    | Cancel
    | Yield
    | UnloadLora
    | DiscardPrepared
    | SetKvBlocks
    | PagesLent
    | ShrinkKv
    | WarmUp
    | Transfer
    | Stop
)
