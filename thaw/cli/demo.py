"""Make demo models, and run the demo of `thaw up --demo`: three models on a device for two."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from shared.contracts.keys import KeyList, NewKey
from shared.contracts.model_info import ModelInfo
from shared.contracts.models import ModelCard, ModelSpec
from shared.contracts.traces import RequestTrace
from shared.sizing import need_of
from thaw.cli.api import Api
from thaw.cli.completions import Completion, stream_chat
from thaw.cli.output import Document
from thaw.cli.paths import program
from thaw.cli.waterfall import request_waterfall
from thaw.errors import CommandError
from thaw.launcher.home import Home
from thaw.units import format_duration, format_size

SIZES = ("5m", "60m", "250m")
DISK_BYTES = 1024**3
PROMPT = "Where does the ice go when it thaws?"
_TOKENS = 32
_TRACE_WITHIN_S = 5.0
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_done: Any = None
"""The completed part of each model, which a worker shares with its parent."""


def _begin(shares: Any) -> None:
    global _done
    _done = shares


def _make(directory: str, size: str, seed: int, index: int) -> None:
    def report(part: float) -> None:
        _done[index] = part

    # Imported here: it needs numpy, which an installation without a node does not have.
    from thaw.demo.models import make_demo_model

    make_demo_model(Path(directory), size, seed, progress=report)


def model_name(size: str) -> str:
    return f"demo-{size}"


@dataclass(frozen=True)
class DemoModel:
    """A model to make: its name, a size of `thaw.demo.models`, and the seed of its weights."""

    name: str
    size: str
    seed: int = 0


DEMO = tuple(DemoModel(model_name(size), size) for size in SIZES)


def make_models(home: Home, out: Console, models: tuple[DemoModel, ...] = DEMO) -> tuple[ModelSpec, ...]:
    """Make missing demo models concurrently, each in a process.

    Returns:
        The models' registrations.
    """
    missing = [m for m in models if not (home.models / m.name).is_dir()]
    if missing:
        if not out.is_terminal:  # where the bars below do not show
            out.print(f"making {', '.join(m.name for m in missing)}")
        context = multiprocessing.get_context("spawn")
        shares = context.Array("d", len(missing))
        # The largest of `SIZES` first: it takes longest.
        order = sorted(range(len(missing)), key=lambda i: -models.index(missing[i]))
        with ProcessPoolExecutor(min(4, len(missing)), mp_context=context, initializer=_begin, initargs=(shares,)) as pool:
            jobs = [pool.submit(_make, str(home.models / m.name), m.size, m.seed, i) for i in order for m in [missing[i]]]
            _show_progress(out, [m.name for m in missing], shares, jobs)
            for job in jobs:
                job.result()
    out.print(f"[green]✓[/] demo models under {escape(str(home.models))} [dim](random weights: what they say is gibberish)[/]")
    return tuple(ModelSpec(name=m.name, source=str(home.models / m.name)) for m in models)


def _show_progress(out: Console, names: list[str], shares: Any, jobs: list[Future[None]]) -> None:
    columns = (TextColumn("  making {task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=out, transient=True, disable=out.quiet) as progress:
        tasks = [progress.add_task(name, total=1.0) for name in names]
        while not all(job.done() for job in jobs):
            for task, part in zip(tasks, shares, strict=True):
                progress.update(task, completed=part)
            time.sleep(0.1)


def card_of(spec: ModelSpec) -> ModelCard:
    """Return the card of a demo model, read from its own files.

    There is no loader yet to inspect them.
    """
    directory = Path(spec.source)
    config = json.loads((directory / "config.json").read_text())
    weights = sum(f.stat().st_size for f in directory.glob("*.safetensors"))
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    kv = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head * _ITEM_BYTES[dtype]
    info = ModelInfo(
        source=spec.source,
        revision="",
        architecture=config["architectures"][0],
        model_type=config["model_type"],
        task="generate",
        weights_bytes=weights,
        parameters=weights // _ITEM_BYTES[dtype],
        dtype=dtype,
        context_length=config["max_position_embeddings"],
        kv_bytes_per_token=kv,
    )
    return ModelCard(spec=spec, info=info, created=0)


def budget_for_two(specs: tuple[ModelSpec, ...]) -> int:
    """Bytes that hold the two largest of three models, and not all three."""
    small, middle, large = sorted(need_of(card_of(s)).total for s in specs)
    return large + middle + small // 2


@contextmanager
def usable_key(api: Api) -> Iterator[None]:
    """Give `api` a temporary key for the demo's requests, if the endpoint needs one.

    No key is made if THAW_API_KEY is set. The key is revoked at the end.
    """
    keys = KeyList.model_validate(api.request("GET", "/admin/v1/keys"))
    is_needed = keys.required or keys.configured or any(key.scope == "inference" for key in keys.keys)
    if api.api_key or not is_needed:
        yield
        return
    key, name = f"sk-thaw-{secrets.token_urlsafe(32)}", f"demo-{secrets.token_hex(4)}"
    made = NewKey(name=name, scope="inference", sha256=hashlib.sha256(key.encode()).hexdigest())
    api.request("POST", "/admin/v1/keys", made.model_dump_json())
    api.api_key = key
    try:
        yield
    finally:
        api.api_key = None
        api.request("DELETE", f"/admin/v1/keys/{name}")


def ask_each(api: Api, specs: tuple[ModelSpec, ...], out: Console) -> list[Document]:
    """Send each model a chat request, and print the response's start and waterfall.

    Raises:
        CommandError: A request failed.
    """
    answers: list[Document] = []
    for spec in specs:
        completion = Completion()
        with out.status(f"{spec.name} wakes") as status:

            def report(words: str, status: Any = status, name: str = spec.name) -> None:
                status.update(escape(words or f"{name} wakes"))

            messages = [{"role": "user", "content": PROMPT}]
            for _ in stream_chat(api, spec.name, messages, completion, waiting=report, max_tokens=_TOKENS, temperature=0):
                pass
        record = await_trace(api, completion.request_id)
        start = " ".join(completion.text.split())[:90]
        out.print(f"\n[green]✓[/] [bold]{spec.name}[/] answers: [italic]{escape(start)}…[/]")
        if record is not None:
            out.print(request_waterfall(record, out))
        elif completion.ttft_ms is not None:
            out.print(f"  first token after {format_duration(completion.ttft_ms / 1e3)}")
        answers.append(
            {
                "model": spec.name,
                "request_id": completion.request_id,
                "text": completion.text,
                "ttft_ms": record.ttft_ms if record else completion.ttft_ms,
                "critical_path": [s.model_dump(mode="json") for s in record.critical_path] if record else [],
            }
        )
    return answers


def await_trace(api: Api, request_id: str, now: Callable[[], float] = time.monotonic) -> RequestTrace | None:
    """A request's trace is written off its path: look until it is there, 5 s at most."""
    deadline = now() + _TRACE_WITHIN_S
    while now() < deadline:
        try:
            return api.trace(request_id)
        except CommandError as e:
            if e.code not in ("not_found", "404"):
                raise
        time.sleep(0.1)
    return None


def show_what_next(api: Api, home: Home, specs: tuple[ModelSpec, ...], budget: int, out: Console) -> None:
    thaw = program()
    body = json.dumps({"model": specs[0].name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20})
    out.print(
        f"\nThree models have just shared [bold]cpu:0[/] with a budget of {format_size(budget)}, which holds two of them.\n"
        "[yellow]Their weights are random, so the text is gibberish; everything else is real.[/]"
    )
    out.print(f"\n  endpoint      [bold]{api.url}/v1[/]")
    out.print(f"  console       [bold]{api.url}/ui[/]   (its admin key is in {home.endpoints_file})")
    out.print(
        f"  try           curl {api.url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'",
        soft_wrap=True,
        markup=False,
    )
    out.print(f"  a real model  {thaw} models add qwen hf://Qwen/Qwen3-0.6B     (or a directory in Hugging Face layout)")
    out.print(f"  look          {thaw} ps · {thaw} trace · {thaw} explain demo-250m · {thaw} chat demo-60m")
    out.print(f"  stop          {thaw} down")
