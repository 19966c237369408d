// Requests, tokens, cold starts and costs by key and model, and budgets: what `thaw usage` and `thaw keys` read.

import { useEffect, useMemo, useState } from "preact/hooks";
import { admin } from "./api";
import { Bars } from "./chart";
import { amount, budgetsOf, money, type Budget } from "./money";
import { Alert, useFilter } from "./parts";

interface Counts {
  requests: number;
  failed: number;
  prompt_tokens: number;
  cached_tokens: number;
  completion_tokens: number;
  cold_requests: number;
  cold_start_s: number;
  held_cpu_byte_s: number;
  held_cuda_byte_s: number;
  held_host_byte_s: number;
  held_cache_byte_s?: number; // a scheduler of another version leaves it out
  victims?: number; // a scheduler of another version leaves them out
  clearing_s?: number;
}

/** Exact amounts as text, as `Cost` of the admin API. */
export interface Cost {
  prompt: string;
  cached: string;
  completion: string;
  compute?: string; // a scheduler of another version leaves it out
  cold_starts: string;
  memory: string;
  cache?: string;
  clearing?: string;
  total: string;
}

export interface Row {
  key: string | null;
  model: string | null;
  hour: number | null;
  counts: Counts;
  /** null: the mesh has no prices. */
  cost: Cost | null;
}

export interface Viewed {
  rows: Row[];
  complete: boolean;
  /** null: the mesh has no prices. */
  currency: string | null;
}

/** Sums of the ledger of the present hour and of those before it, `hours` in all, of all models or of one. */
export function usage(hours: number, by: string, model?: string): Promise<Viewed> {
  const of = model === undefined ? "" : `&model=${encodeURIComponent(model)}`;
  return admin(`usage?since=${Math.floor(Date.now() / 1000 / HOUR_S) - hours + 1}&by=${by}${of}`);
}

const MEANINGS: Record<string, string> = {
  Cached: "Prompt tokens that the engine had computed before.",
  "Cold starts": "Requests that waited for their model to start or resume.",
  "Cold start s": "Seconds that these starts took; requests that waited for one share it.",
  Victims: "Instances that had to leave a device for these starts; requests share them.",
  "Clearing s": "Seconds until the memory of the victims was free.",
  "GiB h held": "Memory of devices that the model's instances had reserved, times hours.",
  "GiB h parked": "Host memory and swap that suspended engines held, times hours.",
  "GiB h cached": "Host memory of the model's cached weights, times hours.",
};

const SPANS: [label: string, hours: number][] = [["24 hours", 24], ["7 days", 168], ["30 days", 720]];
const HOUR_S = 3600;
/** Budgets of a day or a month begin again while the page is open. */
const REFRESH_MS = 60_000;

function gibHours(byteSeconds: number): string {
  return (byteSeconds / 2 ** 30 / HOUR_S).toFixed(2);
}

