"""The sequences of one model, and the steps that compute them.

Steps run on the computing thread of the device (`generation/device_loop`). Requests and
cancellations are commands (`command_queue`), which take effect between steps. The results of a step
are delivered in one call. `services.engine.domain.step_planning` decides which sequences a step
computes.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Many
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

import torch

from services.engine.domain import background_prefill
from services.engine.domain.fair_slots import Flow
from services.engine.domain.step_costs import StepCosts
from services.engine.domain.step_planning import Limits, SequenceView, StepPlan, blocks_for, plan_step
from services.engine.generation.command_queue import CommandQueue, stopped_error
from services.engine.generation.commands import (
    Cancel,
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
from services.engine.generation.embedding import Embedder
from services.engine.generation.embedding_jobs import EmbeddingJobs
from services.engine.generation.events import Admitted, Broken, Embedded, Event, Progressed, Yielded
from services.engine.generation.flow_work import FlowWork, list_flows
from services.engine.generation.kv_budget import KvBudget
from services.engine.generation.kv_pages import KvPages
from services.engine.generation.kv_transfers import KvTransfers
from services.engine.generation.masks import MaskThread, StepMasks
from services.engine.generation.open_requests import OpenRequests
from services.engine.generation.prepared_prefixes import PreparedPrefixes, PrepareOrder
from services.engine.generation.request import Choice, EmbedRequest, GenerationRequest
from services.engine.generation.runner import WARM_UP, Row, Runner, RunnerLost, check_device
from services.engine.generation.sequences import Sequence, choose
from services.engine.generation.slot_shares import SlotShares
from services.engine.generation.step_meters import StepMeters
from services.engine.tokenization import Tokenization
from shared.contracts.inference import ChoiceDelta
from shared.engines.background_seconds import OWN
from shared.errors import EngineFailed, ThawError

log = logging.getLogger(__name__)
R = TypeVar("R")
_PAGES_WITHIN_S = 0.05
"""A step waits this long for the loader's reply before it preempts a sequence for lack of pages."""


