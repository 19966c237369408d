"""`thaw demo traffic`: requests to demo models that share a device."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.table import Table

from shared.contracts.models import ModelSpec
from thaw.cli import demo as demos
from thaw.cli.api import Api
from thaw.cli.completions import Completion, stream_chat
from thaw.cli.output import Document, Json, screen, verb
from thaw.errors import CommandError
from thaw.launcher.home import Home
from thaw.units import format_duration

app = typer.Typer(help="Demo: traffic of models that share a device.", no_args_is_help=True)
_MAX_OPEN = 64
"""Requests at a time; an arrival beyond them waits for one that ends."""
_TRACES_WITHIN_S = 30.0
_QUESTIONS = (
    "Where does the ice go when it thaws?",
    "Write a line about a river in spring.",
    "How long does a kettle take to boil?",
    "Name three birds that winter in the south.",
)


class Size(StrEnum):
    SMALL = "5m"
    MIDDLE = "60m"
    LARGE = "250m"


@dataclass(frozen=True)
class Arrival:
    """A request to be sent `at_s` seconds after the start, to the model of this index."""

    at_s: float
    model: int
    tokens: int
    question: str


@dataclass(frozen=True)
class Outcome:
    """The result of a request; times in milliseconds from its arrival on.

    Attributes:
        error: Code of the failure; None: it succeeded.
        cold: True if it waited for its model to start; None: its trace was not there in time.
    """

    model: str
    error: str | None = None
    ttft_ms: float | None = None
    tokens: int = 0
    cold: bool | None = None


@app.callback()
def _root() -> None:
    pass


@app.command("traffic")
@verb
def traffic(
    models: Annotated[int, typer.Option("--models", min=1, max=50, help="Models to create and register.")] = 10,
    size: Annotated[Size, typer.Option("--size", help="Parameters of each.")] = Size.SMALL,
    seconds: Annotated[float, typer.Option("--seconds", min=1, max=86400, help="Seconds in which requests are sent.")] = 60.0,
    rate: Annotated[float, typer.Option("--rate", min=0.01, max=100, help="Requests a second, on average.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="The same seed sends the same requests at the same times.")] = 0,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the models' registrations at the end.")] = False,
    as_json: Json = False,
) -> Document:
    """Send chat requests to demo models that share a device of this machine's mesh.

    Requests arrive at random times (a Poisson process); the model of rank k gets a share in
    proportion to 1/k. Watch them in the console, or with `thaw ps`. A summary follows. The models
    have random weights: their text is gibberish.

    Example: [bold]thaw demo traffic --seconds 120 --rate 2[/]
    """
    home, out = Home.from_environment(), screen(as_json)
    api = Api.from_home(home)
    wanted = tuple(demos.DemoModel(f"demo-traffic-{i}", size.value, seed=i + 1) for i in range(models))
    specs = demos.make_models(home, out, wanted)
    api.add_models(specs)
    out.print(f"sending {rate:g} requests a second to {models} models for {seconds:g} s; the console is at {api.url}/ui")
    started = time.monotonic()
    with demos.usable_key(api), out.status("") as status:
        outcomes = _send(api, specs, draw_arrivals(random.Random(seed), seconds, rate, models), status.update)
    took_s = time.monotonic() - started
    document = summarize([spec.name for spec in specs], outcomes, took_s)
    out.print(_table(document))
    out.print(
        f"{document['requests']} requests in {format_duration(took_s)}, {document['failed']} failed, "
        f"{document['cold']} waited for a cold start; {document['tokens_per_second']:.1f} tokens a second"
    )
    if remove:
        for spec in specs:
            api.remove_model(spec.name)
    else:
        out.print("[dim]The models stay registered; a run with --remove removes them.[/]")
    return document


def draw_arrivals(chance: random.Random, seconds: float, rate: float, models: int) -> list[Arrival]:
    """Draw the requests of a run: a Poisson process, and models by Zipf's law with exponent 1.

    Args:
        seconds: Length of the run.
        rate: Requests a second.
    """
    weights = [1 / (rank + 1) for rank in range(models)]
    drawn: list[Arrival] = []
    at_s = 0.0
    while (at_s := at_s + chance.expovariate(rate)) < seconds:
        (model,) = chance.choices(range(models), weights)
        drawn.append(Arrival(at_s, model, chance.randint(8, 48), chance.choice(_QUESTIONS)))
    return drawn


def _send(api: Api, specs: Sequence[ModelSpec], arrivals: list[Arrival], report: Callable[[str], None]) -> list[Outcome]:
    """Send each request at its time, and wait until all have ended.

    Ctrl-C sends no further ones.
    """
    stopped = threading.Event()
    finished: list[tuple[str, Outcome]] = []

    def ask(arrival: Arrival, due: float) -> None:
        if not stopped.is_set():
            finished.append(_ask(api, specs[arrival.model].name, arrival, due))

    start = time.monotonic()
    with ThreadPoolExecutor(min(_MAX_OPEN, max(1, len(arrivals)))) as pool:
        try:
            for number, arrival in enumerate(arrivals):
                time.sleep(max(0.0, start + arrival.at_s - time.monotonic()))
                pool.submit(ask, arrival, start + arrival.at_s)
                report(f"{number + 1} of {len(arrivals)} requests sent, {len(finished)} ended")
        except BaseException:
            stopped.set()
            raise
    starts = _find_cold(api, {request_id for request_id, outcome in finished if outcome.error is None})
    return [
        Outcome(o.model, o.error, o.ttft_ms, o.tokens, starts.get(request_id)) if o.error is None else o
        for request_id, o in finished
    ]


def _ask(api: Api, model: str, arrival: Arrival, due: float) -> tuple[str, Outcome]:
    completion = Completion()
    messages = [{"role": "user", "content": arrival.question}]
    late_ms = (time.monotonic() - due) * 1e3
    try:
        for _ in stream_chat(api, model, messages, completion, max_tokens=arrival.tokens):
            pass
    except CommandError as e:
        return completion.request_id, Outcome(model, error=e.code)
    ttft_ms = None if completion.ttft_ms is None else completion.ttft_ms + late_ms
    return completion.request_id, Outcome(model, None, ttft_ms, int(completion.usage.get("completion_tokens", 0)))


def _find_cold(api: Api, wanted: set[str]) -> dict[str, bool]:
    """Return by request id whether the request waited for a start, as far as traces are there."""
    deadline = time.monotonic() + _TRACES_WITHIN_S
    while True:
        found = {trace.request_id: trace.cold for trace in api.traces() if trace.request_id in wanted}
        if len(found) == len(wanted) or time.monotonic() >= deadline:
            return found
        time.sleep(0.2)


def summarize(names: Iterable[str], outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """Return the document of a run: sums, and a row for each model."""
    rows = []
    for name in names:
        mine = [o for o in outcomes if o.model == name]
        rows.append(
            {
                "model": name,
                "requests": len(mine),
                "failed": sum(o.error is not None for o in mine),
                "cold": sum(bool(o.cold) for o in mine),
                "warm_ttft_ms": _median(o.ttft_ms for o in mine if o.cold is False),
                "cold_ttft_ms": _median(o.ttft_ms for o in mine if o.cold),
            }
        )
    tokens = sum(o.tokens for o in outcomes)
    return {
        "ok": not outcomes or any(o.error is None for o in outcomes),
        "seconds": seconds,
        "requests": len(outcomes),
        "failed": sum(row["failed"] for row in rows),
        "errors": dict(Counter(o.error for o in outcomes if o.error is not None)),
        "cold": sum(row["cold"] for row in rows),
        "tokens": tokens,
        "tokens_per_second": tokens / seconds if seconds else 0.0,
        "models": rows,
    }


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _table(document: dict[str, Any]) -> Table:
    table = Table("model", "requests", "failed", "waited cold", "TTFT warm", "TTFT cold", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in document["models"]:
        times = ("" if row[k] is None else format_duration(row[k] / 1e3) for k in ("warm_ttft_ms", "cold_ttft_ms"))
        table.add_row(row["model"], str(row["requests"]), str(row["failed"] or ""), str(row["cold"] or ""), *times)
    return table
