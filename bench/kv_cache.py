"""The KV cache that borrows pages beside earlier ones: CPU time of decoding and prefill.

    python -m bench.kv_cache [--size 60m] [--rows 4] [--context 1024] [--tokens 160] [--rounds 9]
        [--json PATH]

Three caches run in one process on one model with one computing thread, in turns:

    copied     the cache before ADR 0056: contexts are copied as they grow
    paged      addresses are reserved, and memory is booked
    borrowed   as paged, and pages are borrowed from a loader's device as sequences grow

A round generates TOKENS tokens of ROWS sequences after prompts of CONTEXT tokens with each cache,
in alternating order, by the engine's batcher. The figures are the CPU seconds of the process, for
decoding (with the growth of the cache) and for the prefill, as medians, and the medians of the
rounds' ratios to the copied cache. The process includes the lender, which is a thread here and
the loader's process otherwise: the ratios of the borrowed cache are upper bounds. The tokens are
compared: any difference ends the run with an error.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.report import median, write
from services.engine.domain.elastic_kv import Demand, Lease
from services.engine.domain.sampling_params import SamplingParams, StopConditions
from services.engine.domain.step_planning import BLOCK_TOKENS, Limits, blocks_for
from services.engine.generation import attention
from services.engine.generation.attention import PACKED
from services.engine.generation.batcher import Batcher
from services.engine.generation.embedding import Embedder, Pooling
from services.engine.generation.events import Broken, Event, Progressed
from services.engine.generation.kv_cache import SequenceKV
from services.engine.generation.kv_pages import KvPages
from services.engine.generation.request import Choice, GenerationRequest
from services.engine.generation.runner import WARM_UP, PackedRunner, Row
from services.engine.tokenization import Tokenization
from services.loader.kv_lending import KvLending
from shared.contracts.loader_socket import SOCKET_ASK, SocketBorrow
from thaw.demo.models import make_demo_model
from weights.kv_lease import KvLease, Lent, Shrink
from weights.store.separate import SeparateDevice
from weights.store.units import PAGE_BYTES

CACHES = ("copied", "paged", "borrowed")
DEVICE = "cpu:1"


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


class CopiedRunner(PackedRunner):
    """A runner whose sequences have the earlier cache."""

    def new_state(self) -> SequenceKV:
        return CopiedKV()


class Measured:
    """Generates with one cache, and measures."""

    def __init__(self, model: PreTrainedModel, tokenization: Tokenization, prompts: Sequence[list[int]], tokens: int) -> None:
        self._model, self._tokenization, self._prompts, self._tokens = model, tokenization, prompts, tokens
        self.found: list[list[int]] = [[] for _ in prompts]
        self._ended = 0
        self._wake = threading.Event()

    def run(self, cache: str, socket: Path) -> tuple[float, float]:
        """Return CPU seconds of the prefill and of decoding."""
        rows, context = len(self._prompts), len(self._prompts[0])
        kind = CopiedRunner if cache == "copied" else PackedRunner
        runner = kind(self._model, torch.device("cpu"), int(self._model.config.max_position_embeddings))
        probe = PackedRunner(self._model, torch.device("cpu"), BLOCK_TOKENS)
        state = probe.new_state()
        probe.forward([Row(state, 0, list(WARM_UP))])
        blocks = rows * (blocks_for(context + self._tokens) + 2)
        embedder = Embedder(self._model, torch.device("cpu"), Pooling("mean", normalize=False), causal=True, is_packed=True)
        limits = Limits(rows, blocks, rows * context, BLOCK_TOKENS)
        batcher = Batcher(runner, embedder, self._tokenization, limits, self._deliver)
        batcher.on_command = self._wake.set
        lease = None
        if cache == "borrowed":
            lease = _borrow(batcher, socket, state.nbytes, blocks)
        try:
            return self._measure(batcher)
        finally:
            if lease is not None:
                lease.close()

    def _measure(self, batcher: Batcher) -> tuple[float, float]:
        for number, prompt in enumerate(self._prompts):
            choice = Choice(0, tuple(prompt), StopConditions(self._tokens))
            params = SamplingParams(temperature=0.0)
            batcher.submit(GenerationRequest(str(number), (choice,), params, len(prompt), None, ()))
        began, prefilled = time.process_time(), 0.0
        while self._ended < len(self._prompts):
            self._wake.clear()
            wait_s = batcher.next_step_at(time.monotonic()) - time.monotonic()
            if wait_s > 0:
                self._wake.wait(min(wait_s, 60.0))
                continue
            batcher.step()
            if not prefilled and all(self.found):
                prefilled = time.process_time()
        return prefilled - began, time.process_time() - prefilled

    def _deliver(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Broken):
                raise event.error
            if isinstance(event, Progressed):
                self.found[int(event.request_id)] += [t for d in event.deltas for t in d.token_ids]
                self._ended += event.done


def _borrow(batcher: Batcher, socket: Path, block_bytes: int, blocks: int) -> KvLease:
    def deliver(event: Lent | Shrink) -> None:
        if isinstance(event, Lent):
            batcher.on_lent(event.more, is_answer=event.is_answer, turn=event.turn)
        else:
            batcher.shrink(event.keep)

    lease = KvLease(socket, DEVICE, "bench", 1, deliver)
    ceiling = -(-blocks * block_bytes // PAGE_BYTES)
    batcher.borrow(KvPages(Lease(1, ceiling, block_bytes, PAGE_BYTES, asked=Demand(1)), lease, blocks))
    return lease


@contextlib.contextmanager
def lender(directory: Path, nbytes: int) -> Iterator[Path]:
    """Lend the pages of a device on a socket, in a thread."""
    device = SeparateDevice(DEVICE, nbytes, f"thaw-bench-kv-{threading.get_native_id()}")
    path, loop, ready, stop = directory / "loader.sock", asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def serve() -> None:
        lending, connections = KvLending(lambda: {DEVICE: device}), set[asyncio.Task[None]]()

        async def borrow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            ask = SOCKET_ASK.validate_json(await reader.readuntil(b"\n"))
            assert isinstance(ask, SocketBorrow)
            await lending.serve(f"bench-{id(writer)}", ask, reader, writer)
            writer.close()

        def serve_borrower(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(borrow(reader, writer), name="borrower")
            connections.add(task)
            task.add_done_callback(connections.discard)

        async with await asyncio.start_unix_server(serve_borrower, path):
            ready.set()
            await stop.wait()
        await asyncio.gather(*connections)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), name="lender")
    thread.start()
    try:
        ready.wait()
        yield path
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
        device.close()


def measure(model: PreTrainedModel, tokenization: Tokenization, socket: Path, args: argparse.Namespace) -> dict[str, float]:
    draw, vocabulary = random.Random(0), int(model.config.vocab_size)
    took: dict[str, dict[str, list[float]]] = {c: {"prefill": [], "decode": []} for c in CACHES}
    for number in range(args.rounds + 1):
        prompts = [[draw.randrange(3, vocabulary) for _ in range(args.context)] for _ in range(args.rows)]
        texts = []
        order = CACHES[number % len(CACHES) :] + CACHES[: number % len(CACHES)]
        for cache in order:
            run = Measured(model, tokenization, prompts, args.tokens)
            prefill, decode = run.run(cache, socket)
            texts.append(run.found)
            if number:  # the first round warms up
                took[cache]["prefill"].append(prefill)
                took[cache]["decode"].append(decode)
        if any(text != texts[0] for text in texts):
            raise SystemExit("the caches give different tokens")
    figures = {f"{c}_{part}_cpu_s": median(took[c][part]) for c in CACHES for part in ("prefill", "decode")}
    for cache in CACHES[1:]:
        for part in ("prefill", "decode"):
            pairs = zip(took[cache][part], took["copied"][part], strict=True)
            figures[f"{cache}_{part}_ratio"] = median([new / copied for new, copied in pairs])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kv_cache", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--size", default="60m", help="demo model")
    parser.add_argument("--rows", type=int, default=4, help="sequences that decode together")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=160, help="tokens to generate")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", type=int, default=4096, help="MiB of the device whose pages are borrowed")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    attention.register()
    with tempfile.TemporaryDirectory(prefix="thaw-bench-kv-") as directory:
        path = make_demo_model(Path(directory) / args.size, args.size)
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=PACKED, dtype="auto").eval()
        tokenization = Tokenization.read(path, trust_remote_code=False)
        with lender(Path(directory), args.device << 20) as socket:
            figures = measure(model, tokenization, socket, args)
    for name, value in figures.items():
        print(f"{name:24} {value:10.4f}", file=sys.stderr)
    write(args.json, figures)


if __name__ == "__main__":
    main()
