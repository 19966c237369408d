"""Generated requests have the published statistics; read ones match their file."""

from __future__ import annotations

from itertools import groupby, pairwise
from pathlib import Path
from statistics import mean, pstdev

import pytest

from shared.contracts.traces import RequestTrace
from shared.errors import InvalidRequest
from simulator.workloads.request import Request
from simulator.workloads.synthetic import DATASETS, LOCALITY, Burst, Synthetic, popularity, synthetic
from simulator.workloads.traces import read_trace

MODELS = ["a", "b", "c", "d"]


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("each", [False, True])
def test_arrivals_have_the_requested_rate_and_variation(cv: float, each: bool) -> None:
    requests = synthetic(Synthetic(10, 6_000, cv, length_cv=0.5, each=each), ["a"], 3)
    gaps = [b.at - a.at for a, b in pairwise(requests)]
    assert mean(gaps) == pytest.approx(0.1, rel=0.1)
    assert pstdev(gaps) / mean(gaps) == pytest.approx(cv, rel=0.15)
    lengths = [r.prompt_tokens for r in requests]
    assert mean(lengths) == pytest.approx(256, rel=0.05)
    assert pstdev(lengths) / mean(lengths) == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("each", [False, True])
def test_popularity_follows_zipf_and_the_seed_decides_everything(each: bool) -> None:
    requests = synthetic(Synthetic(50, 1000, zipf=1.0, each=each), MODELS, 1)
    counts = [sum(r.model == m for r in requests) for m in MODELS]
    assert [c / counts[0] for c in counts] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4], rel=0.05)
    assert synthetic(Synthetic(5, 100, each=each), MODELS, 1) == synthetic(Synthetic(5, 100, each=each), MODELS, 1)
    assert synthetic(Synthetic(5, 100, each=each), MODELS, 1) != synthetic(Synthetic(5, 100, each=each), MODELS, 2)


def test_popularity_like_azure_functions() -> None:
    shares = popularity(Synthetic(1, 1, popularity="azure"), 2000)
    assert sum(shares) == pytest.approx(1)
    assert sum(shares[:372]) == pytest.approx(0.996, abs=0.004)  # 18.6 % of them


def test_locality_levels_set_the_run_length_per_model() -> None:
    def run_length(level: str) -> float:
        what = Synthetic(10, 2000, LOCALITY[level].cv, zipf=0.0, run=LOCALITY[level].run)
        return mean(len(list(g)) for _, g in groupby(synthetic(what, [f"m{n}" for n in range(8)], 1), key=lambda r: r.model))

    lengths = [run_length(level) for level in LOCALITY]
    assert lengths[0] == 1
    assert lengths == sorted(lengths)
    assert lengths[2] == pytest.approx(4 / (1 - 1 / 8), rel=0.1)  # a new run is of the same model once in eight


def test_burst_has_a_higher_rate() -> None:
    requests = synthetic(Synthetic(10, 300, bursts=(Burst(100, 100, 5),)), MODELS, 1)
    counts = [sum(begin <= r.at < begin + 100 for r in requests) for begin in (0, 100, 200)]
    assert counts[1] / counts[0] == pytest.approx(5, rel=0.2)
    assert counts[2] / counts[0] == pytest.approx(1, rel=0.2)


@pytest.mark.parametrize("name", sorted(DATASETS))
def test_lengths_have_the_mean_and_spread_of_their_data_set(name: str) -> None:
    like = DATASETS[name]
    what = Synthetic(20, 1500, prompt_tokens=like.prompt, output_tokens=like.output, length_cv=like.cv)
    requests = synthetic(what, MODELS, 5)
    for drawn, stated in (([r.prompt_tokens for r in requests], like.prompt), ([r.output_tokens for r in requests], like.output)):
        assert mean(drawn) == pytest.approx(stated, rel=0.05)
        assert pstdev(drawn) / mean(drawn) == pytest.approx(like.cv, rel=0.15)


def test_data_sets_name_their_source() -> None:
    assert set(DATASETS) >= {"sharegpt", "gsm8k", "humaneval", "longbench"}
    assert all(d.source for d in DATASETS.values())


def test_csv_trace_is_read_and_its_errors_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("at,model,prompt_tokens,output_tokens\n2.5,a,10,20\n1,b,1,2\n")
    assert read_trace(path, MODELS) == [Request(1.0, "b", 1, 2), Request(2.5, "a", 10, 20)]
    assert [r.at for r in read_trace(path, MODELS, speed=2)] == [0.5, 1.25]
    with pytest.raises(InvalidRequest, match="line 3: no model 'b'"):
        read_trace(path, ["a"])
    for text, expected in (
        ("at,model\n1,a\n", "has no columns prompt_tokens, output_tokens"),
        ("", "is empty"),
        ("at,model,prompt_tokens,output_tokens\nsoon,a,1,2\n", "line 2"),
        ("at,model,prompt_tokens,output_tokens\nnan,a,1,2\n", "line 2: a time must be a number"),
        ("at,model,prompt_tokens,output_tokens\n1,a,-1,2\n", "line 2: a time must be a number, a prompt at least 0 tokens"),
        ("at,model,prompt_tokens,output_tokens\n", "holds no request"),
    ):
        path.write_text(text)
        with pytest.raises(InvalidRequest, match=expected):
            read_trace(path, MODELS)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_trace(tmp_path / "none.csv", MODELS)
    with pytest.raises(InvalidRequest, match="speed"):
        read_trace(path, MODELS, speed=0)


def test_azure_llm_traces_of_2023(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:04.0319600,110,27\n"
        "2023-11-16 18:18:04.0319600,110,0\n"
    )
    found = read_trace(path, MODELS, seed=1)
    assert [r.at for r in found] == pytest.approx([0.97996, 1.03196, 61.03196])
    assert [(r.prompt_tokens, r.output_tokens) for r in found] == [(4808, 10), (110, 27), (110, 1)]
    assert {r.model for r in found} <= set(MODELS)
    assert found == read_trace(path, MODELS, seed=1)
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n")
    with pytest.raises(InvalidRequest, match="line 2"):
        read_trace(path, MODELS)


def test_burstgpt_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n"
        "45,ChatGPT,1087,0,1087,Conversation log\n"
        "118,GPT-4,417,276,693,Conversation log\n"
        "120,ChatGPT,10,20,30,API log\n"
    )
    found = read_trace(path, MODELS)
    assert found == [Request(5, "a", 472, 18), Request(118, "b", 417, 276), Request(120, "a", 10, 20)]


def test_recorded_trace_of_a_mesh_is_read(tmp_path: Path) -> None:
    def record(n: int, model: str, ttft: float | None) -> str:
        trace = RequestTrace(
            request_id=f"r{n}",
            trace_id="t",
            model=model,
            endpoint="/v1/chat/completions",
            received=1.7e9 + n,
            ttft_ms=ttft,
            duration_ms=100,
            prompt_tokens=7,
            completion_tokens=n,
        )
        return trace.model_dump_json()

    path = tmp_path / "run.jsonl"
    path.write_text("\n".join([record(3, "a", 10), record(1, "b", 10), record(2, "a", None), ""]))
    assert read_trace(path, MODELS) == [Request(0, "b", 7, 1), Request(2, "a", 7, 3)]
    path.write_text('{"request_id": 1}\n')
    with pytest.raises(InvalidRequest, match=r"run\.jsonl, line 1: "):
        read_trace(path, MODELS)
