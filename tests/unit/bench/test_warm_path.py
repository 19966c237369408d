"""Evaluation of the warm path's measurements, and its command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import TypeAdapter

from bench.prepared_engine import _CHUNK_HEAD, _CHUNK_TAILS, WORDS
from bench.warm_path import figures_of, parse
from shared.contracts.inference import INFER_REPLY, InferChunk

PACED = {"ttft_p50_ms": 1.0, "ttft_p99_ms": 2.0, "gap_p50_ms": 10.0, "gap_p99_ms": 11.0, "gap_mean_ms": 10.0}


def samples_of(target: str, slower_ms: float, rate: float) -> dict[str, list[float]]:
    paced = {f"{target}.4.paced.{name}": [value + slower_ms, 1e6, 0.0] for name, value in PACED.items()}
    return paced | {f"{target}.4.free.tokens_per_s": [rate], f"{target}.4.paced.proxy_cpu_us_per_token": [1e6 / rate]}


def test_figures_are_medians_overheads_and_ratios() -> None:
    samples = samples_of("direct", 0.0, 60_000) | samples_of("thaw", 2.0, 40_000) | samples_of("litellm", 20.0, 2_000)
    figures = figures_of(samples, [4])
    assert figures["thaw.4.paced.ttft_p50_ms"] == 3.0
    assert figures["thaw.4.added.ttft_p50_ms"] == 2.0
    assert figures["thaw_over_litellm.4.added.ttft_p50_ms"] == pytest.approx(0.1)
    assert figures["thaw_over_litellm.4.free.tokens_per_s"] == pytest.approx(20.0)


def test_figures_without_the_peer_have_no_comparison() -> None:
    figures = figures_of(samples_of("direct", 0.0, 60_000) | samples_of("thaw", 2.0, 40_000), [4])
    assert "thaw.4.added.gap_p99_ms" in figures
    assert not [name for name in figures if "litellm" in name]


def test_command_line_is_parsed() -> None:
    options = parse(["--streams", "1,8", "--litellm", "/opt/python"])
    assert options.streams == [1, 8]
    assert options.litellm == Path("/opt/python")
    with pytest.raises(SystemExit):
        parse(["--litellm", "/opt/python", "--no-litellm"])


def test_prepared_chunks_are_of_the_contract() -> None:
    adapter: TypeAdapter[object] = INFER_REPLY  # type: ignore[assignment]  # TypeAdapter is invariant
    for i, word in enumerate(WORDS):
        chunk = adapter.validate_json(_CHUNK_HEAD % 7 + _CHUNK_TAILS[i])
        assert isinstance(chunk, InferChunk)
        assert (chunk.seq, chunk.choices[0].text) == (7, word)
