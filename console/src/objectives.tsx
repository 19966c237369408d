// A model in the last hour: met objectives, times to the first token and their phases; and its cost by hour.

import { useEffect, useMemo, useState } from "preact/hooks";
import { admin, inPath } from "./api";
import { counted, duration, optional } from "./format";
import { amount } from "./money";
import { Alert } from "./parts";
import { PhasesOverTime, PhaseValues, type PhasePoint } from "./phases";
import { Lines, Stacks, type Series } from "./series";
import { usage, type Cost } from "./usage";

interface Ttft {
  requests: number;
  p50_ms: number | null;
  p99_ms: number | null;
}

interface Point extends PhasePoint {
  warm: Ttft;
  cold: Ttft;
  judged: number;
  met: number;
}

interface History {
  step_s: number;
  since: number;
  gateways: number;
  points: Point[];
  whole: Point;
}

interface Costs {
  currency: string;
  at: number[];
  series: Series[];
}

const REFRESH_MS = 15_000;
const STEPS = [1, 5, 15];
const COST_HOURS = 24;
const HOUR_S = 3600;

/** Costs of a model by hour; null: the mesh has no prices. */
async function readCosts(name: string): Promise<Costs | null> {
  const { rows, currency } = await usage(COST_HOURS, "model,hour", name);
  if (currency === null) return null;
  const last = Math.floor(Date.now() / 1000 / HOUR_S);
  const hours = Array.from({ length: COST_HOURS }, (_, i) => last - COST_HOURS + 1 + i);
  // A scheduler of another version may answer with all models.
  const costs = new Map(rows.filter((r) => r.model === name && r.cost).map((r) => [r.hour!, r.cost!]));
  const sums = (...names: (keyof Cost)[]) => hours.map((hour) => names.reduce((sum, name) => sum + Number(costs.get(hour)?.[name] ?? 0), 0));
  return {
    currency,
    at: hours.map((hour) => hour * HOUR_S),
    series: [
      { label: "tokens", colour: "--weights", values: sums("prompt", "cached", "completion") },
      { label: "computing", colour: "--process", values: sums("compute") },
      { label: "cold starts", colour: "--kv", values: sums("cold_starts") },
      { label: "clearing", colour: "--executor", values: sums("clearing") },
      { label: "memory", colour: "--parked", values: sums("memory", "cache") },
    ],
  };
}

export function ModelHistory({ name }: { name: string }) {
  const [step, setStep] = useState(5);
  const [history, setHistory] = useState<History | null>(null);
  const [costs, setCosts] = useState<Costs | null>(null);
  const [failure, setFailure] = useState("");
  useEffect(() => {
    let current = true;
    const load = async () => {
      const [found, spent] = await Promise.all([admin(`models/${inPath(name)}/latencies?step=${step}`), readCosts(name)]);
      if (!current) return;
      setHistory(found);
      setCosts(spent);
      setFailure("");
    };
    const refresh = () => void load().catch((error: Error) => current && setFailure(error.message));
    refresh();
    const timer = window.setInterval(refresh, REFRESH_MS);
    return () => {
      current = false;
      window.clearInterval(timer);
    };
  }, [name, step]);
  return (
    <section class="card" aria-label={`The last hour of ${name}`}>
      <h2>The last hour of {name}</h2>
      <Alert text={failure} />
      <label>
        A point for each{" "}
        <select value={step} onChange={(event) => setStep(Number(event.currentTarget.value))}>
          {STEPS.map((minutes) => <option key={minutes} value={minutes}>{minutes === 1 ? "minute" : `${minutes} minutes`}</option>)}
        </select>
      </label>
      {history && <Charts history={history} costs={costs} />}
    </section>
  );
}

const share = (point: Point): number | null => (point.judged ? (100 * point.met) / point.judged : null);
const percent = (value: number): string => `${Number(value.toFixed(1))}%`;