class Batcher(CommandQueue):
    """Runs steps over all sequences.

    `has_commands`, `next_step_at`, `flow_work` and `step` run on the computing thread; all other
    public methods may be called from any thread.

    Attributes:
        on_command: Called after each command.
        meters: Seconds of all steps.
    """

    def __init__(
        self,
        runner: Runner | None,
        embedder: Embedder,
        tokenization: Tokenization,
        limits: Limits,
        deliver: Callable[[Many[Event]], None],
        ttft_s: float | None = None,
    ) -> None:
        """Create a batcher.

        Args:
            runner: Computes generations; None: the model only embeds.
            embedder: Computes embeddings.
            tokenization: The model's tokenizer.
            limits: Slots, tokens and blocks.
            deliver: Called on the computing thread with the events of a step.
            ttft_s: Seconds from the request to its first token that the model's objective allows;
                None: no objective.
        """
        super().__init__()
        self.required_requests: float | None = None
        """RRC of the model (`shared.compliance`); None: unknown. Any thread may set it."""
        self._runner = runner
        self._tokens = tokenization
        self._kv = KvBudget(limits)
        self._is_stalled = False
        self._pages_due: float | None = None
        self._deliver = deliver
        self._keys = 0
        self._running: dict[int, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._embeddings = EmbeddingJobs(embedder)
        self._open = OpenRequests(ttft_s)
        self._prepared = PreparedPrefixes(runner)
        self._transfers = KvTransfers(
            runner,
            self._prepared,
            lambda: (*self._running.values(), *self._waiting),
            lambda: self._kv.limits.kv_blocks - self._used_blocks(),
        )
        self._masks = MaskThread()
        self._slots = SlotShares()
        self._costs = StepCosts()
        self.meters = StepMeters(self._costs)
        self._pending_events: list[Event] = []
        self._has_computed = False
        self.blocks_used = 0

    def transfer(self, work: Callable[[KvTransfers], R]) -> Future[R]:
        """Read or write keys and values between two steps."""
        done: Future[R] = Future()
        self.send(Transfer.create(lambda: work(self._transfers), done))
        return done

    def borrow(self, pages: KvPages) -> None:
        """Take the memory of the KV cache from `pages`. Call it before `run`."""
        self._kv.borrow(pages)

    @property
    def pages_wanted(self) -> int:
        """Pages that the KV cache wants to have; 0 if it borrows none."""
        return self._kv.pages_wanted

    # Steps

    def next_step_at(self, now: float) -> float:
        """Return when `step` has something to do, in seconds of the monotonic clock.

        Infinity: not until the next command.
        """
        if self.has_commands():
            return now
        idle = not (self._running or self._waiting or self._embeddings or self._prepared.busy or self._pending_events)
        if not idle and not self._is_stalled:
            if not self._kv.awaits_pages(s.computed for s in self._running.values()):
                return now
            if self._pages_due is None:
                self._pages_due = now + _PAGES_WITHIN_S
            return self._pages_due
        due = (self._prepared.next_expiry(), self._kv.next_adjustment(now))
        return min((at for at in due if at is not None), default=math.inf)

    def flow_work(self, now: float) -> Mapping[Flow, FlowWork]:
        """Return what each key wants to have computed."""
        return list_flows((*self._running.values(), *self._waiting), self._embeddings.requests(), self._open.due, now)

    def step(self, *, is_contended: bool = False, computes: bool = True) -> bool:
        """Apply the queued commands, compute once, and deliver the results.

        Args:
            is_contended: Other models wait for the device: a prompt is computed in chunks.
            computes: False: only apply the commands.

        Returns:
            False after `stop`.
        """
        try:
            is_running = self._run(is_contended=is_contended, computes=computes)
        except BaseException:
            self._end()
            raise
        if not is_running:
            self._end()
        return is_running

    def _run(self, *, is_contended: bool, computes: bool) -> bool:
        """Run a step. False: the batcher is stopped."""
        self._pages_due = None
        self.meters.begin(time.monotonic())
        if not self._take_commands():
            return False
        self._prepared.expire(time.monotonic())
        events, self._pending_events = self._pending_events, []
        if computes:
            events += self._step(self._step_limits(is_contended=is_contended))
            events += self._embeddings.step(self._costs)
        self.blocks_used = self._used_blocks()
        self._adjust_budget()
        if events:
            for event in events:
                if not isinstance(event, Admitted):
                    self._open.on_output(event.request_id)
                if isinstance(event, Embedded | Broken):
                    self._costs.close(event.request_id)
            self.meters.record_results(time.monotonic())
            self._deliver(events)
        has_more = bool(self._running or self._waiting or self._embeddings or self._prepared.busy)
        self.meters.end(time.monotonic(), has_results=bool(events), has_more=has_more)
        return True

    def _end(self) -> None:
        """Answer whatever waits for the batcher, and take no more commands."""
        self._masks.close()
        with contextlib.suppress(RuntimeError):  # the event loop that waits for them is closed
            self._prepared.close(stopped_error())
        self.close()

    def _step_limits(self, *, is_contended: bool) -> Limits:
        limits = self._kv.limits
        return replace(limits, step_tokens=limits.chunk_tokens) if is_contended else limits

    # Commands

    def _take_commands(self) -> bool:
        """Apply the queued commands. False: stop."""
        while (command := self.next_command()) is not None:
            self._is_stalled = False
            match command:
                case Stop():
                    return False
                case Cancel(request_id):
                    self._forget(request_id)
                case Yield(request_id, retain_s):
                    if request_id in self._open:
                        if retain_s:
                            self._transfers.retain(request_id, retain_s)
                        self._forget(request_id)
                        self._pending_events.append(Yielded(request_id))
                case PrepareOrder():
                    views = (s.view for s in self._running.values()), (s.view for s in self._waiting)
                    self._prepared.order(command, background_prefill.free_blocks(*views, self._kv.limits))
                case Transfer(run):
                    run()
                case DiscardPrepared(name):
                    self._prepared.forget(name)
                case UnloadLora(adapter, forgotten):
                    if self._runner is not None:
                        self._runner.forget(adapter)
                    del adapter
                    forgotten()
                case SetKvBlocks(kv_blocks):
                    self._kv.grant(kv_blocks)
                case PagesLent(more, is_answer, turn):
                    self._kv.on_lent(more, is_answer=is_answer, turn=turn)
                case ShrinkKv(keep) if self._kv.borrows:
                    self._shrink(keep)
                case WarmUp(done):
                    if self._runner is not None and not self._has_computed:
                        self._runner.forward([Row(self._runner.new_state(), 0, WARM_UP)])
                    if self._runner is None:
                        self._embeddings.warm_up(WARM_UP)
                    done()
                case EmbedRequest():
                    self._open.expect(command.request_id, time.monotonic())
                    self._embeddings.add(command)
                case GenerationRequest():
                    self._open.expect(command.request_id, time.monotonic())
                    self._enqueue(command)
        return True

    # Memory

    def _used_blocks(self) -> int:
        return sum(blocks_for(s.computed) for s in self._running.values()) + self._prepared_blocks()

    def _oldest(self) -> SequenceView | None:
        first = next(iter(self._running.values()), None) or (self._waiting[0] if self._waiting else None)
        return first.view if first is not None else None

    def _adjust_budget(self) -> None:
        if self._kv.borrows:
            self._kv.adjust(
                (s.view for s in self._running.values()),
                (s.view for s in self._waiting),
                self._oldest(),
                used_blocks=self.blocks_used,
                promised_blocks=self._prepared.promised_blocks,
                is_stalled=self._is_stalled,
                now=time.monotonic(),
            )

    def _shrink(self, keep: int) -> None:
        """Return all but `keep` pages, preempting the newest sequences that do not fit."""
        pages = self._kv.shrink(keep)
        if (missing := self._used_blocks() - self._kv.limits.kv_blocks) > 0 and self._prepared.preempt(missing):
            for sequence in self._waiting:
                sequence.preempt()
        while self._running and self._used_blocks() > self._kv.limits.kv_blocks:
            self._preempt(next(reversed(self._running)))
        self._kv.release(pages)

    def _preempt(self, key: int) -> None:
        sequence = self._running.pop(key)
        sequence.preempt()
        sequence.preemptions += 1
        self._waiting.appendleft(sequence)
        log.info("preempted a sequence: the KV cache is full", extra={"request_id": sequence.request.request_id})

    def _enqueue(self, request: GenerationRequest) -> None:
        finished = [c for c in request.choices if c.resume_state is not None and c.resume_state.unsent.finish_reason is not None]
        first, self._keys = self._keys + 1, self._keys + len(request.choices)
        unfinished = enumerate((c for c in request.choices if c not in finished), first)
        sequences = [Sequence.from_request(key, request, choice, self._tokens) for key, choice in unfinished]
        if request.prepared:
            tokens = [tuple(s.tokens) for s in sequences]
            parts = self._prepared.claim(request.prepared, request.variant, tokens, request.share.flow)
            for sequence, part in zip(sequences, parts, strict=True):
                sequence.state, sequence.computed, sequence.recomputes = part.state, part.computed, part.caused_by
        self._slots.begin_waiting(sequences, self._running, self._waiting, self._kv.limits.max_sequences)
        self._waiting.extend(sequences)
        self._open.begin(request.request_id, len(sequences))
        if finished or not sequences:
            self._complete(request.request_id, finished, done=not sequences)

    def _complete(self, request_id: str, choices: list[Choice], *, done: bool) -> None:
        """Finish choices that the resumed tokens already complete."""
        now = time.monotonic()
        unsent = [(c.index, c.resume_state.unsent) for c in choices if c.resume_state is not None]
        deltas = tuple(ChoiceDelta(index=i, text=o.text, finish_reason=o.finish_reason) for i, o in unsent)
        self._pending_events += [Admitted(request_id, now), Progressed(request_id, deltas, 0, now, done)]
        self._open.admit(request_id)
        if done:
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        self._running = {k: s for k, s in self._running.items() if s.request.request_id != request_id}
        self._waiting = deque(s for s in self._waiting if s.request.request_id != request_id)
        self._embeddings.forget(request_id)
        self._open.forget(request_id)
        self._costs.close(request_id)

    # A step

    def _step(self, limits: Limits) -> list[Event]:
        if self._runner is None or not (self._running or self._waiting or self._prepared.busy):
            return []
        for key in self._slots.arrange(self._running, self._waiting, limits, self._kv.turn):
            log.debug("paused a sequence for another key", extra={"request_id": self._running.pop(key).request.request_id})
        waiting = (s.view for s in self._waiting)
        plan = plan_step([s.view for s in self._running.values()], waiting, limits, self._kv.find_protected(self._oldest()))
        events: list[Event] = list(self._move(plan, self._runner))
        self._make_room(plan)
        computed = [self._running[work.key] for work in plan.work]
        rows = [
            Row(s.state, s.computed, s.tokens[s.computed : s.computed + w.count], s.request.adapter)
            for s, w in zip(computed, plan.work, strict=True)
        ]
        extra = self._prepared.work(background_prefill.prefill_tokens(plan, limits), self._unused_blocks(plan))
        if extra is not None:
            rows.append(extra[1])
        self._is_stalled = not rows
        if not rows:
            return events
        whole = (s for s, w in zip(computed, plan.work, strict=True) if s.computed + w.count == len(s.tokens))
        masks = self._masks.begin(whole)
        try:
            logits = self._runner.forward(rows)
            self._has_computed = True
            tokens, background = Counter[str](), Counter[str]()
            for sequence, work in zip(computed, plan.work, strict=True):
                again, cause = sequence.count_recomputed(work.count)
                background[cause] += again
                tokens[sequence.request.request_id] += work.count - again
                sequence.computed += work.count
                self._slots.record_computed(sequence)
            if extra is not None:
                background[extra[0].caused_by or OWN] += len(extra[1].tokens)
            events += self._advance(
                computed, logits[: len(computed)], masks, lambda: self._costs.split(time.monotonic(), tokens, background)
            )
            if extra is not None:
                self._prepared.record_computed(*extra)
        except RunnerLost:
            raise
        except Exception as e:  # a process boundary: the requests of this step fail, the engine continues
            log.exception("a step failed")
            check_device(e, self._embeddings.device)
            failed = EngineFailed(f"The engine failed while computing: {type(e).__name__}: {str(e)[:300]}")
            error: ThawError = e if isinstance(e, ThawError) else failed  # the load of the weights may have failed
            if extra is not None:
                self._prepared.discard_failed(extra[0], error)
            events += self._break(computed, error)
        return events

    def _prepared_blocks(self) -> int:
        """KV blocks of prepared prefixes and waiting requests."""
        return self._prepared.blocks + sum(blocks_for(s.computed) for s in self._waiting)

    def _unused_blocks(self, plan: StepPlan) -> int:
        """Blocks that are left after the step; negative: prepared blocks must be evicted."""
        counts = {w.key: w.count for w in plan.work}
        after = [replace(s.view, computed=s.computed + counts.get(k, 0)) for k, s in self._running.items()]
        return background_prefill.unused_blocks(after, self._prepared_blocks(), self._kv.limits)

    def _make_room(self, plan: StepPlan) -> None:
        """Evict prepared blocks that running sequences need."""
        missing = self._prepared.preempt(max(0, -self._unused_blocks(plan)))
        needing = self._find_needing_memory(plan) if missing else {}
        for sequence in self._waiting if missing else ():
            self._costs.charge_preemption(sequence.request.request_id, sequence.computed, needing)
            sequence.preempt()

    def _find_needing_memory(self, plan: StepPlan) -> Mapping[str, int]:
        """Return the blocks by which running requests grow in a step that preempts others."""
        needing = Counter[str]()
        for work in plan.work:
            if (sequence := self._running.get(work.key)) is not None:
                grown = blocks_for(sequence.computed + work.count) - blocks_for(sequence.computed)
                needing[sequence.request.request_id] += grown
        return needing

    def _move(self, plan: StepPlan, runner: Runner) -> Iterable[Event]:
        needing = self._find_needing_memory(plan) if plan.preempted else {}
        for key in reversed(plan.preempted):
            victim = self._running[key]
            self._costs.charge_preemption(victim.request.request_id, victim.computed, needing)
            self._preempt(key)
        for _ in plan.admitted:
            sequence = self._waiting.popleft()
            if sequence.state is None:
                sequence.state = runner.new_state()
            self._running[sequence.key] = sequence
            request_id = sequence.request.request_id
            if self._open.admit(request_id):
                yield Admitted(request_id, time.monotonic())

    def _advance(
        self, computed: list[Sequence], logits: torch.Tensor, step_masks: StepMasks, charge: Callable[[], None]
    ) -> list[Event]:
        """Sample the next token of every sequence whose tokens are all computed.

        Args:
            charge: Called after the sampling: charges the step to its requests.
        """
        events: list[Event] = []
        masks, errors = step_masks.collect()
        broken = {s.request.request_id: errors[s.key] for s in reversed(computed) if s.key in errors}
        whole = [i for i, s in enumerate(computed) if s.whole and s.request.request_id not in broken]
        deltas_by_request: dict[str, list[ChoiceDelta]] = {}
        for i, sampled in zip(whole, choose([computed[i] for i in whole], logits[whole], masks), strict=True):
            delta = computed[i].append_token(sampled, self._tokens)
            deltas_by_request.setdefault(computed[i].request.request_id, []).append(delta)
            if delta.finish_reason is not None:
                self._running.pop(computed[i].key)
        charge()
        for request_id, error in broken.items():
            self._forget(request_id)
            events.append(Broken(request_id, error))
        now = time.monotonic()
        for request_id, deltas in deltas_by_request.items():
            done = self._open.finish(request_id, sum(d.finish_reason is not None for d in deltas))
            device_s = self._costs.report(request_id)
            events.append(Progressed(request_id, tuple(deltas), len(deltas), now, done, device_s))
            if done:
                self._forget(request_id)
        return events

    def _break(self, sequences: list[Sequence], error: ThawError) -> list[Event]:
        broken = dict.fromkeys(s.request.request_id for s in sequences)
        for request_id in broken:
            self._forget(request_id)
        return [Broken(request_id, error) for request_id in broken]
