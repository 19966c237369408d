// Active and finished requests with their waterfall, the placement decision behind a cold start, and what-if queries.

import { useEffect, useMemo, useState } from "preact/hooks";
import { admin, ApiError } from "./api";
import { LatencyChart } from "./chart";
import { clock, counted, duration, idle, optional } from "./format";
import type { Live } from "./live";
import { modelLink } from "./models";
import { Alert, Badge, Facts, Freshness, useFilter } from "./parts";
import { PlanCard } from "./placement";
import type { ActiveRequest, LoadTrace, PlanExplained, RequestTrace, Segment, Span } from "./types";
import { rows, type Stretch } from "./waterfall";
import { WhatIf } from "./whatif";

export function RequestsPage({ live }: { live: Live }) {
  const requests = useMemo(
    () => Object.entries(live.requests).sort(([, a], [, b]) => b.received - a.received),
    [live.requests],
  );
  const records = useMemo(() => requests.map(([, r]) => r), [requests]);
  const { shown, field, more } = useFilter(requests, ([id, r]) => `${id} ${r.model} ${r.status} ${r.cold ? "cold" : "warm"} ${r.endpoint}`);
  return (
    <>
      <h1>Requests</h1>
      <Freshness live={live} />
      <ActiveRequests live={live} />
      <h2>Finished</h2>
      {live.arrived.has("requests") && !requests.length && <p>No request has been traced yet.</p>}
      {records.length > 0 && <h3>Time to the first token, by the time of the request</h3>}
      {records.length > 0 && <LatencyChart requests={records} />}
      {field("Find a request")}
      <div class="scroll" tabIndex={0} role="region" aria-label="Table of requests">
        <table>
          <caption class="hidden">The latest requests</caption>
          <thead>
            <tr>
              {["Received", "Model", "Endpoint", "Status", "Start", "First token", "Duration", "Tokens", "Request"].map((title) => (
                <th key={title} scope="col">{title}</th>
              ))}
            </tr>
          </thead>
          <tbody>
            {shown.map(([id, r]) => (
              <tr key={id}>
                <td>{clock(r.received)}</td>
                <td>{r.model}</td>
                <td>{r.endpoint}</td>
                <td class={r.status >= 400 ? "failure" : ""} title={r.error ?? ""}>{r.status}</td>
                <td>{r.cold ? "cold" : "warm"}{r.moves ? `, moved ${r.moves}×` : ""}</td>
                <td class="number">{optional(r.ttft_ms)}</td>
                <td class="number">{duration(r.duration_ms)}</td>
                <td class="number">{r.completion_tokens}</td>
                <td><a href={`#/requests/${encodeURIComponent(id)}`}>{id.slice(0, 16)}…</a></td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {more("requests")}
    </>
  );
}

const ACTIVE = 100;

/** Seconds of the gateway's clock, once a second while `runs`. */
function useNow(ahead_s: number, runs: boolean): number {
  const [now, setNow] = useState(Date.now());
  useEffect(() => {
    if (!runs) return;
    const timer = window.setInterval(() => setNow(Date.now()), 1000);
    return () => window.clearInterval(timer);
  }, [runs]);
  return now / 1000 - ahead_s;
}

function where(r: ActiveRequest): string {
  if (r.state === "following") return "gets the response of the request with the same Idempotency-Key";
  if (!r.instance_id) return r.attempts ? "waits for another instance" : "waits for an instance";
  return `${r.state === "running" ? "" : "queued, "}${r.node} ${r.instance_id}`;
}

/** Requests that have not ended, of all gateways. */
function ActiveRequests({ live }: { live: Live }) {
  const active = useMemo(() => Object.entries(live.active).sort(([, a], [, b]) => a.received - b.received), [live.active]);
  const now = useNow(live.ahead_s, active.length > 0);
  const total = Object.values(live.gateways).reduce((sum, g) => sum + g.active, 0);
  return (
    <section aria-label="Running and waiting requests">
      <h2>Running and waiting</h2>
      {live.arrived.has("requests") && <p class="quiet">{counted(total, "request")} at {counted(Object.keys(live.gateways).length, "gateway")}{total > ACTIVE ? `; the oldest ${ACTIVE} are listed` : ""}</p>}
      {active.length > 0 && (
        <div class="scroll" tabIndex={0} role="region" aria-label="Table of running and waiting requests">
          <table>
            <caption class="hidden">Running and waiting requests</caption>
            <thead>
              <tr>
                {["Received", "Model", "Endpoint", "State", "Where", "For", "First token", "Tokens", "Request"].map((title) => <th key={title} scope="col">{title}</th>)}
              </tr>
            </thead>
            <tbody>
              {active.slice(0, ACTIVE).map(([id, r]) => (
                <tr key={id}>
                  <td>{clock(r.received)}</td>
                  <td><a href={modelLink(r.model)}>{r.model}</a></td>
                  <td>{r.endpoint}</td>
                  <td><Badge state={r.state} /></td>
                  <td>{where(r)}</td>
                  <td class="number">{idle(Math.max(0, Math.floor(now - r.received)))}</td>
                  <td class="number">{optional(r.ttft_ms)}</td>
                  <td class="number">{r.output_tokens || ""}</td>
                  <td><code>{id.slice(0, 16)}…</code></td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </section>
  );
}

interface Loaded {
  trace?: RequestTrace;
  load?: LoadTrace;
  plan?: PlanExplained;
  failure?: string;
}

/** A record that need not exist. */
async function perhaps<T>(path: string): Promise<T | undefined> {
  try {
    return await admin(path);
  } catch (error) {
    if (error instanceof ApiError && error.status === 404) return undefined;
    throw error;
  }
}

/** The id of a trace, as a link to Jaeger if the gateway knows where that is. */
function TraceId({ id, jaeger }: { id: string; jaeger?: string }) {
  return jaeger ? <a href={`${jaeger}/trace/${encodeURIComponent(id)}`} target="_blank" rel="noopener noreferrer"><code>{id}</code></a> : <code>{id}</code>;
}

export function RequestPage({ id, jaeger }: { id: string; jaeger?: string }) {
  const [found, setFound] = useState<Loaded>({});
  useEffect(() => {
    let current = true;
    const show = (more: Loaded) => current && setFound((before) => ({ ...before, ...more }));
    const load = async () => {
      const trace: RequestTrace = await admin(`traces/${encodeURIComponent(id)}`);
      show({ trace });
      if (trace.load_plan_id) show({ load: await perhaps<LoadTrace>(`traces/loads/${encodeURIComponent(trace.load_plan_id)}`) });
      show({ plan: await perhaps<PlanExplained>(`explain?request=${encodeURIComponent(id)}`) });
    };
    setFound({});
    load().catch((error: Error) => show({ failure: error.message }));
    return () => {
      current = false;
    };
  }, [id]);
  const { trace, load, plan, failure } = found;
  return (
    <>
      <p><a href="#/requests">All requests</a></p>
      <h1>Request</h1>
      <Alert text={failure} />
      {trace && (
        <section class="card" aria-label="Waterfall">
          <h2>
            {trace.model}: {trace.ttft_ms === null ? `no first token after ${duration(trace.duration_ms)}` : `first token after ${duration(trace.ttft_ms)}`}
            {trace.ttft_ms !== null && (trace.cold ? ", cold start" : ", warm")}
          </h2>
          {trace.error && <p class="failure">{trace.error}</p>}
          <Waterfall spans={trace.spans} critical={trace.critical_path} end={trace.ttft_ms ?? trace.duration_ms} name="Phases of the request" />
          <Facts
            items={[
              ["Request", <code>{trace.request_id}</code>],
              ["Trace", <TraceId id={trace.trace_id} jaeger={jaeger} />],
              ["Endpoint", trace.endpoint],
              ["Status", trace.status],
              ["Instance", trace.instance_id],
              ["Tokens", `${trace.prompt_tokens} prompt, ${trace.completion_tokens} output, in ${duration(trace.duration_ms)}`],
            ]}
          />
        </section>
      )}
      {load && (
        <section class="card" aria-label="Load">
          <h2>Load of {load.model} on {load.node}: {load.outcome} after {duration(load.duration_ms)}</h2>
          <Waterfall spans={load.spans} critical={load.critical_path} end={load.duration_ms} name="Phases of the load" />
        </section>
      )}
      {plan && <PlanCard found={plan} />}
      {trace && <WhatIf model={plan?.plan.model ?? trace.model} happened={plan?.plan} />}
    </>
  );
}

export function ExplainPage({ about }: { about: string }) {
  const [plan, setPlan] = useState<PlanExplained | null>(null);
  const [failure, setFailure] = useState("");
  useEffect(() => {
    setPlan(null);
    setFailure("");
    let current = true;
    admin(`explain?about=${encodeURIComponent(about)}`).then(
      (found: PlanExplained) => current && setPlan(found),
      (error: Error) => current && setFailure(error.message),
    );
    return () => {
      current = false;
    };
  }, [about]);
  return (
    <>
      <h1>Placement decision</h1>
      <Alert text={failure} />
      {plan && <PlanCard found={plan} />}
      {plan && <WhatIf model={plan.plan.model} happened={plan.plan} />}
    </>
  );
}

/** Solid: the request waited for it. Light: it overlapped with something else. */
export function Waterfall(props: { spans: Span[]; critical: Segment[]; end: number; name: string }) {
  const { spans, critical, end, name } = props;
  const lines = useMemo(() => rows(spans, critical, 0, end), [spans, critical, end]);
  const bar = (kind: string) => ([from, to]: Stretch, i: number) => {
    const [left, right] = [Math.max(0, from), Math.min(end, to)];
    const at = { left: `${(100 * left) / end}%`, width: `max(2px, ${(100 * (right - left)) / end}%)` };
    return <span key={`${kind}${i}`} class={kind} style={at} />;
  };
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label={name}>
      <table class="waterfall">
        <caption>{name}. Solid: waited for (the critical path). Light: overlapped by something else.</caption>
        <thead>
          <tr>
            {["Phase", "In", "Time", "Start ms", "ms", "Waited ms"].map((title) => <th key={title} scope="col">{title}</th>)}
          </tr>
        </thead>
        <tbody>
          {lines.map((row) => (
            <tr key={`${row.phase} ${row.process}`}>
              <th scope="row">{row.phase}</th>
              <td class="quiet">{row.process}</td>
              <td class="track">
                <div>{row.spans.map(bar("overlapped"))}{row.critical.map(bar("waited"))}</div>
              </td>
              <td class="number">{row.start.toFixed(0)}</td>
              <td class="number">{row.duration.toFixed(1)}</td>
              <td class="number">{row.waited > 0 ? row.waited.toFixed(1) : ""}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
