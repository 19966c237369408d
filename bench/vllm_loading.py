"""How long real vLLM takes to load its weights, by its own loader and by Thaw's plug-in:
`python -m bench.vllm_loading --python PYTHON`.

PYTHON is the interpreter of an environment with vLLM (THAW_VLLM_PYTHON by default). Each load is a
fresh vLLM, offline and eager; rounds are interleaved; the time is vLLM's own ("Loading weights
took"), and one answer of each is compared token by token.

auto      vLLM's own loader of safetensors
files     --load-format thaw without a loader: the plug-in reads the files
loader    --load-format thaw from the node's loader, which has nothing of the model yet
cached    the same, with the weights in the loader's DRAM cache
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.report import median, write
from services.enginehost.drivers.overlay import plugin_path
from shared.contracts.loader_socket import loader_socket
from shared.ports import free_port
from thaw.demo.models import make_demo_model
from weights.client import attach

CASES = ("auto", "files", "loader", "cached")
_TOOK = re.compile(r"Loading weights took ([\d.]+) seconds")
_GAVE = re.compile(r"Thaw gave \d+ tensors, [\d.]+ MiB, from .* in ([\d.]+) seconds")
_PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(**json.loads(sys.argv[1]))
    out = llm.generate(["The ice"], SamplingParams(temperature=0, max_tokens=16))
    print("TOKENS " + json.dumps(list(out[0].outputs[0].token_ids)))
"""


def run(python: str, model: Path, options: dict[str, object], plugin: Path) -> tuple[float, list[int]]:
    """Seconds that vLLM loaded weights, and the tokens of its answer."""
    given = {"model": str(model), "enforce_eager": True, "max_model_len": 256, "kv_cache_memory_bytes": 64 << 20, **options}
    env = {**os.environ, "PYTHONPATH": str(plugin), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(
        [python, "-c", _PROGRAM, json.dumps(given)], env=env, capture_output=True, text=True, timeout=900, check=False
    )
    text = done.stdout + done.stderr
    took, tokens = _GAVE.search(text) or _TOOK.search(text), re.search(r"^TOKENS (.*)$", text, re.MULTILINE)
    if took is None or tokens is None:
        raise RuntimeError(f"vLLM ended with {done.returncode}:\n{text[-3000:]}")
    return float(took[1]), json.loads(tokens[1])


def forget(model: Path) -> None:
    """Drop the model's files from the page cache."""
    for file in model.glob("*.safetensors"):
        with file.open("rb") as f:
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def mesh(home: Path) -> Iterator[Path]:
    """A mesh of its own; the socket of its loader."""
    env = {**os.environ, "THAW_HOME": str(home)}
    thaw = [sys.executable, "-m", "thaw"]
    subprocess.run([*thaw, "up", "--detach", "--port", str(free_port())], env=env, check=True, stdout=subprocess.DEVNULL)
    try:
        yield loader_socket(home / "nodes" / "node-0")
    finally:
        subprocess.run([*thaw, "down"], env=env, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=os.environ.get("THAW_VLLM_PYTHON", "python3"))
    parser.add_argument("--size", default="250m", help="of the demo model: 5m, 60m, 250m")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warm", action="store_true", help="leave the files in the page cache")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = defaultdict(list)
    answers: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory(prefix="thaw-vllm-") as directory:
        root = Path(directory)
        model = make_demo_model(root / "model", arguments.size)
        nbytes = sum(f.stat().st_size for f in model.glob("*.safetensors"))
        plugin = plugin_path(root / "plugin")
        for _ in range(arguments.rounds):
            for case in CASES:
                with mesh(root / "home") if case in ("loader", "cached") else contextlib.nullcontext(None) as socket:
                    options: dict[str, object] = {"load_format": "auto" if case == "auto" else "thaw"}
                    if socket is not None:
                        options["model_loader_extra_config"] = {"socket": str(socket), "source": str(model)}
                    if case == "cached":
                        with attach(str(socket), source=str(model)) as held:
                            held.wait()
                    if not arguments.warm:
                        forget(model)
                    took, tokens = run(arguments.python, model, options, plugin)
                    seconds[case].append(took)
                    if answers.setdefault("tokens", tokens) != tokens:
                        raise RuntimeError(f"{case} answered {tokens}, and the first of all {answers['tokens']}")
                    print(f"{case}: {took:.3f} s", file=sys.stderr)
    table = Table("weights from", "seconds", "GB/s", "of auto's time")
    base = median(seconds["auto"])
    for case in CASES:
        middle = median(seconds[case])
        table.add_row(case, f"{middle:.3f}", f"{nbytes / middle / 1e9:.2f}", f"{middle / base:.2f}")
    Console().print(
        f"{nbytes / 1e6:.0f} MB, {arguments.rounds} rounds, files {'cached' if arguments.warm else 'not cached'}; equal tokens"
    )
    Console().print(table)
    write(arguments.json, {f"{case}_s": median(seconds[case]) for case in CASES} | {"bytes": nbytes})


if __name__ == "__main__":
    main()
