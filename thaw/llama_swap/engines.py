"""Translate commands of llama-server, vLLM and SGLang into a model's options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from shared.contracts.models import ENGINE_SOURCE
from thaw.llama_swap.words import Option, options, scalar

_CHOSEN = frozenset({"port", "host", "api_key", "alias", "served_model_name", "uds"})
"""Options that Thaw sets by itself."""
_DTYPES = {"half": "float16", "float": "float32"}
_SIZES = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}
_LLAMA_SHORT = {
    "-m": "model", "-c": "ctx-size", "-a": "alias", "-np": "parallel", "-hf": "hf-repo", "-hfr": "hf-repo", "-hff": "hf-file",
    "-ngl": "n-gpu-layers", "--gpu-layers": "n-gpu-layers", "-fa": "flash-attn", "-b": "batch-size", "-ub": "ubatch-size",
    "-t": "threads", "-tb": "threads-batch", "-ctk": "cache-type-k", "-ctv": "cache-type-v", "-ts": "tensor-split",
    "-sm": "split-mode", "-mg": "main-gpu", "-md": "model-draft", "-ngld": "n-gpu-layers-draft", "-cd": "ctx-size-draft",
    "-devd": "device-draft", "-dev": "device", "-ot": "override-tensor", "-s": "seed", "-n": "n-predict", "--predict": "n-predict",
    "-cb": "cont-batching", "-nocb": "no-cont-batching", "-nkvo": "no-kv-offload", "-mm": "mmproj", "-ncmoe": "n-cpu-moe",
    "-cmoe": "cpu-moe", "-to": "timeout", "--temperature": "temp", "-cram": "cache-ram",
}  # fmt: skip
_VLLM_SHORT = {"-tp": "tensor-parallel-size", "-pp": "pipeline-parallel-size", "-dp": "data-parallel-size", "-q": "quantization"}
_SGLANG_SHORT = {"--tp": "tp-size", "--dp": "dp-size", "--model": "model-path"}
_MEMORY_OPTIONS = frozenset({"gpu_memory_utilization", "mem_fraction_static"})


class NotTranslatable(ValueError):
    """The command cannot be written as options; the error's text says why.

    The import then keeps the command.
    """


@dataclass
class Server:
    """The options of a model that a command line contains.

    Attributes:
        engine: Thaw's engine for it.
        options: Keys of a model in thaw.yaml, `engine_args` among them.
        program: Name and value of the node's setting for the program, as ("THAW_LLAMACPP_SERVER",
            "/usr/bin/llama-server").
        losses: Options without a counterpart, with the reason.
        missing: Required keys that the command does not state, with what to write.
    """

    engine: str
    options: dict[str, Any] = field(default_factory=dict)
    program: tuple[str, str] | None = None
    losses: list[tuple[str, str]] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)


def recognise(words: Sequence[str]) -> Server | None:
    """Return the server that `words` start; None for a program without an engine.

    Raises:
        NotTranslatable: A known server with options that `engine_args` cannot express.
    """
    program = PurePosixPath(words[0]).name
    if program.startswith(("llama-server", "llama-cpp-server")):
        return _llama(words[1:], _program("THAW_LLAMACPP_SERVER", words[0]))
    if program == "vllm" and words[1:2] == ["serve"]:
        python = str(PurePosixPath(words[0]).with_name("python")) if "/" in words[0] else ""
        return _vllm(words[2:], ("THAW_VLLM_PYTHON", python))
    if program.startswith("python") and words[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]:
        return _vllm(words[3:], _program("THAW_VLLM_PYTHON", words[0]))
    if program.startswith("python") and words[1:3] == ["-m", "sglang.launch_server"]:
        return _sglang(words[3:], _program("THAW_SGLANG_PYTHON", words[0]))
    return None


def engine_of_image(image: str) -> str | None:
    """Return the engine of a well-known container image."""
    name = image.lower()
    return next((engine for part, engine in _IMAGES.items() if part in name), None)


_IMAGES = {"vllm": "vllm", "sglang": "sglang", "llama.cpp": "llamacpp", "llama-cpp": "llamacpp", "llamacpp": "llamacpp"}


def arguments_of(engine: str, words: Sequence[str]) -> Server:
    """Return what the arguments of an engine's container say. Raises as `recognise`."""
    found: Callable[[Sequence[str], tuple[str, str] | None], Server] = _BY_ENGINE[engine]
    return found(words, None)


def _program(setting: str, word: str) -> tuple[str, str]:
    return (setting, word if "/" in word else "")


