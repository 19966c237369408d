"""Common parts of all experiments.

They are runs over seeds, means with confidence intervals, the paper's statements, and the output.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from services.scheduler.domain.policies.port import Profile, Resident
from simulator.config import ClusterFile, ModelGroup
from simulator.controller import Controller
from simulator.failures import schedule
from simulator.instances import Instance, SimDevice
from simulator.report import Outcome
from simulator.workloads.request import Request
from simulator.world import World

CLOSE = 0.25
"""A figure of ours agrees with the paper's if it is within this share of it, or if the confidence interval holds the paper's."""
WIDE = 0.5
"""An interval wider than this share of its mean to either side says nothing: "unsure"."""
STUDENT = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
    2.120,
    2.110,
    2.101,
)
"""Two-sided 95 % quantiles of Student's t for 1, 2, … degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Options:
    """`scale` of 1: as long as the paper's experiment, or as ours says; less: shorter.

    `sensitivity`: also with what is not stated at ±50 %. `only`: of an experiment with several
    settings, those whose names have this in them.
    """

    seeds: int = 10
    scale: float = 1.0
    sensitivity: bool = True
    only: str = ""

    @property
    def few(self) -> Options:
        """For the runs of the sensitivity."""
        return replace(self, seeds=min(3, self.seeds))

    def seconds(self, full: float) -> float:
        return full * self.scale


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean over seeds and its 95 % confidence interval."""

    mean: float
    low: float
    high: float
    seeds: int

    def __str__(self) -> str:
        if math.isnan(self.mean):
            return "none"
        return f"{_short(self.mean)} [{_short(self.low)}, {_short(self.high)}]" if self.seeds > 1 else _short(self.mean)


def estimate(values: Iterable[float | None]) -> Estimate:
    """None among the values are left out: a run in which the figure does not exist."""
    found = [v for v in values if v is not None and not math.isnan(v)]
    if not found:
        return Estimate(math.nan, math.nan, math.nan, 0)
    middle = fmean(found)
    if len(found) == 1:
        return Estimate(middle, middle, middle, 1)
    half = STUDENT[min(len(found) - 2, len(STUDENT) - 1)] * stdev(found) / math.sqrt(len(found))
    return Estimate(middle, middle - half, middle + half, len(found))


def _short(value: float) -> str:
    size = abs(value)
    return f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 0.1 else f"{value:.3g}"


Figures = dict[str, float]
Measure = Callable[[Outcome], Figures]


@dataclass(frozen=True, slots=True)
class Case:
    """One simulated set-up.

    `label` distinguishes it within its experiment; `everywhere`: every node's disk holds every
    model that fits. Not `consolidated`: pipelines stay pipelines.
    """

    label: tuple[tuple[str, str], ...]
    cluster: ClusterFile
    models: tuple[ModelGroup, ...]
    traffic: Callable[[int], Sequence[Request]]
    profile: Profile
    everywhere: bool = False
    consolidated: bool = True


class Remembering(World):
    """A world of devices that hold hundreds of functions each (Torpor).

    The policy's view of an unchanged device is cached. A function's popularity (`miss`), which no
    policy of such devices uses, is that of its last change.
    """

    def __init__(self, cluster: ClusterFile, groups: Sequence[ModelGroup], profile: Profile, seed: int) -> None:
        super().__init__(cluster, groups, profile, seed)
        self._seen: dict[str, tuple[tuple[object, ...], Resident]] = {}

    def _resident(self, device: SimDevice, instance: Instance) -> Resident:
        model = instance.model
        stamp = (instance.state, len(instance.runs), instance.idle_since, instance.moving, len(model.instances), len(model.queue))
        seen = self._seen.get(instance.key)
        if seen is not None and seen[0] == stamp:
            return seen[1]
        made = super()._resident(device, instance)
        self._seen[instance.key] = (stamp, made)
        return made


def run(case: Case, seed: int) -> Outcome:
    """The simulator's `simulate`, with disks that hold more than one copy."""
    kind = Remembering if case.cluster.runtime.exclusive else World
    world = kind(case.cluster, case.models, case.profile, seed)
    if case.everywhere:
        for node in world.nodes.values():
            for model in world.models.values():
                if node.ssd.used + model.weights <= node.ssd.capacity:
                    node.ssd.add(model.name, model.weights)
    controller = Controller(world)
    if not case.consolidated:
        controller.pipelines.consolidate = lambda instance: None  # type: ignore[method-assign]  # what the ablation leaves out
    schedule(world, controller)
    return controller.run(case.traffic(seed))


@dataclass
class Row:
    """Figures of one case.

    Attributes:
        runs: By seed, in the same order for all cases, so that ratios can be taken seed by seed.
        paper: The paper's (or its published artifact's) value of a figure.
    """

    label: dict[str, str]
    runs: list[Figures]
    paper: dict[str, float] = field(default_factory=dict)

    def __getitem__(self, figure: str) -> Estimate:
        return estimate(r.get(figure) for r in self.runs)

    def over(self, other: Row, figure: str) -> Estimate:
        """This one's figure over the other's, seed by seed."""
        pairs = zip(self.runs, other.runs, strict=True)
        return estimate(a[figure] / b[figure] if a.get(figure) is not None and b.get(figure) else None for a, b in pairs)


