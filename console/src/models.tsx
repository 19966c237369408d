// The catalogue with state, objectives and latencies of the latest requests.

import { useEffect, useMemo, useState } from "preact/hooks";
import { AddModel } from "./addmodel";
import { change, inPath } from "./api";
import { duration, optional, percentile, size, words } from "./format";
import { ChangeModel } from "./changemodel";
import type { Live } from "./live";
import { Action, Badge, Facts, Freshness, useFilter } from "./parts";
import { money } from "./money";
import { WAKEABLE } from "./memorybar";
import { ModelHistory } from "./objectives";
import { Pulls } from "./pulls";
import { ModelSettings } from "./settings";
import type { Model, RequestRecord } from "./types";
import { usage } from "./usage";

export interface Latency {
  cold: number[];
  warm: number[];
  phases: Record<string, number[]>;
}

/** Times to the first token of the latest requests by model, and their phases of cold starts. */
export function latencies(requests: RequestRecord[]): Map<string, Latency> {
  const found = new Map<string, Latency>();
  for (const r of requests) {
    if (r.ttft_ms === null) continue;
    let of = found.get(r.model);
    if (!of) found.set(r.model, (of = { cold: [], warm: [], phases: {} }));
    (r.cold ? of.cold : of.warm).push(r.ttft_ms);
    if (r.cold) for (const [phase, ms] of Object.entries(r.phases)) (of.phases[phase] ??= []).push(ms);
  }
  return found;
}

const COST_HOURS = 24;
const COST_REFRESH_MS = 60_000;

/** Costs of models in the last day, by name; null: the mesh has no prices. */
function useCosts(): Map<string, string> | null {
  const [costs, setCosts] = useState<Map<string, string> | null>(null);
  useEffect(() => {
    let current = true;
    const load = async () => {
      const { rows, currency } = await usage(COST_HOURS, "model");
      if (!current || currency === null) return;
      setCosts(new Map(rows.map((r) => [r.model ?? "", r.cost ? money(Number(r.cost.total), currency) : ""])));
    };
    // A ledger that does not answer leaves the column as it was; the page's live data say that it is away.
    const refresh = () => void load().catch(() => undefined);
    refresh();
    const timer = window.setInterval(refresh, COST_REFRESH_MS);
    return () => {
      current = false;
      window.clearInterval(timer);
    };
  }, []);
  return costs;
}

/** The address of a model's details. */
export const modelLink = (name: string): string => `#/models/${encodeURIComponent(name)}`;

