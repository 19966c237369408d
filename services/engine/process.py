"""The body of an engine process, the same whether it was forked from a zygote or started by itself."""

from __future__ import annotations

import importlib
import os
import sys
from functools import partial

from shared.contracts.engine import EngineStart
from shared.runtime import run_service

_FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gpt_neox", "gpt2", "opt", "bert")


def prepare_environment() -> None:
    """Before torch and transformers are imported: nothing is fetched from a hub, no library makes threads of its own, and waiting
    OpenMP threads sleep. By default they spin, which on a machine with other work to do made a decode step 20 times as slow (60M
    parameters on two cores with load 8: 31 ms asleep, 597 ms spinning). GPUs are numbered as NVML does; by itself CUDA puts the fastest first."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_OFFLINE"] = "1"
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def import_libraries() -> None:
    """Everything that an engine needs, including the modules of common architectures. Makes no thread and no CUDA context."""
    for name in (
        "services.engine.app",
        "services.engine.settings",
        "opentelemetry.sdk.trace.export",
        "jinja2.sandbox",
        "transformers.tokenization_utils_tokenizers",
        *(f"transformers.models.{family}.modeling_{family}" for family in _FAMILIES),
    ):
        importlib.import_module(name)
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    # Compiles a thousand patterns, once a process: a third of the time it takes to bind a small model.
    get_checkpoint_conversion_mapping("llama")


def run_engine_process(start: EngineStart, born: float) -> int:
    """Serve `start` until told to stop; the exit status. `born`: when this process began, in seconds of the monotonic clock."""
    os.environ.update(start.environment)
    os.environ["THAW_NODE"] = start.node
    from services.engine.app import run_engine
    from services.engine.settings import EngineSettings

    return run_service("engine", EngineSettings, partial(run_engine, start=start, born=born))


def end_process(status: int) -> None:
    """Leave without waiting for the computing thread, which may be in the middle of a step."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
