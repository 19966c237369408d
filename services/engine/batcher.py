"""The computing thread: it owns every sequence, and takes one step after another over whichever of them can run.

Requests and cancellations come in by a queue and take effect between steps; what a step brought goes out by `deliver`, in one call. Which
sequences a step computes is decided by `services.engine.domain.planning`.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from services.engine.domain.generation import Generation
from services.engine.domain.planning import Limits, SequenceView, StepPlan, blocks_for, plan_step
from services.engine.domain.randomness import uniform
from services.engine.embedding import Embedder
from services.engine.events import Admitted, Broken, Embedded, Event, Progressed
from services.engine.lora import Adapter
from services.engine.requests import Choice, EmbedRequest, GenerationRequest
from services.engine.runner import Row, Runner
from services.engine.sampling import History, Sampled, sample
from services.engine.tokenization import Tokenization
from shared.contracts.inference import ChoiceDelta, TokenLogprob, TopLogprob
from shared.errors import EngineFailed, ThawError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Cancel:
    request_id: str


@dataclass(frozen=True)
class _Forget:
    adapter: Adapter
    forgotten: Callable[[], None]


@dataclass(frozen=True)
class _Grant:
    kv_blocks: int


@dataclass(frozen=True)
class _Stop:
    pass


Command = GenerationRequest | EmbedRequest | _Cancel | _Forget | _Grant | _Stop


@dataclass
class _Sequence:
    key: int
    request: GenerationRequest
    choice: Choice
    tokens: list[int]
    generation: Generation
    history: History
    computed: int = 0
    state: Any = None

    @property
    def view(self) -> SequenceView:
        return SequenceView(self.key, len(self.tokens), self.computed)


@dataclass
class _Embedding:
    request: EmbedRequest
    vectors: list[bytes] = field(default_factory=list)
    dimensions: int = 0


class Batcher:
    """`run` is the thread's body; `submit`, `cancel` and `stop` may be called from any thread."""

    def __init__(
        self,
        runner: Runner | None,
        embedder: Embedder,
        tokenization: Tokenization,
        limits: Limits,
        deliver: Callable[[Sequence[Event]], None],
    ) -> None:
        self._runner = runner
        self._embedder = embedder
        self._tokens = tokenization
        self._limits = limits
        self._deliver = deliver
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._keys = 0
        self._running: dict[int, _Sequence] = {}
        self._waiting: deque[_Sequence] = deque()
        self._embeddings: deque[_Embedding] = deque()
        self._unfinished: Counter[str] = Counter()
        self._admitted: set[str] = set()
        self.blocks_used = 0

    def submit(self, request: GenerationRequest | EmbedRequest) -> None:
        self._inbox.put(request)

    def cancel(self, request_id: str) -> None:
        """Forget `request_id` before the next step; nothing more is delivered for it after that."""
        self._inbox.put(_Cancel(request_id))

    def forget(self, adapter: Adapter, forgotten: Callable[[], None]) -> None:
        """No request will name `adapter` again; `forgotten` is called, on the computing thread, when it keeps nothing of it."""
        self._inbox.put(_Forget(adapter, forgotten))

    def grant(self, kv_blocks: int) -> None:
        """Keys and values may take that many blocks from the next step on; sequences give way if they have more."""
        self._inbox.put(_Grant(kv_blocks))

    def stop(self) -> None:
        self._inbox.put(_Stop())

    def run(self) -> None:
        """Serve until `stop`."""
        while self._take_commands():
            events = self._step()
            events += self._embed()
            self.blocks_used = sum(blocks_for(s.computed) for s in self._running.values())
            if events:
                self._deliver(events)

    # Commands

    def _take_commands(self) -> bool:
        """Apply what came in, waiting for something to do. False: stop."""
        idle = not (self._running or self._waiting or self._embeddings)
        try:
            command = self._inbox.get(block=idle)
            while True:
                match command:
                    case _Stop():
                        return False
                    case _Cancel(request_id):
                        self._forget(request_id)
                    case _Forget(adapter, forgotten):
                        if self._runner is not None:
                            self._runner.forget(adapter)
                        del adapter
                        forgotten()
                    case _Grant(kv_blocks):
                        self._limits = replace(self._limits, kv_blocks=kv_blocks)
                    case EmbedRequest():
                        self._embeddings.append(_Embedding(command))
                    case GenerationRequest():
                        self._enqueue(command)
                command = self._inbox.get_nowait()
        except queue.Empty:
            return True

    def _enqueue(self, request: GenerationRequest) -> None:
        for choice in request.choices:
            self._keys += 1
            self._waiting.append(
                _Sequence(
                    self._keys,
                    request,
                    choice,
                    list(choice.prompt),
                    Generation(self._tokens.decode, choice.prompt, choice.ending),
                    History(frozenset(choice.prompt) if request.params.penalised else frozenset(), Counter()),
                )
            )
        self._unfinished[request.request_id] = len(request.choices)

    def _forget(self, request_id: str) -> None:
        self._running = {k: s for k, s in self._running.items() if s.request.request_id != request_id}
        self._waiting = deque(s for s in self._waiting if s.request.request_id != request_id)
        self._embeddings = deque(e for e in self._embeddings if e.request.request_id != request_id)
        self._unfinished.pop(request_id, None)
        self._admitted.discard(request_id)

    # A step

    def _step(self) -> list[Event]:
        if self._runner is None or not (self._running or self._waiting):
            return []
        plan = plan_step([s.view for s in self._running.values()], (s.view for s in self._waiting), self._limits)
        events: list[Event] = list(self._move(plan, self._runner))
        worked = [self._running[work.key] for work in plan.work]
        rows = [
            Row(s.state, s.computed, s.tokens[s.computed : s.computed + w.count], s.request.adapter)
            for s, w in zip(worked, plan.work, strict=True)
        ]
        if not rows:
            return events
        try:
            logits = self._runner.forward(rows)
            for sequence, work in zip(worked, plan.work, strict=True):
                sequence.computed += work.count
            events += self._advance(worked, logits)
        except Exception as e:  # a process boundary: the requests of this step fail, the engine goes on
            log.exception("a step failed")
            events += self._break(worked, EngineFailed(f"the engine failed while computing: {type(e).__name__}: {str(e)[:300]}"))
        return events

    def _move(self, plan: StepPlan, runner: Runner) -> Iterable[Event]:
        for key in reversed(plan.preempted):
            sequence = self._running.pop(key)
            sequence.computed, sequence.state = 0, None
            self._waiting.appendleft(sequence)
            log.info("a sequence gave way: the KV cache is full", extra={"request_id": sequence.request.request_id})
        for _ in plan.admitted:
            sequence = self._waiting.popleft()
            sequence.state = runner.new_state()
            self._running[sequence.key] = sequence
            request_id = sequence.request.request_id
            if request_id not in self._admitted:
                self._admitted.add(request_id)
                yield Admitted(request_id, time.monotonic())

    def _advance(self, worked: list[_Sequence], logits: torch.Tensor) -> list[Event]:
        """Choose the next token of every sequence that has all its tokens computed."""
        whole = [i for i, s in enumerate(worked) if s.computed == len(s.tokens)]
        gained: dict[str, list[ChoiceDelta]] = {}
        for i, sampled in zip(whole, self._choose([worked[i] for i in whole], logits[whole]), strict=True):
            gained.setdefault(worked[i].request.request_id, []).append(self._gain(worked[i], sampled))
        now = time.monotonic()
        events: list[Event] = []
        for request_id, deltas in gained.items():
            self._unfinished[request_id] -= sum(d.finish_reason is not None for d in deltas)
            done = self._unfinished[request_id] == 0
            events.append(Progressed(request_id, tuple(deltas), len(deltas), now, done))
            if done:
                self._forget(request_id)
        return events

    def _choose(self, sequences: list[_Sequence], logits: torch.Tensor) -> list[Sampled]:
        params = [s.request.params for s in sequences]
        if all(p.greedy and p.untouched and p.top_logprobs is None for p in params):
            return [Sampled(token) for token in logits.argmax(dim=-1).tolist()]
        return [
            sample(row, p, s.history, 0.0 if p.greedy else uniform(p.seed, s.choice.index, s.generation.count))
            for s, p, row in zip(sequences, params, logits, strict=True)
        ]

    def _gain(self, sequence: _Sequence, sampled: Sampled) -> ChoiceDelta:
        first = sequence.generation.count == 0
        gained = sequence.generation.feed(sampled.token)
        sequence.tokens.append(sampled.token)
        if sequence.request.params.penalised:
            sequence.history.output[sampled.token] += 1
        if gained.finish_reason is not None:
            self._running.pop(sequence.key)
        echo = (sequence.choice.echo or "") if first else ""
        return ChoiceDelta(
            index=sequence.choice.index,
            text=echo + gained.text,
            token_ids=(sampled.token,),
            logprobs=(self._told(sampled),) if sampled.logprob is not None else None,
            finish_reason=gained.finish_reason,
        )

    def _told(self, sampled: Sampled) -> TokenLogprob:
        assert sampled.logprob is not None
        own = self._top(sampled.token, sampled.logprob)
        return TokenLogprob(**own.model_dump(), top=tuple(self._top(token, logprob) for token, logprob in sampled.top))

    def _top(self, token: int, logprob: float) -> TopLogprob:
        raw = self._tokens.token_bytes(token)
        return TopLogprob(token_id=token, token=raw.decode(errors="replace"), logprob=max(logprob, -9999.0), bytes=tuple(raw))

    def _break(self, sequences: list[_Sequence], error: ThawError) -> list[Event]:
        broken = dict.fromkeys(s.request.request_id for s in sequences)
        for request_id in broken:
            self._forget(request_id)
        return [Broken(request_id, error) for request_id in broken]

    # Embeddings

    def _embed(self) -> list[Event]:
        """One forward pass for the oldest embedding request, between steps of generation."""
        if not self._embeddings:
            return []
        job = self._embeddings[0]
        request_id, done = job.request.request_id, len(job.vectors)
        events: list[Event] = [] if done else [Admitted(request_id, time.monotonic())]
        try:
            vectors = self._embedder.embed(job.request.inputs[done : done + self._embedder.batch], job.request.dimensions)
        except ThawError as e:
            self._forget(request_id)
            return [*events, Broken(request_id, e)]
        except Exception as e:  # a process boundary, as in _step
            log.exception("an embedding failed")
            self._forget(request_id)
            return [
                *events,
                Broken(request_id, EngineFailed(f"the engine failed while embedding: {type(e).__name__}: {str(e)[:300]}")),
            ]
        job.vectors += [row.numpy().astype("<f4").tobytes() for row in vectors]
        job.dimensions = vectors.shape[-1]
        if len(job.vectors) == len(job.request.inputs):
            self._forget(request_id)
            events.append(Embedded(request_id, tuple(job.vectors), job.dimensions))
        return events
