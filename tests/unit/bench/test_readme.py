"""The figures of README and docs/performance.md equal their benchmarks' output."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def figures(benchmark: str) -> dict[str, float]:
    found: dict[str, float] = json.loads((ROOT / "docs" / "performance.d" / f"{benchmark}.json").read_text())["figures"]
    return found


def cold_path() -> list[str]:
    found = figures("cold_path")
    large, small = (
        f"in {found[f'{model}.zygote.warm_cache.ttft_ms'] / 1e3:.2f} s, "
        f"{found[f'{model}.warm_cache.speedup_over_transformers']:.0f} times"
        for model in ("demo-250m", "demo-5m")
    )
    return [f"{large} as fast as a fresh `transformers` process", small]


def hot_swap() -> list[str]:
    found = figures("hot_swap")
    resumed, cold = found["vllm.resume_later_ttft_ms"] / 1e3, found["vllm.cold_ttft_ms"] / 1e3
    return [
        f"in {resumed:.2f} s, where a cold start takes {cold:.1f} s: {found['vllm.resume_speedup_over_cold']:.0f} times as fast"
    ]


def migration() -> list[str]:
    found = figures("migration")
    pauses = [found[f"rounds.{context}.pause_ms.p50"] for context in (64, 256, 1024, 4096)]
    return [f"a pause of {min(pauses):.0f} to {max(pauses):.0f} ms, at contexts of 64 to 4,096 tokens"]


def warm_path() -> list[str]:
    found = figures("warm_path")
    return [
        f"adds {found['thaw.1.added.ttft_p50_ms']:.1f} ms to the first token of a warm model",
        f"{round(found['thaw.64.free.tokens_per_s'], -3):,.0f} tokens/s over 64 streams",
        f"{found['thaw_over_litellm.1.added.ttft_p50_ms']:.2f} of the latency",
        f"{found['thaw_over_litellm.64.free.tokens_per_s']:.0f} times the throughput of a LiteLLM proxy",
    ]


def loader() -> list[str]:
    found = figures("loader")
    order = ("thaw", "thaw.fresh_memory", "torch_load_mmap", "fastsafetensors", "runai", "torch_load", "safetensors")
    cold = " | ".join(f"{found[f'{name}.gb_per_s']:.2f}" for name in (*order, "fio"))
    cached = " | ".join(f"{found[f'{name}.page_cache.gb_per_s']:.2f}" for name in order)
    fastest = min(
        value for name, value in found.items() if name.startswith("thaw_over_") and name.endswith(".cold") and "fio" not in name
    )
    beside = f"{found['thaw_over_fio.by_turns']:.2f} of fio beside it, {fastest:.1f} times the fastest other loader"
    return [
        f"| cold disk | {cold} |",
        f"| page cache | {cached} |",
        f"at {found['thaw.gb_per_s']:.1f} GB/s ({beside})",
        f"from the node's memory in {found['dram_tier.bound_ms']:.1f} ms",
        f"at {found['remote.thaw_over_download']:.2f} times a plain parallel download",
    ]


def headlines() -> list[str]:
    return [*cold_path(), *hot_swap(), loader()[2]]


def test_readme_contains_the_figures_of_its_benchmarks() -> None:
    _assert_contains("README.md", headlines())


@pytest.mark.parametrize("expected", [cold_path, hot_swap, loader, migration, warm_path])
def test_performance_page_contains_the_figures_of_its_benchmarks(expected: Callable[[], list[str]]) -> None:
    _assert_contains("docs/performance.md", expected())


def _assert_contains(document: str, phrases: list[str]) -> None:
    text = " ".join((ROOT / document).read_text().split())
    assert not [phrase for phrase in phrases if phrase not in text]
