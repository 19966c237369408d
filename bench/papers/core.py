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

from services.scheduler.domain.policies import thaw
from services.scheduler.domain.policies.port import Profile, Resident
from simulator.config import ClusterFile, ModelGroup
from simulator.controller import Controller
from simulator.failures import schedule
from simulator.instances import Instance, SimDevice
from simulator.report import Outcome
from simulator.workloads.request import Request
from simulator.world import World

CLOSE = 0.25
"""A number agrees if ours differs from the paper's by at most this share of the paper's."""
POINTS = 0.1
"""A share agrees only if it differs by at most this much, too: a quarter of 0.95 says little."""
MARGIN = 0.05
"""An order holds if ours is at least this share beyond the bound; a smaller difference is a tie."""
SAME = 0.01
"""Thaw's own comparisons: a smaller difference is "equal"."""
ALIKE = (0.9, 1.1)
"""The interval of a ratio where a paper says "similar" and gives no number."""
WIDE = 0.5
"""A half-interval wider than this share of the effect says nothing: "unsure"."""
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
    """How experiments are run.

    Attributes:
        scale: Length of an experiment as a share of the paper's, or of ours where ours differs.
        sensitivity: Run also with unstated constants changed by ±50 %.
        only: Of an experiment with several settings, run those whose names contain this.
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
        return (
            f"{_format_short(self.mean)} [{_format_short(self.low)}, {_format_short(self.high)}]"
            if self.seeds > 1
            else _format_short(self.mean)
        )


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


def _format_short(value: float) -> str:
    size = abs(value)
    return f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 0.1 else f"{value:.3g}"


Figures = dict[str, float]
Measure = Callable[[Outcome], Figures]


@dataclass(frozen=True, slots=True)
class Case:
    """One simulated set-up.

    Attributes:
        label: Distinguishes it within its experiment.
        everywhere: Every node's disk has every model that fits.
        consolidated: Pipelines become single instances; otherwise they stay pipelines.
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

    The policy's view of an unchanged device is cached. Popularity and rates of functions are those
    of their last change, so that policies that read them, as `thaw` does, need a `World`.
    """

    def __init__(self, cluster: ClusterFile, groups: Sequence[ModelGroup], profile: Profile, seed: int) -> None:
        super().__init__(cluster, groups, profile, seed)
        self._seen: dict[str, tuple[tuple[object, ...], Resident]] = {}

    def _describe_resident(self, device: SimDevice, instance: Instance) -> Resident:
        model = instance.model
        stamp = (instance.state, len(instance.runs), instance.idle_since, instance.moving, len(model.instances), len(model.queue))
        seen = self._seen.get(instance.key)
        if seen is not None and seen[0] == stamp:
            return seen[1]
        made = super()._describe_resident(device, instance)
        self._seen[instance.key] = (stamp, made)
        return made


def run(case: Case, seed: int) -> Outcome:
    """The simulator's `simulate`, with disks that hold more than one copy."""
    kind = Remembering if case.cluster.runtime.exclusive and case.profile.clear is not thaw.clear else World
    world = kind(case.cluster, case.models, case.profile, seed)
    if case.everywhere:
        for node in world.nodes.values():
            for model in world.models.values():
                if node.ssd.used + model.weights <= node.ssd.capacity:
                    node.ssd.add(model.name, model.weights)
        world.order_caches()
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

    def divide_by(self, other: Row, figure: str) -> Estimate:
        """This one's figure over the other's, seed by seed."""
        pairs = zip(self.runs, other.runs, strict=True)
        return estimate(a[figure] / b[figure] if a.get(figure) is not None and b.get(figure) else None for a, b in pairs)


