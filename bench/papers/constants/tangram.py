"""Tangram, test beds of section 5.1."""

from __future__ import annotations

from dataclasses import dataclass

from bench.papers.constants import Constant
from bench.papers.traffic import ALPACA, SHAREGPT, Lengths

DEVICE_GB = Constant(45, "GB", "section 5.1: L40")
SMALL_DEVICE_GB = Constant(24, "GB", "section 5.1: NVIDIA 4090, up to eight, one per worker")
PCIE = Constant(
    25.0, "GB/s", "not stated; PCIe 4.0 x16 of the L40 is 31.5 GB/s by its data sheet, about 80 % of it are usual", stated=False
)
OTHER_S = Constant(
    0.62, "s", "section 5.2: Load is up to 72 % of SLLM-CM's TTFT; GPT-20B's 40 GB at PCIE are 1.6 s, so 0.62 s are the rest"
)
QUERY_S = Constant(0.0163, "s", "section 5.7: state query over 8 workers")
MERGE = Constant(432.0, "GB/s", "half of the L40's 864 GB/s (data sheet): a move reads and writes", stated=False)
MERGED = Constant(0.07, "", "section 5.4.1: packing takes 93 % off merging")
KV_OVERHEAD = Constant(0.032, "", "section 5.2: throughput loss under 3.2 %")
BATCH = Constant(16, "sequences", "sections 2.3 and 5.5; the batch of Fig. 8 is not stated")
GAP_S = Constant(
    600,
    "s",
    "not stated: loading is compared, so that no request waits for another; at least this long apart, and as long again on average",
    stated=False,
)
REPEATED = {"L1": 0.0, "L2": 0.3, "L3": 0.6, "L4": 0.6}
"""How likely the next request is for the same model.

Section 2.3: "most requests are consecutive" (L3, its value is plot only: ours); section 5.1: none
at L1, half of it at L2, as at L3 with more burstiness at L4.
"""
CV = {"L1": 0.25, "L2": 0.5, "L3": 1.0, "L4": 2.0}
"""Section 5.1."""
DATASETS = (
    SHAREGPT,
    Lengths(60, 91, source="GSM8K: as in constants/serverlessllm.py"),
    ALPACA,
    Lengths(171, 98, source="HumanEval: DistServe (OSDI '24), table of data sets"),
)


@dataclass(frozen=True, slots=True)
class Model:
    """`throughput`: Table 1, SLLM-CM, tokens per second.

    `gb`: 2 bytes a parameter. `kv_mb`: of one token, from the model's published configuration
    (layers x KV heads x head size x 2 x 2 bytes).
    """

    name: str
    gb: float
    kv_mb: float
    throughput: float


MODELS = (
    Model("gpt20B", 41.1, 1.081, 225.99),
    Model("opt13B", 25.7, 0.819, 297.33),
    Model("yi9B", 17.7, 0.098, 463.04),
    Model("llama8B", 16.1, 0.131, 507.82),
    Model("opt6.7B", 13.3, 0.524, 482.02),
    Model("llama3B", 6.4, 0.115, 620.40),
    Model("qwen3B", 6.2, 0.037, 551.43),
    Model("opt1.3B", 2.6, 0.197, 627.12),
)
"""Table 1's models; 129 GB together, section 5.5's pool of 120 GB."""
