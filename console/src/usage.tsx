// Requests, tokens and cold starts by key and model: the ledger that `thaw usage` reads.

import { useEffect, useMemo, useState } from "preact/hooks";
import { admin } from "./api";
import { Bars } from "./chart";
import { useFilter } from "./parts";

interface Counts {
  requests: number;
  failed: number;
  prompt_tokens: number;
  cached_tokens: number;
  completion_tokens: number;
  cold_requests: number;
  cold_start_s: number;
}

interface Row {
  key: string | null;
  model: string | null;
  hour: number | null;
  counts: Counts;
}

const SPANS: [label: string, hours: number][] = [["24 hours", 24], ["7 days", 168], ["30 days", 720]];
const HOUR_S = 3600;

export function UsagePage() {
  const [hours, setHours] = useState(24);
  const [rows, setRows] = useState<Row[] | null>(null);
  const [byHour, setByHour] = useState<Row[]>([]);
  const [note, setNote] = useState("");
  const [failure, setFailure] = useState("");

  useEffect(() => {
    let current = true;
    const load = async () => {
      const since = Math.floor(Date.now() / 1000 / HOUR_S) - hours;
      const sums: { rows: Row[]; complete: boolean } = await admin(`usage?since=${since}&by=key,model`);
      const series: { rows: Row[] } = await admin(`usage?since=${since}&by=hour`);
      if (!current) return;
      setRows(sums.rows);
      setNote(sums.complete ? "" : "There are more rows; `thaw usage` shows fewer dimensions.");
      setByHour(series.rows);
      setFailure("");
    };
    load().catch((error: Error) => current && setFailure(error.message));
    return () => {
      current = false;
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
  const { shown, field } = useFilter(rows ?? [], (r) => `${r.key} ${r.model}`);
  const count = (value: number) => value.toLocaleString();
  return (
    <>
      <h1>Usage</h1>
      {failure && <p class="failure" role="alert">{failure}</p>}
      <label>
        The last{" "}
        <select value={hours} onChange={(event) => setHours(Number(event.currentTarget.value))}>
          {SPANS.map(([label, value]) => <option key={value} value={value}>{label}</option>)}
        </select>
      </label>
      {rows && !rows.length && <p>No request has been recorded in this time.</p>}
      {points[0]!.length > 0 && <Bars data={points} names={["prompt tokens", "completion tokens"]} label="Tokens per hour. The table below has the sums." />}
      {field("Find a key or model")}
      <div class="scroll" tabIndex={0} role="region" aria-label="Table of usage">
        <table>
          <caption>{note}</caption>
          <thead>
            <tr>
              {["Key", "Model", "Requests", "Failed", "Prompt tokens", "Cached", "Completion tokens", "Cold starts", "Seconds of cold starts"].map((title) => (
                <th key={title} scope="col">{title}</th>
              ))}
            </tr>
          </thead>
          <tbody>
            {shown.map((r) => (
              <tr key={`${r.key} ${r.model}`}>
                <th scope="row">{r.key || "no key"}</th>
                <td>{r.model}</td>
                <td class="number">{count(r.counts.requests)}</td>
                <td class="number">{count(r.counts.failed)}</td>
                <td class="number">{count(r.counts.prompt_tokens)}</td>
                <td class="number">{count(r.counts.cached_tokens)}</td>
                <td class="number">{count(r.counts.completion_tokens)}</td>
                <td class="number">{count(r.counts.cold_requests)}</td>
                <td class="number">{r.counts.cold_start_s.toFixed(1)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </>
  );
}