Verdict = Literal["yes", "no", "unsure", "equal"]


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement of the paper in words or tables, beside our figure.

    A claim has one of: a number (`paper`), an interval (`low` and `high`), a bound that the paper
    states (`at_least`, `at_most`), or an order (`above` or `below` a bound, mostly a ratio of 1).

    Attributes:
        neutral: Of a number that is a ratio: the value of "no effect". The effect is judged, too.
        points: Of a number that is a share: the largest difference, in its unit.
        own: Thaw's own comparison, which no paper makes; a difference within the margin is "equal".
    """

    where: str
    text: str
    ours: Estimate
    paper: float | None = None
    neutral: float = 0.0
    points: float | None = None
    low: float | None = None
    high: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    own: bool = False

    @property
    def stated(self) -> str:
        """Return the paper's side as the table prints it."""
        if self.paper is not None:
            return _format_short(self.paper)
        if self.low is not None and self.high is not None:
            return f"{_format_short(self.low)} to {_format_short(self.high)}"
        signs = ((">=", self.at_least), ("<=", self.at_most), (">", self.above), ("<", self.below))
        return next(f"{sign} {_format_short(bound)}" for sign, bound in signs if bound is not None)

    @property
    def verdict(self) -> Verdict:
        if math.isnan(self.ours.mean):
            return "unsure"
        if self.paper is not None:
            return self._number(self.paper)
        if self.low is not None and self.high is not None:
            return self._judge_range(self.low, self.high)
        if self.above is not None:
            return self._order(self.above, 1)
        if self.below is not None:
            return self._order(self.below, -1)
        return self._judge_range(
            -math.inf if self.at_least is None else self.at_least, math.inf if self.at_most is None else self.at_most
        )

    def _number(self, paper: float) -> Verdict:
        ours, effect, stated = self.ours, self.ours.mean - self.neutral, paper - self.neutral
        gap = abs(ours.mean - paper)
        close = gap <= CLOSE * min(abs(paper), abs(stated)) and (self.points is None or gap <= self.points)
        holds = ours.seeds > 1 and ours.low <= paper <= ours.high
        wide = ours.high - ours.mean > WIDE * abs(effect)
        if close and not wide:
            return "yes"
        return "unsure" if close or holds else "no"

    def _judge_range(self, low: float, high: float) -> Verdict:
        ours = self.ours
        if low <= ours.mean <= high:
            return "yes" if ours.low >= low and ours.high <= high else "unsure"
        return "no" if ours.high < low or ours.low > high else "unsure"

    def _order(self, bound: float, sign: int) -> Verdict:
        ours = self.ours
        if self.own and max(abs(ours.low - bound), abs(ours.high - bound)) < SAME * abs(bound):
            return "equal"
        if ours.seeds > 1 and ours.low < bound < ours.high:
            return "unsure"
        margin = 0.0 if self.own else MARGIN * abs(bound)
        return "yes" if sign * (ours.mean - bound) > margin else "no"


@dataclass
class Result:
    name: str
    title: str
    rows: list[Row] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def row(self, **label: str) -> Row:
        return next(r for r in self.rows if all(r.label.get(k) == v for k, v in label.items()))

    def measure_cases(self, cases: Iterable[Case], options: Options, measure: Measure) -> None:
        for case in cases:
            self.rows.append(Row(dict(case.label), [measure(run(case, seed)) for seed in range(options.seeds)]))

    def number(self, where: str, text: str, ours: Estimate, paper: float) -> None:
        self.claims.append(Claim(where, text, ours, paper))

    def ratio(self, where: str, text: str, ours: Estimate, paper: float) -> None:
        """Add a ratio, which is also judged by its difference from 1."""
        self.claims.append(Claim(where, text, ours, paper, neutral=1.0))

    def share(self, where: str, text: str, ours: Estimate, paper: float, whole: float = 1.0) -> None:
        """Add a share of `whole`, which is also judged by its difference in points."""
        self.claims.append(Claim(where, text, ours, paper, points=POINTS * whole))

    def claim_within(self, where: str, text: str, ours: Estimate, low: float, high: float) -> None:
        self.claims.append(Claim(where, text, ours, low=low, high=high))

    def claim_alike(self, where: str, text: str, ours: Estimate) -> None:
        """Add a ratio of figures that the paper calls similar."""
        self.claim_within(where, text, ours, *ALIKE)

    def at_least(self, where: str, text: str, ours: Estimate, bound: float) -> None:
        self.claims.append(Claim(where, text, ours, at_least=bound))

    def at_most(self, where: str, text: str, ours: Estimate, bound: float) -> None:
        self.claims.append(Claim(where, text, ours, at_most=bound))

    def claim_above(self, where: str, text: str, ours: Estimate, bound: float = 1.0, own: bool = False) -> None:
        self.claims.append(Claim(where, text, ours, above=bound, own=own))

    def claim_below(self, where: str, text: str, ours: Estimate, bound: float = 1.0, own: bool = False) -> None:
        self.claims.append(Claim(where, text, ours, below=bound, own=own))

    def document(self) -> dict[str, Any]:
        return {
            "experiment": self.name,
            "title": self.title,
            "rows": [
                {
                    "label": r.label,
                    "figures": {f: _numbers(r[f]) for f in _figures([r])},
                    "runs": {f: [_round_value(run_.get(f)) for run_ in r.runs] for f in _figures([r])},
                    "paper": r.paper or "plot only",
                }
                for r in self.rows
            ],
            "claims": [{**_dump_claim(c), "agrees": c.verdict} for c in self.claims],
            "notes": self.notes,
        }


