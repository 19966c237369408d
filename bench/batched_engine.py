"""The builtin engine's request path with a model that computes by the clock: `python -m
bench.batched_engine --nats URL [--pace MS] [--slots N]`.

Requests of the model `paced` go through the builtin engine's `Serving`, `Batcher` and computing
thread, so its order of admission and its pauses are real; only the forward pass is replaced by one
that takes MS milliseconds for any batch. Its capacity is therefore known. The catalogue, the status
and the model `free` are those of `bench.prepared_engine`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any, cast

import torch
import uvloop
from nats.aio.msg import Msg

from bench.prepared_engine import FREE, PACED, PROMPT_TOKENS, WORDS, MeshDoor
from services.engine.domain.sampling_params import SamplingParams, StopConditions
from services.engine.domain.step_planning import Limits
from services.engine.generation.batcher import Batcher
from services.engine.generation.device_loop import DeviceLoop
from services.engine.generation.events import Event
from services.engine.generation.request import Choice, GenerationRequest
from services.engine.generation.runner import Row
from services.engine.server.serving import Serving
from shared.contracts import subjects
from shared.contracts.inference import CancelInfer, InferRequest

_KV_BLOCKS = 10_000
_GREEDY = SamplingParams(temperature=0.0)


class ClockRunner:
    """A runner whose steps take a fixed time, the time between them included."""

    rewinds = True

    def __init__(self, pace_s: float) -> None:
        self._pace_s = pace_s
        self._ends_at = 0.0

    def new_state(self) -> object:
        return object()

    def forget(self, adapter: object) -> None:
        """No adapter is ever used."""

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        now = time.perf_counter()
        began = self._ends_at if now - self._ends_at < self._pace_s else now
        self._ends_at = began + self._pace_s
        time.sleep(max(0.0, self._ends_at - now))
        return torch.zeros(len(rows), len(WORDS))


class _Words:
    def decode(self, tokens: list[int]) -> str:
        return "".join(WORDS[token] for token in tokens)


class _Reader:
    def read(self, request: InferRequest) -> GenerationRequest:
        stop = StopConditions(max_tokens=request.body["max_tokens"])
        choice = Choice(0, (0,) * PROMPT_TOKENS, stop)
        return GenerationRequest(request.request_id, (choice,), _GREEDY, PROMPT_TOKENS, None, (), share=request.share)


class BatchedDoor(MeshDoor):
    """Serves `paced` with the parts of the builtin engine."""

    def __init__(self, nats_url: str, pace_s: float, slots: int) -> None:
        super().__init__(nats_url, {FREE: 0.0, PACED: pace_s}, slots)
        self._pace_s, self._slots = pace_s, slots
        self._serving = Serving(self._mesh)

    async def start(self) -> None:
        loop = asyncio.get_running_loop()

        def deliver(events: Sequence[Event]) -> None:
            loop.call_soon_threadsafe(self._serving.on_events, events)

        limits = Limits(self._slots, _KV_BLOCKS, 8192, 256)
        batcher = Batcher(ClockRunner(self._pace_s), cast(Any, None), cast(Any, _Words()), limits, deliver)
        self._serving.open(cast(Any, _Reader()), batcher, 1)
        DeviceLoop(1).serve(PACED, batcher)
        await super().start()

    async def publish(self) -> None:
        """Send responses until cancelled."""
        await self._serving.publish_forever()

    async def _on_request(self, message: Msg) -> None:
        if message.subject == subjects.infer(PACED):
            await self._serving.on_message(message)
        else:
            await super()._on_request(message)

    async def _on_cancel(self, message: Msg) -> None:
        await super()._on_cancel(message)
        self._serving.cancel(CancelInfer.model_validate_json(message.data).request_id)


async def serve(nats_url: str, pace_s: float, slots: int) -> None:
    door = BatchedDoor(nats_url, pace_s, slots)
    await door.start()
    async with asyncio.TaskGroup() as group:
        group.create_task(door.broadcast(), name="status")
        group.create_task(door.publish(), name="publish")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nats", required=True)
    parser.add_argument("--pace", type=float, default=10.0, help="milliseconds of a step of the paced model")
    parser.add_argument("--slots", type=int, default=4, help="sequences of a batch")
    options = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(options.nats, options.pace / 1e3, options.slots))


if __name__ == "__main__":
    main()
