"""The computing thread: it owns every sequence, and takes one step after another over whichever of them can run.

Requests and cancellations come in by a queue and take effect between steps; what a step brought goes out by `deliver`, in one call. Which
sequences a step computes is decided by `services.engine.domain.step_planning`.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import replace

import torch

from services.engine.domain import background_prefill
from services.engine.domain.step_planning import Limits, StepPlan, blocks_for, plan_step
from services.engine.generation.commands import Cancel, Command, Forget, ForgetAhead, Grant, Stop, Yield
from services.engine.generation.embedding import Embedder
from services.engine.generation.embedding_jobs import EmbeddingJobs
from services.engine.generation.events import Admitted, Broken, Event, Progressed, Yielded
from services.engine.generation.lora_layers import Adapter
from services.engine.generation.prepared_prefixes import Ahead, Prepare
from services.engine.generation.request import Choice, EmbedRequest, GenerationRequest
from services.engine.generation.runner import Row, Runner
from services.engine.generation.sequences import Sequence, choose
from services.engine.tokenization import Tokenization
from shared.contracts.inference import ChoiceDelta
from shared.errors import EngineFailed, ThawError

log = logging.getLogger(__name__)


class Batcher:
    """`run` is the thread's body; `submit`, `cancel` and `stop` may be called from any thread."""

    def __init__(
        self,
        runner: Runner | None,
        embedder: Embedder,
        tokenization: Tokenization,
        limits: Limits,
        deliver: Callable[[Many[Event]], None],
    ) -> None:
        self._runner = runner
        self._tokens = tokenization
        self._limits = limits
        self._deliver = deliver
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._keys = 0
        self._running: dict[int, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._embeddings = EmbeddingJobs(embedder)
        self._unfinished: Counter[str] = Counter()
        self._admitted: set[str] = set()
        self._ahead = Ahead(runner)
        self._said: list[Event] = []
        self.blocks_used = 0

    def submit(self, request: GenerationRequest | EmbedRequest) -> None:
        self._inbox.put(request)

    def cancel(self, request_id: str) -> None:
        """Forget `request_id` before the next step; nothing more is delivered for it after that."""
        self._inbox.put(Cancel(request_id))

    def yield_(self, request_id: str) -> None:
        """Stop the request before the next step; `Yielded` is delivered after all that it has gained. Nothing is, if it is not there."""
        self._inbox.put(Yield(request_id))

    def prepare(self, order: Prepare) -> None:
        """Compute keys and values ahead, behind what runs."""
        self._inbox.put(order)

    def forget_ahead(self, name: str) -> None:
        self._inbox.put(ForgetAhead(name))

    def forget(self, adapter: Adapter, forgotten: Callable[[], None]) -> None:
        """No request will name `adapter` again; `forgotten` is called, on the computing thread, when it keeps nothing of it."""
        self._inbox.put(Forget(adapter, forgotten))

    def grant(self, kv_blocks: int) -> None:
        """Keys and values may take that many blocks from the next step on; sequences give way if they have more."""
        self._inbox.put(Grant(kv_blocks))

    def stop(self) -> None:
        self._inbox.put(Stop())

    def run(self) -> None:
        """Serve until `stop`."""
        while self._take_commands():
            self._ahead.expire(time.monotonic())
            events, self._said = self._said, []
            events += self._step()
            events += self._embeddings.step()
            self.blocks_used = sum(blocks_for(s.computed) for s in self._running.values()) + self._blocks_ahead()
            if events:
                self._deliver(events)

    # Commands

    def _take_commands(self) -> bool:
        """Apply what came in, waiting for something to do. False: stop."""
        idle = not (self._running or self._waiting or self._embeddings or self._ahead.busy or self._said)
        expiry = self._ahead.next_expiry()
        patience = None if expiry is None else max(0.0, expiry - time.monotonic())
        try:
            command = self._inbox.get(block=idle, timeout=patience)
            while True:
                match command:
                    case Stop():
                        return False
                    case Cancel(request_id):
                        self._forget(request_id)
                    case Yield(request_id):
                        if request_id in self._unfinished:
                            self._forget(request_id)
                            self._said.append(Yielded(request_id))
                    case Prepare():
                        views = (s.view for s in self._running.values()), (s.view for s in self._waiting)
                        self._ahead.order(command, background_prefill.room(*views, self._limits))
                    case ForgetAhead(name):
                        self._ahead.forget(name)
                    case Forget(adapter, forgotten):
                        if self._runner is not None:
                            self._runner.forget(adapter)
                        del adapter
                        forgotten()
                    case Grant(kv_blocks):
                        self._limits = replace(self._limits, kv_blocks=kv_blocks)
                    case EmbedRequest():
                        self._embeddings.add(command)
                    case GenerationRequest():
                        self._enqueue(command)
                command = self._inbox.get_nowait()
        except queue.Empty:
            return True

    def _enqueue(self, request: GenerationRequest) -> None:
        whole = [c for c in request.choices if c.begun is not None and c.begun.owed.finish_reason is not None]
        first, self._keys = self._keys + 1, self._keys + len(request.choices)
        begun = enumerate((c for c in request.choices if c not in whole), first)
        sequences = [Sequence.begin(key, request, choice, self._tokens) for key, choice in begun]
        if request.prepared:
            parts = self._ahead.claim(request.prepared, request.variant, [tuple(s.tokens) for s in sequences])
            for sequence, part in zip(sequences, parts, strict=True):
                sequence.state, sequence.computed = part.state, part.computed
        self._waiting.extend(sequences)
        self._unfinished[request.request_id] = len(sequences)
        if whole or not sequences:
            self._complete(request.request_id, whole, done=not sequences)

    def _complete(self, request_id: str, choices: list[Choice], *, done: bool) -> None:
        """Choices that the tokens made elsewhere complete."""
        now = time.monotonic()
        owed = [(c.index, c.begun.owed) for c in choices if c.begun is not None]
        deltas = tuple(ChoiceDelta(index=i, text=o.text, finish_reason=o.finish_reason) for i, o in owed)
        self._said += [Admitted(request_id, now), Progressed(request_id, deltas, 0, now, done)]
        self._admitted.add(request_id)
        if done:
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        self._running = {k: s for k, s in self._running.items() if s.request.request_id != request_id}
        self._waiting = deque(s for s in self._waiting if s.request.request_id != request_id)
        self._embeddings.forget(request_id)
        self._unfinished.pop(request_id, None)
        self._admitted.discard(request_id)

    # A step

    def _step(self) -> list[Event]:
        if self._runner is None or not (self._running or self._waiting or self._ahead.busy):
            return []
        plan = plan_step([s.view for s in self._running.values()], (s.view for s in self._waiting), self._limits)
        events: list[Event] = list(self._move(plan, self._runner))
        self._make_room(plan)
        worked = [self._running[work.key] for work in plan.work]
        rows = [
            Row(s.state, s.computed, s.tokens[s.computed : s.computed + w.count], s.request.adapter)
            for s, w in zip(worked, plan.work, strict=True)
        ]
        extra = self._ahead.work(background_prefill.share(plan, self._limits))
        if extra is not None:
            rows.append(extra[1])
        if not rows:
            return events
        try:
            logits = self._runner.forward(rows)
            for sequence, work in zip(worked, plan.work, strict=True):
                sequence.computed += work.count
            events += self._advance(worked, logits[: len(worked)])
            if extra is not None:
                self._ahead.computed(*extra)
        except Exception as e:  # a process boundary: the requests of this step fail, the engine goes on
            log.exception("a step failed")
            error = EngineFailed(f"the engine failed while computing: {type(e).__name__}: {str(e)[:300]}")
            if extra is not None:
                self._ahead.failed(extra[0], error)
            events += self._break(worked, error)
        return events

    def _blocks_ahead(self) -> int:
        """Of keys and values that no running sequence has: those kept for requests to come, and those of requests that have come and wait."""
        return self._ahead.blocks + sum(blocks_for(s.computed) for s in self._waiting)

    def _make_room(self, plan: StepPlan) -> None:
        """What runs takes what it needs from what was computed ahead."""
        counts = {w.key: w.count for w in plan.work}
        after = [replace(s.view, computed=s.computed + counts.get(k, 0)) for k, s in self._running.items()]
        missing = self._ahead.give_way(background_prefill.excess(after, self._blocks_ahead(), self._limits))
        for sequence in self._waiting if missing else ():
            sequence.give_way()

    def _move(self, plan: StepPlan, runner: Runner) -> Iterable[Event]:
        for key in reversed(plan.preempted):
            sequence = self._running.pop(key)
            sequence.give_way()
            self._waiting.appendleft(sequence)
            log.info("a sequence gave way: the KV cache is full", extra={"request_id": sequence.request.request_id})
        for _ in plan.admitted:
            sequence = self._waiting.popleft()
            if sequence.state is None:
                sequence.state = runner.new_state()
            self._running[sequence.key] = sequence
            request_id = sequence.request.request_id
            if request_id not in self._admitted:
                self._admitted.add(request_id)
                yield Admitted(request_id, time.monotonic())

    def _advance(self, worked: list[Sequence], logits: torch.Tensor) -> list[Event]:
        """Choose the next token of every sequence that has all its tokens computed."""
        whole = [i for i, s in enumerate(worked) if s.whole]
        gained: dict[str, list[ChoiceDelta]] = {}
        for i, sampled in zip(whole, choose([worked[i] for i in whole], logits[whole]), strict=True):
            delta = worked[i].gain(sampled, self._tokens)
            gained.setdefault(worked[i].request.request_id, []).append(delta)
            if delta.finish_reason is not None:
                self._running.pop(worked[i].key)
        now = time.monotonic()
        events: list[Event] = []
        for request_id, deltas in gained.items():
            self._unfinished[request_id] -= sum(d.finish_reason is not None for d in deltas)
            done = self._unfinished[request_id] == 0
            events.append(Progressed(request_id, tuple(deltas), len(deltas), now, done))
            if done:
                self._forget(request_id)
        return events

    def _break(self, sequences: list[Sequence], error: ThawError) -> list[Event]:
        broken = dict.fromkeys(s.request.request_id for s in sequences)
        for request_id in broken:
            self._forget(request_id)
        return [Broken(request_id, error) for request_id in broken]
