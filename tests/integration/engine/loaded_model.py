"""A checkpoint as an engine loads it, beside transformers' model as a reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as tf

from services.engine.domain.step_planning import Limits
from services.engine.generation.batcher import Batcher
from services.engine.generation.device_loop import DeviceLoop
from services.engine.generation.events import Broken, Event, Progressed
from services.engine.generation.request import GenerationRequest
from services.engine.model import loading
from services.engine.model.architectures import ModelCache
from services.engine.model.bound_model import BoundModel, bind_model
from services.engine.model.model_files import ModelFiles, read_files
from services.engine.model.ready_model import ReadyModel
from services.engine.settings import EngineSettings
from shared.contracts.engine import EngineStart
from shared.contracts.inference import InferRequest
from tests.support.segments import WrittenSegment, card_of

BF16_NEAR_TIE = 0.05
"""Maximum gap of the two best logits, relative to the spread of all, where a bfloat16 batch first
departs from a single stream.
"""

PROMPTS = [[7, 8, 9, 10, 11], list(range(20, 65)), [5], list(range(100, 117))]
TOKENS = 24
"""With the second prompt more than a block, with each more than the sliding windows."""


class LoadedModel:
    """A checkpoint as an engine loads it, a running batcher, and the reference model."""

    def __init__(self, directory: Path, dtype: str, kv_blocks: int | None = None) -> None:
        self.segment = WrittenSegment(directory)
        self.segment.write_index()
        self.start = EngineStart(
            instance_id="i", node="n", card=card_of(directory), device="cpu:0", kv_bytes=64 << 20, log_path="unused"
        )
        self.bound: BoundModel = bind_model(directory, self.segment.attached(), self.start, ModelCache())
        self.segment.write_data()
        self.files: ModelFiles = read_files(directory, self.start, ModelCache())
        self.computable: ReadyModel = loading.complete(self.bound, self.files, self.start, EngineSettings())
        limits = self.computable.limits
        self.limits = Limits(8, kv_blocks or limits.kv_blocks, limits.step_tokens, 16)
        self.reference = tf.AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()

    def close(self) -> None:
        self.segment.unlink()

    def generated(self, prompt: list[int]) -> list[int]:
        reported = self.reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=TOKENS,
            do_sample=False,
        )
        return list(reported[0, len(prompt) :].tolist())

    def request(self, number: int, prompt: Any, **body: Any) -> GenerationRequest:
        asked = {"model": "m", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, **body}
        request = InferRequest(request_id=f"r{number}", instance_id="i", model="m", endpoint="completion", body=asked)
        result = self.computable.reader.read(request)
        assert isinstance(result, GenerationRequest)
        return result

    def run(self, requests: Sequence[GenerationRequest]) -> dict[str, dict[int, list[int]]]:
        """Serve all requests concurrently; return tokens by request and choice."""
        tokens: dict[str, dict[int, list[int]]] = {r.request_id: {c.index: [] for c in r.choices} for r in requests}
        left = set(tokens)

        def deliver(events: Sequence[Event]) -> None:
            for event in events:
                assert not isinstance(event, Broken), event
                if isinstance(event, Progressed):
                    for delta in event.deltas:
                        tokens[event.request_id][delta.index] += delta.token_ids
                    if event.done:
                        left.discard(event.request_id)
            if not left:
                batcher.stop()

        batcher = Batcher(self.computable.runner, self.computable.embedder, self.files.tokenization, self.limits, deliver)
        for request in requests:
            batcher.submit(request)
        loop = DeviceLoop(1)
        loop.serve("test", batcher).result(120)
        loop.stop()
        assert not left
        return tokens
