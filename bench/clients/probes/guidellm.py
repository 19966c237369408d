"""guidellm: its program measures the gateway by each of its request formats.

`HF_HUB_OFFLINE` is set for it, because the tokenizer is the demo model's own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.clients.probes.probe import MODEL, TIMEOUT_S, UNKNOWN, Probes, check, check_usage, model_directory, root

probes = Probes()
REQUESTS = 3
PROMPT, OUTPUT = 16, 12
"""Tokens of a synthetic request."""


def measure(route: str, model: str = MODEL) -> Any:
    """Return the report of one benchmark; fail if the program does."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        options = {
            "backend": f"kind=openai_http,target={root()},model={model},request_format={route}",
            "profile": "kind=synchronous",
            "constraint": f"kind=max_requests,count={REQUESTS}",
            "tokenizer": f"kind=hf_auto,model={model_directory()}",
            "data": f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}",
            "output": f"kind=json,path={report}",
        }
        program = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"]
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        done = subprocess.run(
            [*program, *arguments],
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            timeout=3 * TIMEOUT_S,
            capture_output=True,
            text=True,
            check=False,
        )
        if not report.exists():
            raise RuntimeError(f"guidellm wrote no report: {done.stdout[-300:]}{done.stderr[-300:]}")
        (benchmark,) = json.loads(report.read_text())["benchmarks"]
        return benchmark["requests"]


def check_requests(found: Any) -> None:
    counts = {outcome: [r["info"]["error"] for r in requests or ()] for outcome, requests in found.items()}
    check(len(found["successful"]) == REQUESTS and not found["errored"], counts)
    for request in found["successful"]:
        check(request["output"], request)
        check(request["info"]["timings"]["token_iterations"] > 1, request["info"]["timings"])
        check_usage(request["input_metrics"]["text_tokens"], request["output_metrics"]["text_tokens"])
        check(request["output_metrics"]["text_tokens"] == OUTPUT, request["output_metrics"])


@probes.add("stream", "run with /v1/chat/completions; usage and times of each request")
def chat() -> None:
    check_requests(measure("/v1/chat/completions"))


@probes.add("stream", "run with /v1/completions")
def completions() -> None:
    check_requests(measure("/v1/completions"))


@probes.add("error", "requests for an unknown model are counted as errored")
def error() -> None:
    try:
        found = measure("/v1/chat/completions", UNKNOWN)
    except RuntimeError as e:
        check("404" in str(e) or UNKNOWN in str(e), e)
    else:
        check(not found["successful"] and found["errored"], found)


@probes.add("responses", "run with /v1/responses")
def responses() -> None:
    check_requests(measure("/v1/responses"))


if __name__ == "__main__":
    probes.run()
