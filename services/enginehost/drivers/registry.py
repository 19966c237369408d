"""The driver of each engine."""

from __future__ import annotations

from services.enginehost.drivers.llamacpp import LlamaCpp
from services.enginehost.drivers.ollama import Ollama
from services.enginehost.drivers.port import Driver, Launch
from services.enginehost.drivers.sglang import Sglang
from services.enginehost.drivers.tensorrt_llm import TensorrtLlm
from services.enginehost.drivers.vllm import Vllm
from shared.contracts.engines import Engine

DRIVERS: dict[Engine, type[Driver]] = {
    "vllm": Vllm,
    "llamacpp": LlamaCpp,
    "sglang": Sglang,
    "ollama": Ollama,
    "tensorrt-llm": TensorrtLlm,
    "openai": Driver,
}


def driver_of(launch: Launch) -> Driver:
    return DRIVERS[launch.card.spec.engine](launch)
