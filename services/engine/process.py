"""Body of an engine process, forked from a zygote or started directly."""

from __future__ import annotations

import importlib
import os
import sys
from functools import partial
from typing import NoReturn

from shared.contracts.engine import EngineStart
from shared.contracts.executor import ExecutorStart
from shared.runtime import run_service

_FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gpt_neox", "gpt2", "opt", "bert")


def prepare_environment() -> None:
    """Set environment variables that torch and transformers read when imported.

    - Hugging Face libraries work offline.
    - Tokenizers and OpenBLAS start no threads of their own.
    - Idle OpenMP threads sleep. By default they spin, which on a busy machine made a decode step 20
      times slower (60M parameters, two cores, load 8: 31 ms asleep, 597 ms spinning).
    - CUDA numbers GPUs as NVML does, by PCI bus; its default is fastest first.
    - torch asks NVML whether there is a GPU: asked of CUDA, no process forked later could use one.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_OFFLINE"] = "1"
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def import_libraries() -> None:
    """Import everything that an engine needs.

    This includes the modules of common architectures.

    Starts no thread and creates no CUDA context, so that the process can fork afterwards.
    """
    for name in (
        "services.engine.executor",
        "services.engine.settings",
        "opentelemetry.sdk.trace.export",
        "jinja2.sandbox",
        "transformers.tokenization_utils_tokenizers",
        *(f"transformers.models.{family}.modeling_{family}" for family in _FAMILIES),
    ):
        importlib.import_module(name)
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    # Compiles a thousand patterns once per process: a third of the time to bind a small model.
    get_checkpoint_conversion_mapping("llama")


def run_engine_process(start: EngineStart | ExecutorStart, process_start_s: float) -> int:
    """Serve `start` until a stop signal, and return the exit status.

    Args:
        start: The instance to serve.
        process_start_s: Time at which this process started, in seconds of the monotonic clock.
    """
    os.environ.update(start.environment)
    os.environ["THAW_NODE"] = start.node
    pids: tuple[int, ...] = ()
    if isinstance(start, EngineStart):
        from services.engine.stages.processes import fork_later_stages

        pids = fork_later_stages(start, partial(run_engine_process, process_start_s=process_start_s))
    from services.engine.app import run_engine
    from services.engine.executor import run_executor
    from services.engine.settings import EngineSettings

    if isinstance(start, ExecutorStart):
        return run_service("executor", EngineSettings, partial(run_executor, start=start))
    return run_service("engine", EngineSettings, partial(run_engine, start=start, process_start_s=process_start_s, stage_pids=pids))


def end_process(status: int) -> NoReturn:
    """Exit without waiting for a step of the computing thread.

    It always exits, also if the log's disk is full.
    """
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)
