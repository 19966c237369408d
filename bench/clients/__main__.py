"""Whether client libraries work with the gateway: `python -m bench.clients`.

    python -m bench.clients [--only LIBRARY]... [--install] [--json FILE]

Installs each library into an environment of its own in the cache directory, once. Starts a mesh
with a demo model of the builtin engine, and lets each library chat, stream, ask for structured
output, call tools, embed, and meet an error. The model has random weights: the probes in
bench/clients/probes check the protocol, not the sense. Exits with 1 if a probe failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.clients.environments import LIBRARIES, Library, install, version_of
from bench.clients.probes.probe import MODEL
from bench.clients.results import merge, remarks, table
from bench.own_mesh import own_mesh
from bench.report import machine
from shared.ports import free_port
from thaw.demo.models import make_demo_model

ROOT = Path(__file__).resolve().parents[2]
_LIBRARY_S = 1800
"""Seconds that the probes of one library may take; each request has its own deadline."""
_CONFIG = """\
mesh: {{nodes: {{node-0: {{cpu:0: 1GiB}}}}}}
defaults: {{keep_alive: -1}}
models: [{{name: {name}, source: {source}}}]
"""


def probe(library: Library, interpreter: str, url: str, model: Path) -> dict[str, Any]:
    """Run the probes of a library in its environment."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("THAW_", "OPENAI_", "ANTHROPIC_"))}
    environment |= {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [interpreter, "-m", f"bench.clients.probes.{library.module}", url, str(model)]
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            command, cwd=directory, env=environment, capture_output=True, text=True, timeout=_LIBRARY_S, check=False
        )
    if done.returncode != 0:
        raise SystemExit(f"The probes of {library.name} ended with {done.returncode}: {done.stderr[-3000:]}")
    results = json.loads(done.stdout.splitlines()[-1])
    if any(r["outcome"] == "failed" for r in results):
        print(done.stderr, file=sys.stderr)
    versions = {"version": version_of(interpreter, library.name), "openai": version_of(interpreter, "openai")}
    return {"library": library.name, **versions, "results": results}


def show(libraries: list[dict[str, Any]]) -> None:
    """Print the table, and the reasons of all that did not pass."""
    head, *lines = table(libraries)
    drawn = Table(*head)
    for line in lines:
        drawn.add_row(*line)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(drawn)
    for library, way, outcome, reason in remarks(libraries):
        console.print(f"{library}, {way}: {outcome}: {reason}", markup=False)


def save(path: Path, libraries: list[dict[str, Any]]) -> None:
    """Write the results; those of other libraries in the file stay."""
    before = json.loads(path.read_text())["libraries"] if path.exists() else []
    merged = merge(before, libraries, [library.name for library in LIBRARIES])
    document = {"machine": machine(), "command": f"python -m bench.clients --json {path}", "libraries": merged}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [library.name for library in LIBRARIES]
    parser.add_argument("--only", action="append", choices=names, help="this library; may be repeated")
    parser.add_argument("--install", action="store_true", help="install the libraries, and stop")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    chosen = [library for library in LIBRARIES if not options.only or library.name in options.only]
    try:
        interpreters = {library.name: install(library) for library in chosen}
    except subprocess.CalledProcessError as e:
        sys.exit(f"A library could not be installed ({e}). Check the package index, then run the command again")
    if options.install:
        return 0
    libraries = []
    with tempfile.TemporaryDirectory(prefix="thaw-clients-") as directory:
        model = make_demo_model(Path(directory) / MODEL, MODEL.removeprefix("demo-"))
        config = Path(directory) / "thaw.yaml"
        config.write_text(_CONFIG.format(name=MODEL, source=model))
        port = free_port()
        with own_mesh("--config", str(config), port=port):
            for library in chosen:
                print(library.name, file=sys.stderr, flush=True)
                libraries.append(probe(library, interpreters[library.name], f"http://127.0.0.1:{port}", model))
    show(libraries)
    if options.json is not None:
        save(options.json, libraries)
    return int(any(outcome == "failed" for _, _, outcome, _ in remarks(libraries)))


if __name__ == "__main__":
    sys.exit(main())