export function UsagePage() {
  const [hours, setHours] = useState(24);
  const [rows, setRows] = useState<Row[] | null>(null);
  const [byHour, setByHour] = useState<Row[]>([]);
  const [currency, setCurrency] = useState<string | null>(null);
  const [budgets, setBudgets] = useState<Budget[]>([]);
  const [note, setNote] = useState("");
  const [failure, setFailure] = useState("");

  useEffect(() => {
    let current = true;
    const load = async () => {
      const [sums, series, keys] = await Promise.all([usage(hours, "key,model"), usage(hours, "hour"), admin("keys")]);
      if (!current) return;
      setRows(sums.rows);
      setCurrency(sums.currency);
      setBudgets(budgetsOf(keys, sums.currency));
      setNote(sums.complete ? "" : "There are more rows; `thaw usage` shows fewer dimensions.");
      setByHour(series.rows);
      setFailure("");
    };
    const refresh = () => void load().catch((error: Error) => current && setFailure(error.message));
    // What the page shows of another time is not of this one.
    setRows(null);
    setByHour([]);
    refresh();
    const timer = window.setInterval(refresh, REFRESH_MS);
    return () => {
      current = false;
      window.clearInterval(timer);
    };
  }, [hours]);

  const points = useMemo(() => {
    const sorted = [...byHour].sort((a, b) => a.hour! - b.hour!);
    return [
      sorted.map((r) => r.hour! * HOUR_S),
      sorted.map((r) => r.counts.prompt_tokens),
      sorted.map((r) => r.counts.completion_tokens),
    ];
  }, [byHour]);
  const { shown, field, more } = useFilter(rows ?? [], (r) => `${r.key} ${r.model}`);
  const count = (value: number) => value.toLocaleString();
  const total = (rows ?? []).reduce((sum, r) => sum + Number(r.cost?.total ?? 0), 0);
  const titles = ["Key", "Model", "Requests", "Failed", "Prompt tokens", "Cached", "Completion tokens", "Cold starts", "Cold start s", "Victims", "Clearing s", "GiB h held", "GiB h parked", "GiB h cached"];
  return (
    <>
      <h1>Usage</h1>
      <Alert text={failure} />
      <label>
        The last{" "}
        <select value={hours} onChange={(event) => setHours(Number(event.currentTarget.value))}>
          {SPANS.map(([label, value]) => <option key={value} value={value}>{label}</option>)}
        </select>
      </label>
      {rows && currency !== null && (
        <p>Cost at the present prices: <b>{money(total, currency)}</b>{note && ", of the rows below"}</p>
      )}
      {rows && currency === null && <p class="quiet">No prices are configured, so nothing has a cost: <code>prices:</code> in thaw.yaml.</p>}
      {budgets.length > 0 && <Budgets budgets={budgets} />}
      {rows && !rows.length && <p>No request has been recorded in this time.</p>}
      {points[0]!.length > 0 && <Bars data={points} hours={hours} names={["prompt tokens", "completion tokens"]} label="Tokens per hour. The table below has the sums." />}
      <details class="quiet">
        <summary>What the columns mean</summary>
        <dl class="facts">
          {Object.entries(MEANINGS).map(([title, meaning]) => <div key={title}><dt>{title}</dt><dd>{meaning}</dd></div>)}
        </dl>
      </details>
      {field("Find a key or model")}
      <div class="scroll" tabIndex={0} role="region" aria-label="Table of usage">
        <table>
          <caption>{note}</caption>
          <thead>
            <tr>
              {[...titles, ...(currency === null ? [] : [`${currency} for tokens`, `${currency} for computing`, `${currency} for cold starts`, `${currency} for clearing`, `${currency} for memory`, `${currency} in all`])].map((title) => (
                <th key={title} scope="col">{title}</th>
              ))}
            </tr>
          </thead>
          <tbody>
            {shown.map((r) => (
              <tr key={`${r.key} ${r.model}`}>
                <th scope="row" class="name">{r.key || "no key"}</th>
                <td class="name">{r.model || "no model"}</td>
                <td class="number">{count(r.counts.requests)}</td>
                <td class="number">{count(r.counts.failed)}</td>
                <td class="number">{count(r.counts.prompt_tokens)}</td>
                <td class="number">{count(r.counts.cached_tokens)}</td>
                <td class="number">{count(r.counts.completion_tokens)}</td>
                <td class="number">{count(r.counts.cold_requests)}</td>
                <td class="number">{r.counts.cold_start_s.toFixed(1)}</td>
                <td class="number">{(r.counts.victims ?? 0).toFixed(1)}</td>
                <td class="number">{(r.counts.clearing_s ?? 0).toFixed(1)}</td>
                <td class="number">{gibHours(r.counts.held_cpu_byte_s + r.counts.held_cuda_byte_s)}</td>
                <td class="number">{gibHours(r.counts.held_host_byte_s)}</td>
                <td class="number">{gibHours(r.counts.held_cache_byte_s ?? 0)}</td>
                {currency !== null && (
                  <>
                    <td class="number">{r.cost && amount(Number(r.cost.prompt) + Number(r.cost.cached) + Number(r.cost.completion))}</td>
                    <td class="number">{r.cost && amount(Number(r.cost.compute ?? 0))}</td>
                    <td class="number">{r.cost && amount(Number(r.cost.cold_starts))}</td>
                    <td class="number">{r.cost && amount(Number(r.cost.clearing ?? 0))}</td>
                    <td class="number">{r.cost && amount(Number(r.cost.memory) + Number(r.cost.cache ?? 0))}</td>
                    <td class="number">{r.cost && amount(Number(r.cost.total))}</td>
                  </>
                )}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {more("rows")}
    </>
  );
}

/** The budgets of all keys, with what of each is spent. */
function Budgets({ budgets }: { budgets: Budget[] }) {
  const { shown, field, more } = useFilter(budgets, (b) => b.key, 20);
  return (
    <section class="card" aria-label="Budgets of keys">
      <h2>Budgets of keys</h2>
      {budgets.length > 20 && field("Find a key with a budget")}
      <div class="scroll" tabIndex={0} role="region" aria-label="Table of budgets">
        <table>
          <caption>Days and months are in UTC. Requests of a key are refused while a budget of it is spent.</caption>
          <thead>
            <tr>{["Key", "Budget", "Spent", "Of", "Share"].map((title) => <th key={title} scope="col">{title}</th>)}</tr>
          </thead>
          <tbody>
            {shown.map((b) => (
              <tr key={`${b.key} ${b.name}`}>
                <th scope="row">{b.key}</th>
                <td>{b.name}</td>
                <td class={b.spent >= b.limit ? "number failure" : "number"}>{b.format(b.spent)}</td>
                <td class="number">{b.format(b.limit)}</td>
                <td>
                  <meter min={0} max={b.limit} value={Math.min(b.spent, b.limit)} high={0.8 * b.limit} aria-label={`${b.key}, ${b.name}`} />{" "}
                  {Math.floor((100 * b.spent) / b.limit)}%
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {more("budgets")}
    </section>
  );
}
