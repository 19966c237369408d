"""Torpor (USENIX ATC '25 text in section numbers of the arXiv version)."""

from __future__ import annotations

from dataclasses import dataclass

from bench.papers.constants import Constant

DEVICES = Constant(4, "V100", "section 7, settings")
DEVICE_GB = Constant(32, "GB", "section 7, settings")
HOST_GB = Constant(384, "GB", "section 7, settings")
NODES = Constant(6, "workers", "section 7.4")
PERCENTILE = Constant(0.98, "", "section 7, metrics")
PCIE = Constant(9.3, "GB/s", "Table 4: Bert-qa's 1.34 GB in 144 ms, pipelined with its execution")
BUS = Constant(11.0, "GB/s", "Table 3: ResNet-152 in 43 ms (5.4 GB/s) beside Bert-qa in 240 ms (5.6 GB/s) on one PCIe switch")
NVLINK = Constant(25.0, "GB/s", "NVIDIA V100 white paper: 25 GB/s each way per link; links per pair are not stated", stated=False)
RATE_LOW = Constant(5, "requests a minute", "section 7.3")
RATE_HIGH = Constant(30, "requests a minute", "section 7.3; the distribution between is not stated, uniform here")
COLD_S = Constant(8, "s", "Table 1: ResNet-152's cold start; for all vision models here")
FOOTPRINT_GB = Constant(1.6, "GB", "Table 1: ResNet-152 with its own runtime; for all vision models here")
FOOTPRINT_BERT_GB = Constant(2.4, "GB", "Table 1")
NATIVE_OF_160 = 72
"""Section 7.3: what 4 GPUs execute natively."""
DURATION_S = Constant(600, "s", "not stated", stated=False)


@dataclass(frozen=True, slots=True)
class Model:
    """A model of Table 4, in milliseconds.

    `heavy` is underlined in Table 4, which the text at hand does not show: it is set for models
    whose swapping over PCIe adds a quarter or more to the latency with remoting.

    Attributes:
        gb: Parameters of 4 bytes (torchvision's table of weights; BERT-large's 335 million).
    """

    name: str
    native: float
    remoting: float
    pcie: float
    nvlink: float
    gb: float

    @property
    def heavy(self) -> bool:
        return self.pcie >= 1.25 * self.remoting

    @property
    def bert(self) -> bool:
        return self.name == "bert-qa"


MODELS = (
    Model("densenet-169", 30, 25, 27, 26, 0.0547),
    Model("densenet-201", 36, 28, 30, 30, 0.0774),
    Model("inception-v3", 19, 14, 17, 16, 0.1039),
    Model("efficientnet", 17, 12, 13, 13, 0.0205),
    Model("resnet-50", 11, 9, 13, 11, 0.0978),
    Model("resnet-101", 20, 14, 22, 16, 0.1705),
    Model("resnet-152", 25, 17, 25, 20, 0.2304),
    Model("bert-qa", 42, 43, 144, 45, 1.34),
)
