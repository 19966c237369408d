"""ServerlessLLM (OSDI '24), test bed (ii)."""

from __future__ import annotations

from bench.papers.constants import Constant
from bench.papers.traffic import SHAREGPT, Lengths

NODES = Constant(4, "servers", "section 7.1, test bed (ii)")
DEVICES = Constant(4, "A40 per server", "section 7.1, test bed (ii)")
NETWORK = Constant(1.25, "GB/s", "section 7.1: 10 Gbps Ethernet")
SSD_GB = Constant(2000, "GB", "section 7.1: one PCIe 4.0 NVMe 2TB SSD")
DEVICE_GB = Constant(48, "GB", "NVIDIA A40 data sheet: 48 GB GDDR6; not in the paper", stated=False)
PCIE = Constant(31.5, "GB/s", "NVIDIA A40 data sheet: PCI Express Gen4, 31.5 GB/s each way; not in the paper", stated=False)
SSD = Constant(
    6.0, "GB/s", "half of section 7.2's 12 GB/s of two PCIe 4.0 NVMe SSDs in RAID 0; the single one is not stated", stated=False
)
RAID = Constant(12.0, "GB/s", "section 7.2: RAID0-NVMe; what the loaders were compared on")
POOL_GB = Constant(
    165, "GB", 'section 7.3: with 66 GB each "only two models can be stored in the main memory", so 132 to 198', stated=False
)
TIMEOUT_S = Constant(300, "s", "section 7.4")
CV = Constant(8, "", "section 7.1")
DURATION_S = Constant(660, "s", "section 7.3: 925 requests at 1.4 RPS")
ZIPF = Constant(1.0, "", "not stated; 1/n of the n-th model", stated=False)
CLEAN_UP_S = Constant(0.0258, "s", "section 7.3: average underestimation by clean-up of GPU state")
SAFETENSORS = Constant(4.15, "times slower", "section 7.2: 3.6 (smallest) to 4.7 (largest model); their middle")
FAST_NETWORK = Constant(12.5, "GB/s", "section 7.4: 100 Gbps")

COPIES = {"OPT-6.7B": 32, "OPT-13B": 16, "OPT-30B": 8}
"""Section 7.1."""
WEIGHTS_GB = {"OPT-6.7B": 13.4, "OPT-13B": 26.0, "OPT-30B": 66.0}
"""Section 7.3 states 66 GB; the others are 2 bytes a parameter (fp16, section 7.2)."""

SHAREGPT_S = 16 / 1.79
"""Footnote 3: "based on the average inference time of OPT-6.7B on ShareGPT, the maximum
theoretically RPS is 1.79", on 16 GPUs.
"""
RATIO = 3.7
"""Section 7.3: ShareGPT's average inference time over GSM8K's."""
RECOMPUTE = 0.1
"""Section 5.2: computing the KV cache of 1000 tokens takes as long as generating about 100."""
DATASETS = {
    "ShareGPT": SHAREGPT,
    "GSM8K": Lengths(
        60, SHAREGPT.output / RATIO, source="answers: ShareGPT's over 3.7 (section 7.3); prompts of 60 tokens are ours"
    ),
}
