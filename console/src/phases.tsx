// Phases of the time to the first token over time, and their values of the hour: parts of the critical path.

import { useMemo, useState } from "preact/hooks";
import { duration } from "./format";
import { Lines, Stacks, type Series } from "./series";

interface Summary {
  /** Requests whose critical path has the phase; the percentiles are among them. */
  requests: number;
  p50_ms: number;
  p99_ms: number;
}

type Phases = Record<string, Summary>;

export interface PhasePoint {
  at: number;
  phases_ms: Record<string, number>;
  warm_phases: Phases;
  cold_phases: Phases;
}

interface View {
  label: string;
  kind: "cold_phases" | "warm_phases";
  /** null: the mean. */
  percentile: "p50_ms" | "p99_ms" | null;
}

const VIEWS: View[] = [
  { label: "cold starts, p50", kind: "cold_phases", percentile: "p50_ms" },
  { label: "cold starts, p99", kind: "cold_phases", percentile: "p99_ms" },
  { label: "cold starts, mean", kind: "cold_phases", percentile: null },
  { label: "warm requests, p50", kind: "warm_phases", percentile: "p50_ms" },
  { label: "warm requests, p99", kind: "warm_phases", percentile: "p99_ms" },
];
const COLOURS = ["--weights", "--kv", "--process", "--parked", "--executor", "--reusable", "--rest", "--bad"];

interface Props {
  points: PhasePoint[];
  whole: PhasePoint;
  at: number[];
  stepS: number;
}

/** What a view shows of a phase in an interval; null: no request had it. */
function valueOf(view: View, point: PhasePoint, phase: string): number | null {
  if (view.percentile !== null) return point[view.kind][phase]?.[view.percentile] ?? null;
  return point.phases_ms[phase] ?? null;
}

/** The phases of the hour, the longest first. */
function longest(view: View, whole: PhasePoint): string[] {
  const names = Object.keys(view.percentile === null ? whole.phases_ms : whole[view.kind]);
  return names.sort((a, b) => valueOf(view, whole, b)! - valueOf(view, whole, a)!);
}

/** A series for each of the longest phases. Means have a series of the rest, too: they add up, and percentiles do not. */
function seriesOf(view: View, points: PhasePoint[], whole: PhasePoint): Series[] {
  const names = longest(view, whole);
  const hasRest = view.percentile === null && names.length > COLOURS.length;
  const shown = names.slice(0, COLOURS.length - (hasRest ? 1 : 0));
  const series = shown.map((name, i) => ({ label: name, colour: COLOURS[i]!, values: points.map((p) => valueOf(view, p, name)) }));
  if (!hasRest) return series;
  const rest = names.slice(COLOURS.length - 1);
  const others = points.map((p) => rest.reduce((total, name) => total + (p.phases_ms[name] ?? 0), 0));
  return [...series, { label: "other", colour: COLOURS[COLOURS.length - 1]!, values: others }];
}

/** Phases of warm requests are often shorter than a millisecond. */
const precise = (ms: number): string => (ms < 10 ? `${ms.toFixed(2)} ms` : duration(ms));

const hasPhases = (whole: PhasePoint): boolean => [whole.cold_phases, whole.warm_phases].some((phases) => Object.keys(phases).length > 0);

export function PhasesOverTime({ points, whole, at, stepS }: Props) {
  const [chosen, setChosen] = useState(0);
  const view = VIEWS[chosen]!;
  const series = useMemo(() => seriesOf(view, points, whole), [view, points]);
  if (!hasPhases(whole)) return null;
  const label = `Phases of ${view.label}. The table below has the values of the hour.`;
  return (
    <section aria-label="Phases of the time to the first token">
      <h3>Time to the first token by phase</h3>
      <label>
        Of{" "}
        <select value={chosen} onChange={(event) => setChosen(Number(event.currentTarget.value))}>
          {VIEWS.map((v, i) => <option key={v.label} value={i}>{v.label}</option>)}
        </select>
      </label>
      {view.percentile !== null && longest(view, whole).length > series.length && <p class="quiet">The {series.length} longest</p>}
      {series.length === 0 && <p>No such request has ended in this time.</p>}
      {series.length > 0 && view.percentile === null && <Stacks label={label} at={at} stepS={stepS} series={series} format={duration} />}
      {series.length > 0 && view.percentile !== null && (
        <Lines key={view.label} label={label} at={at} stepS={stepS} series={series} format={precise} logarithmic />
      )}
    </section>
  );
}

export function PhaseValues({ whole }: { whole: PhasePoint }) {
  if (!hasPhases(whole)) return null;
  const rows = VIEWS.filter((view) => view.percentile === "p50_ms").flatMap((view) =>
    longest(view, whole).map((phase) => ({ phase, found: whole[view.kind][phase]!, isCold: view.kind === "cold_phases" })),
  );
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Table of phases">
      <table>
        <caption>Phases of the critical path in this hour. Percentiles are of the requests that had the phase, means of all cold starts</caption>
        <thead>
          <tr>{["Phase", "Start", "Requests", "p50", "p99", "Mean"].map((title, i) => <th key={i} scope="col">{title}</th>)}</tr>
        </thead>
        <tbody>
          {rows.map(({ phase, found, isCold }) => (
            <tr key={`${isCold} ${phase}`}>
              <th scope="row">{phase}</th>
              <td>{isCold ? "cold" : "warm"}</td>
              <td class="number">{found.requests}</td>
              <td class="number">{precise(found.p50_ms)}</td>
              <td class="number">{precise(found.p99_ms)}</td>
              <td class="number">{isCold ? precise(whole.phases_ms[phase] ?? 0) : ""}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