export function ModelsPage({ live, mayChange, name: named }: { live: Live; mayChange: boolean; name?: string }) {
  const [selected, select] = useState<string | null>(named ?? null);
  useEffect(() => select(named ?? null), [named]);
  const all = useMemo(() => Object.entries(live.models).sort(([a], [b]) => a.localeCompare(b)), [live.models]);
  const costs = useCosts();
  const measured = useMemo(() => latencies(Object.values(live.requests)), [live.requests]);
  const { shown, field, more } = useFilter(all, ([name, m]) => `${name} ${m.aliases.join(" ")} ${m.state} ${m.engine}`);
  const chosen = selected === null ? undefined : live.models[selected];
  return (
    <>
      <h1>Models</h1>
      <Freshness live={live} />
      {live.arrived.has("cluster") && !all.length && <p>No model is registered{mayChange ? "." : <>. Add one: <code>thaw models add NAME SOURCE</code></>}</p>}
      {named && selected === named && !chosen && live.arrived.has("cluster") && <p class="notice">No model is called {named}.</p>}
      {mayChange && <AddModel live={live} />}
      {field("Find a model")}
      <div class="columns">
        <div class="scroll" tabIndex={0} role="region" aria-label="Table of models">
          <table>
            <caption class="hidden">Models</caption>
            <thead>
              <tr>
                {["Model", "State", "Engine", "Weights", "Waiting", "Objective met", "Cold p50", "Warm p50", "Warm p95", ...(costs ? [`Cost of ${COST_HOURS} h`] : [])].map((title) => (
                  <th key={title} scope="col">{title}</th>
                ))}
                <th scope="col">Actions</th>
              </tr>
            </thead>
            <tbody>
              {shown.map(([name, m]) => {
                const of = measured.get(name);
                return (
                  <tr key={name} class={name === selected ? "selected" : ""}>
                    <th scope="row">
                      <button type="button" class="link" onClick={() => select(name)}>{m.base ? `${m.base}:${name}` : name}</button>
                    </th>
                    <td><Badge state={m.state} /></td>
                    <td>{m.engine}</td>
                    <td class="number">{size(m.weights_bytes)}</td>
                    <td class="number">{m.waiting || ""}</td>
                    <td class="number">{m.objective ? `${m.objective.met} of ${m.objective.total}` : ""}</td>
                    <td class="number">{optional(percentile(of?.cold ?? [], 0.5))}</td>
                    <td class="number">{optional(percentile(of?.warm ?? [], 0.5))}</td>
                    <td class="number">{optional(percentile(of?.warm ?? [], 0.95))}</td>
                    {costs && <td class="number">{costs.get(name) ?? ""}</td>}
                    <td>
                      {mayChange && !m.base && (WAKEABLE.has(m.state) ? (
                        <Action label="Wake" description={`Wake ${name}`} run={() => change(`models/${inPath(name)}/wake`)} />
                      ) : (
                        <Action label="Sleep" description={`Put ${name} to sleep`} run={() => change(`models/${inPath(name)}/sleep`)} />
                      ))}
                      <Pulls name={name} model={m} live={live} mayChange={mayChange} />
                    </td>
                  </tr>
                );
              })}
            </tbody>
          </table>
          {more("models")}
          <p class="quiet">Percentiles are times to the first token among the latest {Object.keys(live.requests).length} requests of the mesh.</p>
        </div>
        {selected !== null && chosen && (
          <aside class="card" aria-label="Details">
            <button type="button" class="close" aria-label="Close the details" onClick={() => select(null)}>×</button>
            <ModelDetails name={selected} model={chosen} latency={measured.get(selected)} mayChange={mayChange} />
          </aside>
        )}
      </div>
      {selected !== null && chosen && <ModelHistory key={selected} name={selected} />}
    </>
  );
}

function ModelDetails({ name, model: m, latency, mayChange }: { name: string; model: Model; latency?: Latency; mayChange: boolean }) {
  const phases = Object.entries(latency?.phases ?? {}).sort(([, a], [, b]) => (percentile(b, 0.5) ?? 0) - (percentile(a, 0.5) ?? 0));
  return (
    <>
      <h2>{name}</h2>
      <Facts
        items={[
          ["State", <Badge state={m.state} />],
          ["Source", <code>{m.source}</code>],
          ["Task", m.task],
          ["Aliases", m.aliases.join(", ")],
          ["Adapter of", m.base],
          ["Context", `${m.context_length} tokens`],
          ["Parked ahead", m.park ? `${m.park.state} ${m.park.reason}` : ""],
          ["Objective", m.objective && `${m.objective.met} of ${m.objective.total} requests of the last day met it (${Math.round(100 * m.objective.percentile)}% wanted)`],
          ["Last decision", m.plan && (
            <a href={`#/explain/${encodeURIComponent(m.plan.plan_id)}`}>
              {words(m.plan.way)} on {m.plan.node ?? "no node"}: {m.plan.outcome}
            </a>
          )],
          ["It took", m.plan && m.plan.measured_ms !== null ? `${duration(m.plan.measured_ms)} (predicted ${optional(m.plan.predicted_ms)})` : ""],
          ["Error", m.error],
        ]}
      />
      {phases.length > 0 && (
        <table>
          <caption>Cold starts among the latest requests, by phase of the critical path</caption>
          <thead><tr><th scope="col">Phase</th><th scope="col">p50</th><th scope="col">p95</th></tr></thead>
          <tbody>
            {phases.map(([phase, values]) => (
              <tr key={phase}>
                <th scope="row">{phase}</th>
                <td class="number">{optional(percentile(values, 0.5))}</td>
                <td class="number">{optional(percentile(values, 0.95))}</td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
      <ModelSettings key={name} name={name} />
      {mayChange && <ChangeModel key={`change ${name}`} name={name} />}
    </>
  );
}