@dataclass(frozen=True, slots=True)
class Claim:
    """What the paper says in words or tables.

    With a number: `ours` is compared with it; without: `holds` says whether the order is the same.
    """

    where: str
    text: str
    ours: Estimate
    paper: float | None = None
    holds: bool | None = None
    bound: float | None = None
    """Of an order: what the figure must be on one side of; an interval over several seeds that holds it is "unsure"."""

    @property
    def verdict(self) -> Literal["yes", "no", "unsure"]:
        if self.holds is not None:
            crossed = self.bound is not None and self.ours.seeds > 1 and self.ours.low < self.bound < self.ours.high
            return "unsure" if crossed else "yes" if self.holds else "no"
        if self.paper is None or math.isnan(self.ours.mean):
            return "unsure"
        if abs(self.ours.mean - self.paper) <= CLOSE * abs(self.paper):
            return "yes"
        if not self.ours.low <= self.paper <= self.ours.high:
            return "no"
        return "unsure" if self.ours.high - self.ours.mean > WIDE * abs(self.ours.mean) else "yes"


@dataclass
class Result:
    name: str
    title: str
    rows: list[Row] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def row(self, **label: str) -> Row:
        return next(r for r in self.rows if all(r.label.get(k) == v for k, v in label.items()))

    def measured(self, cases: Iterable[Case], options: Options, measure: Measure) -> None:
        for case in cases:
            self.rows.append(Row(dict(case.label), [measure(run(case, seed)) for seed in range(options.seeds)]))

    def number(self, where: str, text: str, ours: Estimate, paper: float) -> None:
        self.claims.append(Claim(where, text, ours, paper))

    def order(self, where: str, text: str, ours: Estimate, holds: bool, bound: float | None = None) -> None:
        self.claims.append(Claim(where, text, ours, holds=holds, bound=bound))

    def document(self) -> dict[str, Any]:
        return {
            "experiment": self.name,
            "title": self.title,
            "rows": [
                {"label": r.label, "figures": {f: asdict(r[f]) for f in _figures([r])}, "paper": r.paper or "plot only"}
                for r in self.rows
            ],
            "claims": [{**asdict(c), "agrees": c.verdict} for c in self.claims],
            "notes": self.notes,
        }


def label(**parts: str | float) -> tuple[tuple[str, str], ...]:
    return tuple((k, f"{v:g}" if isinstance(v, float) else str(v)) for k, v in parts.items())


def varied(profile: Profile, name: str, **parts: Any) -> Profile:
    """A profile with some of its functions replaced, for an ablation."""
    return replace(profile, name=name, **parts)


def _figures(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(f for r in rows for run_ in r.runs for f in run_))


def printed(result: Result) -> str:
    """Format our figures with their intervals, then the paper's statements.

    The paper's figures are included, where it has any.
    """
    lines = [f"## {result.name}: {result.title}", ""]
    figures = _figures(result.rows)
    labels = list(dict.fromkeys(k for r in result.rows for k in r.label))
    table = [[*labels, *figures]]
    for r in result.rows:
        cells = [f"{r[f]}" + (f" (paper {_short(r.paper[f])})" if f in r.paper else "") for f in figures]
        table.append([*(r.label.get(k, "") for k in labels), *cells])
    lines += _table(table)
    if not any(r.paper for r in result.rows):
        lines.append("The paper's values of this figure: plot only.")
    if result.claims:
        claims = [["where", "the paper says", "paper", "ours", "agrees"]]
        for c in result.claims:
            stated = _short(c.paper) if c.paper is not None else "order"
            claims.append([c.where, c.text, stated, str(c.ours), c.verdict])
        lines += ["", *_table(claims)]
    return "\n".join([*lines, *([""] if result.notes else []), *(f"- {n}" for n in result.notes), ""])


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *body = rows
    return ["| " + " | ".join(r) + " |" for r in (head, ["---"] * len(head), *body)]


def write(results: Sequence[Result], directory: Path, settings: Mapping[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for result in results:
        document = {**result.document(), "settings": dict(settings)}
        (directory / f"{result.name}.json").write_text(json.dumps(document, indent=1, default=str) + "\n")


def summary(directory: Path) -> str:
    """Return one table of the statements in a directory's JSON files.

    It has the seeds and the length of the runs.
    """
    rows = [["experiment", "where", "the paper says", "paper", "ours, 95 % interval", "agrees"]]
    for path in sorted(directory.glob("*.json")):
        document = json.loads(path.read_text())
        seeds = max((c["ours"]["seeds"] for c in document["claims"]), default=0)
        runs = f"{document['experiment']} ({seeds} x {document['settings'].get('scale', 1.0):g})"
        for claim in document["claims"]:
            stated = "order" if claim["paper"] is None else _short(claim["paper"])
            rows.append([runs, claim["where"], claim["text"], stated, str(Estimate(**claim["ours"])), claim["agrees"]])
            runs = ""
    return "\n".join(_table(rows))