def _llama(words: Sequence[str], program: tuple[str, str] | None) -> Server:
    server = Server("llamacpp", program=program)
    given = _collect(words, _LLAMA_SHORT)
    if "hf_repo" in given or "model" not in given:
        raise NotTranslatable("llama-server downloads the model itself")
    server.options["source"] = given.pop("model").value
    slots = max(1, _parse_whole(given.pop("parallel", None)) or 1)  # -1: llama-server chooses
    context = _parse_whole(given.pop("ctx_size", None))
    if context and context > 0:
        server.options["max_model_len"] = context // slots
    server.options["max_concurrency"] = slots  # llama-server divides its context among its slots
    if "n_gpu_layers" in given and given["n_gpu_layers"].values in (("99",), ("999",), ("-1",), ("all",), ("auto",)):
        del given["n_gpu_layers"]  # the driver's default on a GPU
    given.pop("jinja", None)  # the driver's default
    return _with_arguments(server, given)


def _vllm(words: Sequence[str], program: tuple[str, str] | None) -> Server:
    server = Server("vllm", program=program)
    words, model = _split_positional(words)
    given = _collect(words, _VLLM_SHORT)
    model = given.pop("model").value if "model" in given else model
    _python_server(server, given, model, context="max_model_len", concurrency="max_num_seqs")
    return _with_arguments(server, given)


def _sglang(words: Sequence[str], program: tuple[str, str] | None) -> Server:
    server = Server("sglang", program=program)
    given = _collect(words, _SGLANG_SHORT)
    model = given.pop("model_path").value if "model_path" in given else None
    _python_server(server, given, model, context="context_length", concurrency="max_running_requests")
    return _with_arguments(server, given, negate=False)


_BY_ENGINE: Mapping[str, Callable[[Sequence[str], tuple[str, str] | None], Server]] = {
    "llamacpp": _llama,
    "vllm": _vllm,
    "sglang": _sglang,
}


def _python_server(server: Server, given: dict[str, Option], model: str | None, *, context: str, concurrency: str) -> None:
    """Take from `given` what vLLM and SGLang have in common."""
    if not model:
        raise NotTranslatable("the command names no model")
    revision = given.pop("revision", None)
    server.options["source"] = _hub_or_path(model, revision.value if revision else None)
    if length := _parse_whole(given.pop(context, None)):
        server.options["max_model_len"] = length
    if sequences := _parse_whole(given.pop(concurrency, None)):
        server.options["max_concurrency"] = sequences
    if dtype := given.pop("dtype", None):
        server.options["dtype"] = _DTYPES.get(dtype.value, dtype.value)
    if given.pop("trust_remote_code", None):
        server.options["trust_remote_code"] = True
    for name in sorted(_MEMORY_OPTIONS & given.keys()):
        del given[name]
        flag = f"--{name.replace('_', '-')}"
        server.losses.append((f"cmd {flag}", "Thaw reserves memory per model: set memory, or engine_args.kv_cache_bytes"))


def _split_positional(words: Sequence[str]) -> tuple[Sequence[str], str | None]:
    return (words[1:], words[0]) if words and not words[0].startswith("-") else (words, None)


def _collect(words: Sequence[str], short: Mapping[str, str]) -> dict[str, Option]:
    found: dict[str, Option] = {}
    if words and not words[0].startswith("-"):
        raise NotTranslatable(f"{words[0]} is not an option")
    for option in options(words, short):
        if option.name.startswith("-"):
            raise NotTranslatable(f"the option {option.name} is unknown here")
        if option.name in found:
            raise NotTranslatable(f"--{option.name.replace('_', '-')} is given twice")
        found[option.name] = option
    return found


def _with_arguments(server: Server, given: Mapping[str, Option], *, negate: bool = True) -> Server:
    """Put what is left of `given` into `engine_args`."""
    arguments: dict[str, Any] = {}
    for name, option in given.items():
        if name in _CHOSEN:
            continue
        if not option.values:
            negated = negate and name.startswith("no_")
            arguments[name.removeprefix("no_") if negated else name] = not negated
        else:
            values = [scalar(value) for value in option.values]
            arguments[name] = values[0] if len(values) == 1 else values
    if arguments:
        server.options["engine_args"] = arguments
    return server


def _hub_or_path(model: str, revision: str | None) -> str:
    if model.startswith(("/", ".", "~", "$")):
        return model
    return f"hf://{model}" + (f"@{revision}" if revision else "")


def _parse_whole(option: Option | None) -> int | None:
    """Return the number of an option as vLLM reads it; None without the option.

    32k is 32,000 and 32K is 32,768.
    """
    if option is None:
        return None
    text = option.value
    factor = _SIZES.get(text[-1:], 1)
    try:
        return int(float(text[:-1]) * factor) if factor > 1 else int(text)
    except ValueError:
        raise NotTranslatable(f"--{option.name.replace('_', '-')} {text} is not a number") from None


def own_command(name: str, words: Sequence[str]) -> Server:
    """Return any other server: its command as it is."""
    return Server("openai", {"source": f"{ENGINE_SOURCE}{name}", "command": list(words)})
