"""Write the table of what was run where: `python docs/generate_what_ran.py > docs/what-ran.md`.

Its rows are results of tests on real machines, in docs/what-ran.d/*.json: one file for each
machine, written by `pytest --what-ran FILE` (tests/support/what_ran.py). Results of client
libraries are in docs/what-ran.d/clients, written by `python -m bench.clients --json FILE`.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.clients.results import remarks, table
from shared.contracts.engines import Engine

RESULTS = Path(__file__).resolve().parent / "what-ran.d"
_INTRODUCTION = """\
# What was run where

Use this page to see on which engines, versions, processors and model families Thaw's tests have run,
and which [client libraries](#client-libraries) work with the gateway. `docs/generate_what_ran.py` makes
it from the results in `docs/what-ran.d`. To add a machine, run

```sh
make engines
.venv/bin/pytest tests/integration/engine/test_families.py tests/integration/engine/test_stage_families.py \\
    tests/integration/engine/test_architectures.py --what-ran docs/what-ran.d/MACHINE.json
.venv/bin/pytest tests/integration/engines_real --what-ran docs/what-ran.d/MACHINE.json
.venv/bin/python docs/generate_what_ran.py > docs/what-ran.md
```

A row counts the tests that ran the real engine with a small model of the family, which has random
weights. `test_families` compares the builtin engine's tokens with those of transformers' `generate`.
[engines.md](engines.md) describes the engines.
"""
_CLIENTS = """
## Client libraries

Each library ran with the gateway and a demo model of the builtin engine, on {cores} cores ({cpu}), Python
{python}. The table has the version and the results of its latest run (`--only LIBRARY` runs one):

```sh
{command}
```

A number is how many of the library's APIs worked in that case; "-": the library has no API for it. The
column `openai` has the version of the `openai` package that the library uses. The model has random
weights, so the probes in `bench/clients/probes` check the protocol: types, JSON valid by its schema,
finish reasons, token counts, and the library's own exceptions.

"""
_HEAD = "| engine | version | model family | tests | test modules |\n| --- | --- | --- | --- | --- |\n"


def page() -> str:
    """Return the page."""
    machines = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    ran = {row["engine"] for machine in machines for row in machine["rows"] if row["passed"]}
    missing = [f"`{engine}`" for engine in get_args(Engine) if engine not in ran]
    not_run = (
        "\n## Not run\n\n| engine | hardware |\n| --- | --- |\n"
        + ("" if any(m["machine"]["gpus"] for m in machines) else "| every engine | NVIDIA GPUs ([gpu.md](gpu.md)) |\n")
        + (f"| {', '.join(missing)} | every processor |\n" if missing else "")
    )
    return _INTRODUCTION + "".join(_section(machine) for machine in machines) + not_run + _clients()


def _clients() -> str:
    return "".join(_client_section(json.loads(path.read_text())) for path in sorted((RESULTS / "clients").glob("*.json")))


def _client_section(found: dict[str, Any]) -> str:
    about = _CLIENTS.format(command=found["command"], **{key: found["machine"][key] for key in ("cores", "cpu", "python")})
    head, *lines = table(found["libraries"])
    rows = [head, ["---"] * len(head), *lines]
    reasons = [f"- {library}, {way}: {outcome}. {reason}\n" for library, way, outcome, reason in remarks(found["libraries"])]
    limits = "\nAPIs that are not offered, or failed, with the reason:\n\n" + "".join(reasons) if reasons else ""
    return about + "".join(f"| {' | '.join(row)} |\n" for row in rows) + limits


def _section(found: dict[str, Any]) -> str:
    machine = found["machine"]
    title = f"\n## {machine['processor']}, {machine['architecture']}\n\n"
    gpus = ", ".join(f"{count} {name}" for name, count in Counter(machine["gpus"]).items()) or "no GPU"
    about = f"{machine['cores']} cores, {gpus}, {machine['system']}, Python {machine['python']}.\n\n"
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in found["rows"]:
        groups.setdefault((row["engine"], row["version"], row["family"]), []).append(row)
    return title + about + _HEAD + "".join(_line(*group, rows) for group, rows in groups.items())


def _line(engine: str, version: str, family: str, rows: list[dict[str, Any]]) -> str:
    totals = {outcome: sum(row[outcome] for row in rows) for outcome in ("passed", "failed", "skipped")}
    counts = ", ".join(f"{count} {outcome}" for outcome, count in totals.items() if count)
    files = ", ".join(f"`{Path(row['file']).stem}`" for row in rows)
    return f"| {engine} | {version} | {family} | {counts} | {files} |\n"


if __name__ == "__main__":
    sys.stdout.write(page())