function Charts({ history, costs }: { history: History; costs: Costs | null }) {
  const { points, whole, step_s: stepS } = history;
  const at = useMemo(() => points.map((p) => p.at), [points]);
  const objective = useMemo((): Series[] => [{ label: "objective met", colour: "--good", values: points.map(share) }], [points]);
  const ttft = useMemo(
    (): Series[] => [
      { label: "cold p99", colour: "--cold", values: points.map((p) => p.cold.p99_ms), dashed: true },
      { label: "cold p50", colour: "--cold", values: points.map((p) => p.cold.p50_ms) },
      { label: "warm p99", colour: "--warm", values: points.map((p) => p.warm.p99_ms), dashed: true },
      { label: "warm p50", colour: "--warm", values: points.map((p) => p.warm.p50_ms) },
    ],
    [points],
  );
  const since = history.since > points[0]!.at ? ` Counted since ${new Date(history.since * 1000).toLocaleTimeString()} in full.` : "";
  const served = whole.cold.requests + whole.warm.requests;
  return (
    <>
      <p class="quiet">
        {counted(served, "request")} with a first token, of {history.gateways === 1 ? "one gateway" : `${history.gateways} gateways`}.{since} Batches are not counted.
      </p>
      {served === 0 && !whole.judged && <p>No request has ended in this time.</p>}
      <div class="side-by-side">
        {whole.judged > 0 && (
          <section aria-label="Objective met">
            <h3>Requests that met the objective</h3>
            <Lines label="Share of requests that met the objective. The table below has the values." at={at} stepS={stepS} series={objective} format={percent} max={100} />
          </section>
        )}
        {served > 0 && (
          <section aria-label="Times to the first token">
            <h3>Time to the first token</h3>
            <Lines label="Percentiles of the time to the first token, cold and warm. The table below has the values." at={at} stepS={stepS} series={ttft} format={duration} logarithmic />
          </section>
        )}
        <PhasesOverTime points={points} whole={whole} at={at} stepS={stepS} />
        {costs && (
          <section aria-label="Cost by hour">
            <h3>Cost of the last {COST_HOURS} hours in {costs.currency}</h3>
            <Stacks label={`Cost by hour: ${costs.series.map((s) => `${s.label} ${amount(sum(s.values))}`).join(", ")} ${costs.currency}`} at={costs.at} stepS={HOUR_S} series={costs.series} format={amount} />
          </section>
        )}
      </div>
      <Values points={points} whole={whole} />
    </>
  );
}

const sum = (values: (number | null)[]): number => values.reduce<number>((total, value) => total + (value ?? 0), 0);

function Values({ points, whole }: { points: Point[]; whole: Point }) {
  const used = points.filter((p) => p.judged || p.cold.requests || p.warm.requests).reverse();
  const line = (title: string, p: Point) => (
    <tr key={title}>
      <th scope="row">{title}</th>
      <td class="number">{p.judged ? `${p.met} of ${p.judged}` : ""}</td>
      <td class="number">{p.cold.requests || ""}</td>
      <td class="number">{optional(p.cold.p50_ms)}</td>
      <td class="number">{optional(p.cold.p99_ms)}</td>
      <td class="number">{p.warm.requests || ""}</td>
      <td class="number">{optional(p.warm.p50_ms)}</td>
      <td class="number">{optional(p.warm.p99_ms)}</td>
    </tr>
  );
  return (
    <div class="side-by-side">
      <div class="scroll" tabIndex={0} role="region" aria-label="Table of the last hour">
        <table>
          <caption>Percentiles are accurate to 5%</caption>
          <thead>
            <tr>{["From", "Objective met", "Cold", "p50", "p99", "Warm", "p50", "p99"].map((title, i) => <th key={i} scope="col">{title}</th>)}</tr>
          </thead>
          <tbody>
            {line("the hour", whole)}
            {used.map((p) => line(new Date(p.at * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" }), p))}
          </tbody>
        </table>
      </div>
      <PhaseValues whole={whole} />
    </div>
  );
}
