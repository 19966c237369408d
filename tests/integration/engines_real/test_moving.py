"""Repeated migrations of streams between two real vLLMs on a mesh of two nodes.

Tokens equal those of undisturbed streams.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from shared.sizing import MIB
from tests.integration.engines_real.conftest import FAMILY, PATIENCE_S, forked_python
from tests.support.launcher import until
from tests.support.moving import Roomy, Stream

MOVES = int(os.environ.get("THAW_TEST_MIGRATIONS", "6"))
"""`make test-long` sets 200."""
TOKENS = 900
NEAR_TIE = 1e-3
"""Gap of log-probabilities that rounding may reverse: tokens decoded in steps are recomputed at
once.
"""
NODES = ("node-0", "node-1")
PROMPTS = ("Where does the ice go?", "né 日本 café", "Once upon a time there was a river that")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * PATIENCE_S)]


class Hosted(Roomy):
    """A mesh with one vLLM on each of two nodes.

    In float32 recomputation changes no token of a single stream.
    """

    def serve(self, source: Path) -> None:
        self.environment["THAW_VLLM_PYTHON"] = forked_python()
        spec = {"name": "one", "source": str(source), "engine": "vllm", "dtype": "float32", "max_model_len": 1024}
        limits = {"max_concurrency": 2, "engine_args": {"kv_cache_bytes": 128 * MIB}, "replicas": {"min": 2, "max": 2}}
        nodes = {name: {"cpu:0": "4GiB"} for name in NODES}
        document = {"mesh": {"port": self.port, "nodes": nodes}, "models": [{**spec, **limits, "keep_alive": -1}]}
        path = self.home / "thaw.yaml"
        path.write_text(json.dumps(document))
        self.json("up", "--detach", "--config", str(path))
        until(lambda: all(self.on("one", node) for node in NODES), 2 * PATIENCE_S, "a vLLM on each node")  # two start at once


@pytest.fixture(scope="module")
def mesh(model_directory: Path) -> Iterator[Hosted]:
    forked_python()
    thaw = Hosted()
    try:
        thaw.serve(model_directory)
        yield thaw
    finally:
        thaw.close()


@pytest.fixture(scope="module")
def asked(model_directory: Path, torn: list[int]) -> dict[str, Any]:
    """Return tokens that are whole characters.

    vLLM's text for invalid UTF-8 depends on the text before it.
    """
    tokenizer = Tokenizer.from_file(str(model_directory / "tokenizer.json"))
    words = sorted({*range(3, tokenizer.get_vocab_size())} - {*torn})
    greedy = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "allowed_token_ids": words}
    return {"model": "one", "max_tokens": TOKENS, **greedy}


def begun(mesh: Hosted, asked: dict[str, Any], prompt: str) -> Stream:
    stream = Stream(mesh.url, {**asked, "prompt": prompt}).start()
    assert stream.opened.wait(60), stream.error
    return stream


@pytest.mark.runs("vllm", FAMILY)
def test_many_migrations_between_two_vllms_keep_the_tokens(mesh: Hosted, asked: dict[str, Any]) -> None:
    """One stream at a time migrates between the nodes until it ends."""
    undisturbed: dict[str, Stream] = {}
    engines = {node: mesh.on("one", node) for node in NODES}
    done = streams = ties = given_up = 0
    pauses: list[float] = []
    while done < MOVES:
        prompt = PROMPTS[streams % len(PROMPTS)]
        if prompt not in undisturbed:
            undisturbed[prompt] = begun(mesh, asked, prompt).result()
            assert len(undisturbed[prompt].tokens) == TOKENS
        stream, streams, to = begun(mesh, asked, prompt), streams + 1, 0
        while stream.thread.is_alive() and done < MOVES:
            record, to = moved(mesh, stream, NODES[to]), 1 - to
            if record is None:
                continue
            if record["state"] == "given_up":  # the source decoded faster than the destination computed; the stream stays
                given_up += 1
                assert given_up <= MOVES, json.dumps(record)
                continue
            assert record["state"] == "done", json.dumps(record)
            assert sum(r["tokens"] for r in record["rounds"]) > 0, ("vLLM's prefix cache was not prepared", record)
            # One that finished meanwhile has no pause.
            found = [m["pause_ms"] for m in record["requests"] if m["outcome"] == "moved"]
            pauses, done = pauses + found, done + len(found)
        ties += as_undisturbed(mesh, stream.result(), undisturbed[prompt])
        assert streams < MOVES, f"streams end before they can be moved: {done} moves in {streams}"
    assert min(pauses) > 0
    assert ties <= streams / 4, f"{ties} of {streams} streams met a near-tie"
    mesh.await_settled()
    assert {node: mesh.on("one", node) for node in NODES} == engines, "the same two engines throughout"


def as_undisturbed(mesh: Hosted, stream: Stream, undisturbed: Stream) -> int:
    """Check the tokens against the undisturbed stream.

    Returns:
        1 if they part at a near-tie, whose gap is measured; 0 if they are the same.
    """
    at = stream.differs(undisturbed)
    if at is None:
        stream.assert_same(undisturbed)
        return 0
    assert stream.done
    assert not stream.error
    assert (len(stream.ids), stream.finish, stream.usage) == (1, undisturbed.finish, undisturbed.usage)
    assert len(stream.tokens) == len(undisturbed.tokens), "a token is missing, or there twice"
    body = {
        "model": "one",
        "prompt": [*undisturbed.prompt_ids, *undisturbed.tokens[:at]],
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": 20,
        "return_tokens_as_token_ids": True,
    }
    choice = httpx.post(f"{mesh.url}/v1/completions", json=body, timeout=60).json()["choices"][0]
    top = choice["logprobs"]["top_logprobs"][0]
    gap = abs(top[f"token_id:{stream.tokens[at]}"] - top[f"token_id:{undisturbed.tokens[at]}"])
    assert gap < NEAR_TIE, f"token {at} differs, and its gap is {gap}: {top}"
    return 1


def moved(mesh: Hosted, stream: Stream, node: str) -> dict[str, Any] | None:
    """Return the migration's record; None if the request was there or has ended."""
    try:
        (record,) = mesh.order(request_id=stream.request_id, node=node)["migrations"]
    except httpx.HTTPStatusError as e:
        if e.response.status_code in (400, 404):
            return None
        raise
    finished = record["requests"] and record["requests"][0]["outcome"] == "finished"
    return None if finished else dict(record)
