"""The steps of `python -m bench.gpu`, in order of value, and the goals that their figures have."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

BUDGET_S = 600.0
"""Most seconds of one step: where GPUs are lent, a command may take no longer."""
_COMPARE: Mapping[str, Callable[[float, float], bool]] = {">=": operator.ge, "<=": operator.le, "==": operator.eq}


@dataclass(frozen=True)
class Goal:
    """A goal for one figure of a step.

    Attributes:
        figure: Name of the figure.
        relation: How the figure compares with `value` if the goal is met.
        text: The goal in words.
        is_required: The step fails if the figure is missing.
    """

    figure: str
    relation: Literal[">=", "<=", "=="]
    value: float
    text: str
    is_required: bool = True

    def is_met(self, figures: Mapping[str, float]) -> bool | None:
        """Return whether the goal is met; None: the figure was not measured."""
        found = figures.get(self.figure)
        return None if found is None else _COMPARE[self.relation](found, self.value)


@dataclass(frozen=True)
class Step:
    """One command, and what it shows.

    Attributes:
        arguments: The command, after the interpreter. `{json}`, `{work}`, `{device}` and
            `{index}` are replaced by the file of its figures, a directory that all steps share, the
            device and its number.
        estimate_s: Expected duration, by calculation: no step has run on a GPU yet.
        limit_s: The step is ended after this time, at most `BUDGET_S`.
        headline: Names of the figures for the summary, besides those with goals.
        needs_files_of: Earlier steps whose files in `{work}` it reads.
    """

    name: str
    shows: str
    arguments: tuple[str, ...]
    estimate_s: float
    limit_s: float = BUDGET_S
    goals: tuple[Goal, ...] = ()
    headline: tuple[str, ...] = ()
    needs_files_of: tuple[str, ...] = ()

    def command(self, json: str, work: str, device: str) -> list[str]:
        values = {"json": json, "work": work, "device": device, "index": device.rpartition(":")[2]}
        return [sys.executable, *(argument.format(**values) for argument in self.arguments)]


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return ("-m", name, *arguments, "--json", "{json}")


def _serving(part: str, *arguments: str) -> tuple[str, ...]:
    return _module("bench.gpu.serving", part, "--models", "{work}/models", "--device", "{device}", *arguments)


STEPS: tuple[Step, ...] = (
    Step(
        "tests",
        "tests/gpu: every adapter for CUDA against the real driver",
        _module("bench.gpu.suite", "--junit", "{work}/tests.xml"),
        240,
        goals=(Goal("failed", "==", 0, "no test fails"),),
        headline=("passed", "skipped"),
    ),
    Step(
        "copies",
        "curve of copies from page-locked memory; DRAM to HBM through the loader's device",
        _module("bench.loader_gpu", "--no-disk", "--devices", "{index}"),
        60,
        goals=(Goal("dram_ratio", ">=", 0.95, "DRAM to HBM: 0.95 of a pinned cudaMemcpy"),),
        headline=("dram_limit_gb_per_s", "dram_gb_per_s", "elbow_kib", "pin_gb_per_s"),
    ),
    Step(
        "models",
        "an 8B-shaped bf16 model with random weights (16 GB), a fine-tune with 80 % equal bytes, ten of 1 GB",
        _module("bench.gpu.models", "{work}/models"),
        200,
        headline=("base_gb", "changed_part"),
    ),
    Step(
        "first_token",
        "8B model: DRAM to first token, with the engine's start beside the copy",
        _serving("first_token", "--waterfall", "{work}/first_token.txt"),
        240,
        goals=(Goal("ttft_over_copy", "<=", 1.2, "first token within 1.2 times bytes / pinned bandwidth"),),
        headline=("dram_ttft_ms", "copy_ms", "disk_ttft_ms"),
        needs_files_of=("models",),
    ),
    Step(
        "checkpoint",
        "checkpoint and restore of torch processes by size; processes that map another one's memory; NVML's proof",
        _module("bench.gpu.checkpoint", "--device", "{device}"),
        240,
        goals=(
            Goal("restore_ratio", ">=", 0.8, "restore: 0.8 of a pinned copy"),
            Goal("freed_part", ">=", 0.9, "NVML: 0.9 of the bytes are free"),
        ),
        headline=("suspend_gb_per_s", "restore_gb_per_s", "with_mapped_memory", "after_detaching"),
    ),
    Step(
        "suspended",
        "8B model: suspended to first token",
        _serving("suspended"),
        300,
        goals=(Goal("restored_over_pinned_copy", ">=", 0.8, "resume: 0.8 of a pinned copy"),),
        headline=("resume_later_ttft_ms", "suspend_later_ms", "freed_mib"),
        needs_files_of=("models",),
    ),
    Step(
        "reuse",
        "8B model: a second engine of the same weights, and a fine-tune with 80 % equal bytes",
        _serving("reuse"),
        300,
        goals=(
            Goal("tuned_over_base", "<=", 0.4, "the fine-tune adds at most 0.4 of the base's memory, KV cache included"),
            Goal("twin_over_base", "<=", 0.2, "a second engine adds no weights: at most 0.2 of the base's memory"),
        ),
        headline=("base_ttft_ms", "twin_ttft_ms", "tuned_ttft_ms", "tuned_again_ttft_ms"),
        needs_files_of=("models",),
    ),
    Step(
        "remap",
        "CUDA virtual memory: map and unmap 16 GB by size of allocation; several processes map one copy",
        _module("bench.gpu.remap", "--device", "{device}", "--bytes", "16GB"),
        90,
        goals=(Goal("added_part", "<=", 0.05, "processes that map 16 GB add at most 5 % of it"),),
        headline=("map_units_ms", "unmap_units_ms", "map_pages_ms", "unmap_pages_ms", "import_ms"),
    ),
    Step(
        "kv_pages",
        "KV cache in pages of 2 MiB: attention over them beside torch's memory, time to map and move a page",
        _module("bench.gpu.kv_pages", "--device", "{device}"),
        60,
        goals=(
            Goal("attention_ratio", "<=", 1.1, "attention takes at most 1.1 times as long as over torch's memory"),
            Goal("freed_part", ">=", 0.99, "the driver reports the memory of returned pages as free"),
        ),
        headline=("allocate_ms", "map_ms", "move_ms", "release_ms"),
    ),
    Step(
        "ssd",
        "SSD to HBM beside fio",
        _module("bench.loader_gpu", "--devices", "{index}", "--directory", "{work}"),
        120,
        goals=(Goal("ssd_ratio", ">=", 0.95, "SSD to HBM: 0.95 of fio"),),
        headline=("ssd_limit_gb_per_s", "ssd_gb_per_s"),
    ),
    Step(
        "ten",
        "ten models on one GPU with room for four: real traffic",
        _serving("ten", "--waterfall", "{work}/ten.txt"),
        300,
        goals=(Goal("failed", "==", 0, "no request fails"),),
        headline=("requests", "ttft_p50_ms", "ttft_p99_ms", "starts", "resumes"),
        needs_files_of=("models",),
    ),
    Step(
        "hot_swap",
        "hot swap of demo models beside cold starts, vLLM's too if THAW_VLLM_PYTHON names one for CUDA",
        _module("bench.hot_swap", "--device", "{device}", "--rounds", "3", "--colds", "1"),
        300,
        goals=(Goal("vllm.resume_speedup_over_cold", ">=", 31, "31 times as fast as vLLM's cold start", is_required=False),),
        headline=("builtin.resume_speedup_over_cold", "builtin.restored_over_pinned_copy"),
    ),
)


def choose(names: Sequence[str] = (), steps: Sequence[Step] = STEPS) -> tuple[Step, ...]:
    """Return the named steps and those whose files they need, in the order of the plan.

    Args:
        names: Names of steps; none: all.
        steps: The plan.

    Raises:
        KeyError: There is no such step.
    """
    by_name = {step.name: step for step in steps}
    wanted = set(names or by_name)
    if unknown := sorted(wanted - by_name.keys()):
        raise KeyError(f"there is no step {', '.join(unknown)}; the steps are {', '.join(by_name)}")
    for step in reversed(steps):
        if step.name in wanted:
            wanted |= set(step.needs_files_of)
    return tuple(step for step in steps if step.name in wanted)
