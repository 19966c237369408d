"""A running batcher that records its output, and requests that are cut off and resumed."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from services.engine.generation.batcher import Batcher
from services.engine.generation.device_loop import DeviceLoop
from services.engine.generation.events import Broken, Event, Progressed, Yielded
from services.engine.generation.prepared_prefixes import Outcome, PrepareOrder
from services.engine.generation.request import GenerationRequest
from services.engine.generation.runner import Runner
from shared.contracts.inference import ChoiceDelta, InferRequest, Resume, ResumedChoice
from tests.integration.engine.loaded_model import LoadedModel

PROMPT = list(range(20, 50))
TOKENS = 32
Deltas = dict[int, list[ChoiceDelta]]


class RecordedBatcher:
    """A running batcher, and its reported output by request."""

    def __init__(self, loaded: LoadedModel, runner: Runner | None = None) -> None:
        self.deltas: dict[str, Deltas] = {}
        self.over: set[str] = set()
        self.ends: list[Event] = []
        self.grew = threading.Condition()
        self.batcher = Batcher(
            runner or loaded.computable.runner,
            loaded.computable.embedder,
            loaded.files.tokenization,
            loaded.limits,
            self._deliver,
        )
        self.loop = DeviceLoop(1)
        self.ended = self.loop.serve("test", self.batcher)

    def _deliver(self, events: Sequence[Event]) -> None:
        with self.grew:
            for event in events:
                assert not isinstance(event, Broken), event
                if isinstance(event, Progressed):
                    for delta in event.deltas:
                        self.deltas.setdefault(event.request_id, {}).setdefault(delta.index, []).append(delta)
                if isinstance(event, Yielded) or (isinstance(event, Progressed) and event.done):
                    self.over.add(event.request_id)
                    self.ends.append(event)
            self.grew.notify_all()

    def answer(self, *requests: GenerationRequest) -> Deltas:
        """Run the requests until all end; return the first one's output."""
        for request in requests:
            self.batcher.submit(request)
        self.until(lambda: {r.request_id for r in requests} <= self.over)
        return self.deltas.get(requests[0].request_id, {})

    def until(self, true: Any) -> None:
        with self.grew:
            assert self.grew.wait_for(true, 60)

    def prepare(self, name: str, *sequences: Sequence[int], keep_s: float = 60.0, answer_s: float = math.inf) -> Outcome:
        return self.begin_preparing(name, *sequences, keep_s=keep_s, answer_s=answer_s)()

    def begin_preparing(
        self, name: str, *sequences: Sequence[int], keep_s: float = 60.0, answer_s: float = math.inf
    ) -> Callable[[], Outcome]:
        """Send the order, and return what waits for its outcome."""
        done, outcomes = threading.Event(), list[Outcome]()

        def reported(outcome: Outcome) -> None:
            outcomes.append(outcome)
            done.set()

        def wait() -> Outcome:
            assert done.wait(60)
            return outcomes[0]

        self.batcher.prepare(PrepareOrder(name, tuple(map(tuple, sequences)), None, "", keep_s, 60.0, reported, answer_s))
        return wait

    def close(self) -> None:
        self.batcher.stop()
        self.ended.result(60)
        self.loop.stop()


class HeldBatcher(RecordedBatcher):
    """A batcher that generates as many tokens as a test wants, and then one more for each command.

    Without it a response would need tokens for as long as a test takes on a busy machine.
    """

    def __init__(self, loaded: LoadedModel, runner: Runner | None = None) -> None:
        self._wanted = 0
        super().__init__(loaded, runner)
        self.batcher.on_command = self._on_command

    def hold_at(self, tokens: int) -> None:
        """Generate `tokens` of each choice, unless more are wanted already."""
        with self.grew:
            self._wanted = max(self._wanted, tokens)
            self.grew.notify_all()

    def release(self) -> None:
        """Generate all tokens."""
        self.hold_at(sys.maxsize)

    def _on_command(self) -> None:
        with self.grew:
            self.grew.notify_all()
        self.loop.wake()

    def _deliver(self, events: Sequence[Event]) -> None:
        super()._deliver(events)
        with self.grew:
            assert self.grew.wait_for(lambda: self._is_short() or self.batcher.has_commands(), 60)

    def _is_short(self) -> bool:
        running = [deltas for name, deltas in self.deltas.items() if name not in self.over]
        return not running or min(len(d) for deltas in running for d in deltas.values()) < self._wanted

    def close(self) -> None:
        self.release()
        super().close()


def request(loaded: LoadedModel, name: str, resume: Resume | None = None, **body: Any) -> GenerationRequest:
    asked = {"model": "m", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, **body}
    ask = InferRequest(request_id=name, instance_id="i", model="m", endpoint="completion", body=asked, resume=resume)
    result = loaded.computable.reader.read(ask)
    assert isinstance(result, GenerationRequest)
    return result


def cut(whole: Deltas, at: dict[int, int], asked: GenerationRequest, prepared: str = "") -> Resume:
    """Return the gateway's resume state after so many deltas of each choice."""
    choices = []
    for index, count in at.items():
        received = whole[index][:count]
        tokens = tuple(t for d in received for t in d.token_ids)
        finish = next((d.finish_reason for d in received if d.finish_reason), None)
        choices.append(
            ResumedChoice(index=index, token_ids=tokens, text_chars=sum(len(d.text) for d in received), finish_reason=finish)
        )
    return Resume(
        revision="test",
        choices=tuple(choices),
        prompt_tokens=asked.prompt_tokens,
        seed=asked.params.seed,
        prepared=prepared,
    )


def flat(deltas: Sequence[ChoiceDelta]) -> tuple[str, list[int], list[Any], list[str]]:
    logprobs = [(p.token_id, [t.token_id for t in p.top]) for d in deltas for p in d.logprobs or ()]
    return (
        "".join(d.text for d in deltas),
        [t for d in deltas for t in d.token_ids],
        logprobs,
        [d.finish_reason for d in deltas if d.finish_reason],
    )
