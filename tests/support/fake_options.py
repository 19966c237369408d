"""Options of the server in fake_openai.py.

`--like NAME`: it accepts only the options that the engine's documentation publishes, and these:

    --ready-after S   prints a word each 0.1 s until then, and listens after it
    --ready-with FILE the same until FILE exists
    --mute            listens and is healthy, and every generation fails
    --mute-end        the same, and it ends by itself with status 0 after its first answer
    --fork            has a child that leaves its session and ignores SIGTERM
    --retitle         has a child whose environment cannot be read from outside, as that of a
                      process with another title
    --share           has shared memory of Python's, whose name it logs, and which it never removes
    --ignore-term     SIGTERM is ignored
    --die-after S     ends by itself with status 3
    --ballast MIB     has so many MiB of weights, which its sleep releases and its wake-up loads
                      again; like Ollama it has them in a process of their own (its runner), which
                      a sleep ends and a wake-up restarts
    --hoard           sleeps with a 200 and keeps its memory
    --no-reload       after a sleep of level 2 its weights are never read again, and its output is
                      wrong
    --hold-pull FILE  a download of a model does not end before FILE exists
    --change HOW      how a change of its model ends: refuse (an error), nan (the server exits at
                      the first token), exit (it exits at once)
"""

from __future__ import annotations

import argparse
from pathlib import Path

_OPTIONS: dict[str, list[str]] = {
    "vllm": [
        "--model",
        "--served-model-name",
        "--host",
        "--port",
        "--uds",
        "--max-model-len",
        "--max-num-seqs",
        "--dtype",
        "--revision",
        "--kv-cache-memory-bytes",
        "--gpu-memory-utilization",
        "--scheduling-policy",
        "--distributed-executor-backend",
        "--tensor-parallel-size",
        "--load-format",
        "--tool-call-parser",
        "--middleware",
        "--worker-extension-cls",
        "--model-loader-extra-config",
        "--nnodes",
        "--node-rank",
        "--master-addr",
        "--master-port",
        "--max-loras",
        "--max-lora-rank",
        "--max-cpu-loras",
    ],
    "sglang": [
        "--model-path",
        "--served-model-name",
        "--host",
        "--port",
        "--context-length",
        "--max-running-requests",
        "--dtype",
        "--revision",
        "--max-total-tokens",
        "--mem-fraction-static",
        "--device",
    ],
    "llamacpp": ["--model", "--alias", "--host", "--port", "--ctx-size", "--parallel", "--n-gpu-layers", "--threads"],
    "tensorrt-llm": ["--host", "--port", "--served_model_name", "--max_seq_len", "--max_batch_size", "--tp_size"],
    "ollama": [],
    "openai": ["--host", "--port", "--uds"],
}
_SWITCHES: dict[str, list[str]] = {
    "vllm": [
        "--enforce-eager",
        "--headless",
        "--enable-lora",
        "--enable-sleep-mode",
        "--trust-remote-code",
        "--no-enable-prefix-caching",
    ],
    "sglang": ["--enable-memory-saver", "--enable-weights-cpu-backup", "--trust-remote-code", "--is-embedding"],
    "llamacpp": ["--jinja", "--embeddings"],
    "tensorrt-llm": ["--trust_remote_code"],
    "ollama": [],
    "openai": [],
}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--like", default="openai")
    for name in ("--ready-after", "--die-after"):
        parser.add_argument(name, type=float, default=0.0)
    parser.add_argument("--ballast", type=int, default=0)
    parser.add_argument("--hold-pull", type=Path)
    parser.add_argument("--ready-with", type=Path)
    parser.add_argument("--change", choices=("refuse", "nan", "exit"))
    for name in ("--mute", "--mute-end", "--fork", "--share", "--retitle", "--ignore-term", "--hoard", "--no-reload"):
        parser.add_argument(name, action="store_true")
    like = parser.parse_known_args(argv)[0].like
    for name in _OPTIONS[like]:
        parser.add_argument(name)
    for name in _SWITCHES[like]:
        parser.add_argument(name, action="store_true")
    if like in ("vllm", "sglang"):
        parser.add_argument("-m", dest="module")
    if like in ("tensorrt-llm", "ollama"):
        parser.add_argument("model")
    return parser.parse_args(argv)
