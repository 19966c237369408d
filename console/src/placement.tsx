// A placement decision with its candidates, as `thaw explain` shows it.

import { duration, optional, size, words } from "./format";
import { Facts } from "./parts";
import type { Candidate, PlanExplained } from "./types";

export type Plan = PlanExplained["plan"];

function sameAs(a: Candidate, b: Candidate | null): boolean {
  return b !== null && a.node === b.node && a.ready_by === b.ready_by && a.device_ids.join() === b.device_ids.join();
}

function longestPhases(predicted: Record<string, number>): string {
  const longest = Object.entries(predicted).filter(([, ms]) => ms >= 1).sort(([, a], [, b]) => b - a);
  return longest.slice(0, 5).map(([phase, ms]) => `${phase} ${duration(ms)}`).join(", ");
}

export function PlanCard({ found }: { found: PlanExplained }) {
  const { plan } = found;
  return (
    <section class="card" aria-label="Placement decision">
      <h2>Why {plan.model} was placed there: {words(plan.way)}</h2>
      {plan.reason && <p>{plan.reason}</p>}
      <Facts
        items={[
          ["Plan", <code>{plan.plan_id}</code>],
          ["Asked by", plan.trigger],
          ["Outcome", `${plan.outcome}${plan.measured_ms === null ? "" : ` after ${duration(plan.measured_ms)}`}`],
          ["Predicted", optional(plan.chosen?.predicted_ms)],
          ["Error", plan.error?.message],
        ]}
      />
      <CandidateTable plan={plan} name="Candidates" />
    </section>
  );
}

/** The devices that a decision considered, as `thaw explain` lists them. */
export function CandidateTable({ plan, name }: { plan: Plan; name: string }) {
  if (!plan.candidates.length) return null;
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label={name}>
      <table>
        <caption>{name}</caption>
        <thead>
          <tr>
            {["Chosen", "Node", "Device", "Way", "From", "Predicted", "By phase", "Needs", "Free", "Would leave", "Not taken because"].map((title) => (
              <th key={title} scope="col">{title}</th>
            ))}
          </tr>
        </thead>
        <tbody>
          {plan.candidates.map((c, i) => (
            <tr key={i} class={sameAs(c, plan.chosen) ? "selected" : ""}>
              <td>{sameAs(c, plan.chosen) ? "✓ chosen" : ""}</td>
              <td class="name">{c.node}</td>
              <td>{c.device_ids.join(", ")}</td>
              <td>{words(c.way)}</td>
              <td>{c.source}</td>
              <td class="number">{optional(c.predicted_ms)}</td>
              <td class="text">{longestPhases(c.predicted)}</td>
              <td class="number">{size(c.needed_bytes)}</td>
              <td class="number">{size(c.free_bytes)}</td>
              <td>{c.victims.join(", ")}</td>
              <td class={c.excluded ? "text" : ""}>{c.excluded}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
