"""The commands to a batcher, which take effect between two steps."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

from services.engine.generation.commands import (
    Cancel,
    Command,
    DiscardPrepared,
    PagesLent,
    SetKvBlocks,
    ShrinkKv,
    Stop,
    Transfer,
    UnloadLora,
    WarmUp,
    Yield,
)
from services.engine.generation.lora_layers import LoraAdapter
from services.engine.generation.prepared_prefixes import PrepareOrder
from services.engine.generation.request import EmbedRequest, GenerationRequest
from shared.errors import ShuttingDown


class CommandQueue:
    """Commands of any thread, in their order.

    Only the computing thread calls `has_commands` and `next_command`; any thread may call the other
    methods. After the end of the batcher, and behind a `Stop`, commands are answered with
    `ShuttingDown`, if anything waits for them.

    Attributes:
        on_command: Called after each command, on the thread that sent it.
    """

    def __init__(self) -> None:
        self.on_command: Callable[[], None] = lambda: None
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False

    def has_commands(self) -> bool:
        return not self._commands.empty()

    def next_command(self) -> Command | None:
        """Remove and return the oldest command; None if there is none."""
        try:
            return self._commands.get_nowait()
        except queue.Empty:
            return None

    def submit(self, request: GenerationRequest | EmbedRequest) -> None:
        self.send(request)

    def cancel(self, request_id: str) -> None:
        """Drop `request_id` before the next step. No event is delivered for it afterwards."""
        self.send(Cancel(request_id))

    def yield_(self, request_id: str, retain_s: float = 0.0) -> None:
        """Stop the request before the next step, and deliver `Yielded` after its tokens.

        Unknown ids are ignored. Its keys and values can be read for `retain_s` seconds.
        """
        self.send(Yield(request_id, retain_s))

    def prepare(self, order: PrepareOrder) -> None:
        """Prefill sequences in the background, behind running requests."""
        self.send(order)

    def discard_prepared(self, name: str) -> None:
        """Discard the prepared sequences of this name."""
        self.send(DiscardPrepared(name))

    def forget(self, adapter: LoraAdapter, forgotten: Callable[[], None]) -> None:
        """Drop all references to `adapter`, which no request will use again.

        Args:
            adapter: The adapter to drop.
            forgotten: Called on the computing thread afterwards.
        """
        self.send(UnloadLora(adapter, forgotten))

    def grant(self, kv_blocks: int) -> None:
        """Limit the KV cache to `kv_blocks` from the next step on.

        Sequences beyond it are preempted.
        """
        self.send(SetKvBlocks(kv_blocks))

    def warm_up(self, done: Callable[[], None]) -> None:
        """Read every weight once, unless a step has done so; then call `done` on the thread."""
        self.send(WarmUp(done))

    def on_lent(self, more: int, *, is_answer: bool, turn: int | None = None) -> None:
        """Add pages that the KV cache has got."""
        self.send(PagesLent(more, is_answer, turn))

    def shrink(self, keep: int) -> None:
        """Return all but `keep` pages before the next step."""
        self.send(ShrinkKv(keep))

    def stop(self) -> None:
        self.send(Stop())

    def send(self, command: Command) -> None:
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                self._commands.put(command)
        if is_closed:
            _refuse(command)
        else:
            self.on_command()

    def close(self) -> None:
        """Refuse the commands that are queued, and all later ones."""
        with self._lock:
            self._is_closed = True
        while (command := self.next_command()) is not None:
            _refuse(command)


def stopped_error() -> ShuttingDown:
    return ShuttingDown("The engine has stopped, and computes nothing more")


def _refuse(command: Command) -> None:
    """Answer a command that no step applies."""
    with contextlib.suppress(RuntimeError):  # the event loop that waits for it is closed
        _answer(command)


def _answer(command: Command) -> None:
    """Answer with `ShuttingDown` what waits for the command."""
    match command:
        case Transfer(fail=fail):
            fail(stopped_error())
        case PrepareOrder(on_done=on_done):
            on_done(stopped_error())
        case UnloadLora(forgotten=forgotten):
            forgotten()
        case WarmUp(done=done):
            done()
        case _:  # nothing waits for the others: the requests fail with their engine
            pass
