"""The KV cache beside the one that copies contexts as they grow: CPU time of decoding and prefill.

    python -m bench.kv_cache [--size 60m] [--rows 4] [--context 1024] [--tokens 160] [--rounds 9]
        [--json PATH]

Both caches run in one process on one model with one computing thread, in turns: a round generates
TOKENS tokens of ROWS sequences after prompts of CONTEXT tokens with each cache, in alternating
order. The figures are the CPU seconds of the thread, for decoding (with the growth of the cache)
and for the prefill, as medians, and the median of the rounds' ratios. The tokens are compared: any
difference ends the run with an error.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from bench.report import median, write
from services.engine.domain.step_planning import BLOCK_TOKENS
from services.engine.generation import attention
from services.engine.generation.attention import PACKED
from services.engine.generation.kv_cache import SequenceKV
from services.engine.generation.runner import PackedRunner, Row
from thaw.demo.models import make_demo_model

CACHES = ("copied", "paged")


class CopiedKV(SequenceKV):
    """The cache before ADR 0056: keys and values in two tensors, copied for each block."""

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[tuple[int, int], torch.Tensor] = {}

    def append(self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        end = start + keys.shape[2]
        return self._store((layer, 0), start, end, keys), self._store((layer, 1), start, end, values)

    def _store(self, key: tuple[int, int], start: int, end: int, new: torch.Tensor) -> torch.Tensor:
        held = self._held.get(key)
        if held is None or held.shape[2] < end:
            grown = new.new_empty((1, new.shape[1], -(-end // BLOCK_TOKENS) * BLOCK_TOKENS, new.shape[3]))
            if held is not None and start:
                grown[:, :, :start] = held[:, :, :start]
            held = self._held[key] = grown
        held[:, :, start:end] = new
        return held[:, :, :end]


def generate(runner: PackedRunner, cache: str, prompts: list[list[int]], tokens: int) -> tuple[float, float, list[list[int]]]:
    """Return CPU seconds of the prefill and of decoding, and the tokens."""
    states = [runner.new_state() if cache == "paged" else CopiedKV() for _ in prompts]
    began = time.thread_time()
    logits = runner.forward([Row(s, 0, p) for s, p in zip(states, prompts, strict=True)])
    prefilled = time.thread_time()
    found = [[int(token)] for token in logits.argmax(-1)]
    for step in range(tokens - 1):
        rows = [Row(s, len(p) + step, [f[-1]]) for s, p, f in zip(states, prompts, found, strict=True)]
        for f, token in zip(found, runner.forward(rows).argmax(-1).tolist(), strict=True):
            f.append(token)
    return prefilled - began, time.thread_time() - prefilled, found


def measure(runner: PackedRunner, vocabulary: int, args: argparse.Namespace) -> dict[str, float]:
    draw = random.Random(0)
    took: dict[str, dict[str, list[float]]] = {c: {"prefill": [], "decode": []} for c in CACHES}
    for number in range(args.rounds + 1):
        prompts = [[draw.randrange(3, vocabulary) for _ in range(args.context)] for _ in range(args.rows)]
        texts = []
        for cache in CACHES if number % 2 else reversed(CACHES):
            prefill, decode, found = generate(runner, cache, prompts, args.tokens)
            texts.append(found)
            if number:  # the first round warms up
                took[cache]["prefill"].append(prefill)
                took[cache]["decode"].append(decode)
        if texts[0] != texts[1]:
            raise SystemExit("the caches give different tokens")
    figures = {f"{c}_{part}_cpu_s": median(took[c][part]) for c in CACHES for part in ("prefill", "decode")}
    for part in ("prefill", "decode"):
        pairs = zip(took["paged"][part], took["copied"][part], strict=True)
        figures[f"{part}_ratio"] = median([paged / copied for paged, copied in pairs])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kv_cache", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--size", default="60m", help="demo model")
    parser.add_argument("--rows", type=int, default=4, help="sequences that decode together")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=160, help="tokens to generate")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    attention.register()
    with tempfile.TemporaryDirectory(prefix="thaw-bench-kv-") as directory:
        path = make_demo_model(Path(directory) / args.size, args.size)
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=PACKED, dtype="auto").eval()
        runner = PackedRunner(model, torch.device("cpu"), int(model.config.max_position_embeddings))
        figures = measure(runner, int(model.config.vocab_size), args)
    for name, value in figures.items():
        print(f"{name:24} {value:10.4f}", file=sys.stderr)
    write(args.json, figures)


if __name__ == "__main__":
    main()