def label(**parts: str | float) -> tuple[tuple[str, str], ...]:
    return tuple((k, f"{v:g}" if isinstance(v, float) else str(v)) for k, v in parts.items())


def vary_profile(profile: Profile, name: str, **parts: Any) -> Profile:
    """A profile with some of its functions replaced, for an ablation."""
    return replace(profile, name=name, **parts)


def _figures(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(f for r in rows for run_ in r.runs for f in run_))


def format_result(result: Result) -> str:
    """Format our figures with their intervals, then the paper's statements.

    The paper's figures are included, where it has any.
    """
    lines = [f"## {result.name}: {result.title}", ""]
    figures = _figures(result.rows)
    labels = list(dict.fromkeys(k for r in result.rows for k in r.label))
    table = [[*labels, *figures]]
    for r in result.rows:
        cells = [f"{r[f]}" + (f" (paper {_format_short(r.paper[f])})" if f in r.paper else "") for f in figures]
        table.append([*(r.label.get(k, "") for k in labels), *cells])
    lines += _table(table)
    if not any(r.paper for r in result.rows):
        lines.append("The paper's values of this figure: plot only.")
    if result.claims:
        claims = [["where", "the paper says", "paper", "ours", "agrees"]]
        claims += [[c.where, c.text, c.stated, str(c.ours), c.verdict] for c in result.claims]
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


def claims_of(document: Mapping[str, Any]) -> list[Claim]:
    """Return the claims of a written file."""
    found = []
    for written in document["claims"]:
        ours = written["ours"]
        mean, low, high = (math.nan if ours[k] is None else float(ours[k]) for k in ("mean", "low", "high"))
        parts = {k: v for k, v in written.items() if k not in ("ours", "agrees")}
        found.append(Claim(ours=Estimate(mean, low, high, ours["seeds"]), **parts))
    return found


def summary(directory: Path) -> str:
    """Return one table of the statements in a directory's JSON files.

    It has the seeds and the length of the runs. Verdicts are computed from the figures, and counted
    above the table.
    """
    counts = {"yes": 0, "no": 0, "unsure": 0}
    rows = [["experiment", "where", "the paper says", "paper", "ours, 95 % interval", "agrees"]]
    for path in sorted(directory.glob("*.json")):
        document = json.loads(path.read_text())
        claims = claims_of(document)
        seeds = max((c.ours.seeds for c in claims), default=0)
        runs = f"{document['experiment']} ({seeds} x {document['settings'].get('scale', 1.0):g})"
        for claim in claims:
            rows.append([runs, claim.where, claim.text, claim.stated, str(claim.ours), claim.verdict])
            runs = ""
            if not claim.own:
                counts[claim.verdict] += 1
    total = f"{sum(counts.values())} statements of the papers"
    agreeing = f"{counts['yes']} agree, {counts['no']} do not, and {counts['unsure']} are unsure"
    return "\n".join([f"Of {total} {agreeing}.", "", *_table(rows)])


def _dump_claim(claim: Claim) -> dict[str, Any]:
    plain = asdict(claim)
    kept = {k: v for k, v in plain.items() if v is not None and (k, v) not in (("neutral", 0.0), ("own", False))}
    return {**kept, "ours": _numbers(claim.ours)}


def _numbers(figure: Estimate) -> dict[str, float | None]:
    return {k: _round_value(v) for k, v in asdict(figure).items()}


def _round_value(value: float | None) -> float | None:
    """Return six digits; None for what a run has no value of."""
    return None if value is None or math.isnan(value) else value if isinstance(value, int) else float(f"{value:.6g}")
