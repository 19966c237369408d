// What the scheduler would decide now for a changed cluster, as `thaw explain --what-if` asks it.

import { useRef, useState } from "preact/hooks";
import { admin, change } from "./api";
import { duration, optional, size, words } from "./format";
import { Alert } from "./parts";
import { CandidateTable, type Plan } from "./placement";
import type { PlanExplained } from "./types";

type Kind = "add_node" | "budget" | "drop_node";

interface Assumption {
  kind: Kind;
  node?: string;
  device?: string;
  devices?: number;
  nbytes?: number;
}

interface KnownNode {
  node: string;
  devices: { device_id: string; kind: string; budget_bytes: number }[];
}

const KINDS: [Kind, string][] = [
  ["add_node", "one more node"],
  ["budget", "another memory budget of a device"],
  ["drop_node", "one node less"],
];
const GIB = 2 ** 30;

/** GiB with as many digits as a budget of some megabytes needs. */
const inGib = (bytes: number): string => String(Number((bytes / GIB).toFixed(3)));

/** A name for a node that no node has. */
function unusedName(nodes: KnownNode[]): string {
  const taken = new Set(nodes.map((n) => n.node));
  for (let i = nodes.length; ; i++) if (!taken.has(`node-${i}`)) return `node-${i}`;
}

/** Ask what would be decided for a model, and show it beside what happened. */
export function WhatIf({ model, happened }: { model: string; happened?: Plan }) {
  const [nodes, setNodes] = useState<KnownNode[] | null>(null);
  const [kind, setKind] = useState<Kind>("add_node");
  const [name, setName] = useState("");
  const [devices, setDevices] = useState(1);
  const [device, setDevice] = useState("");
  const [gib, setGib] = useState("");
  const [added, setAdded] = useState<Assumption[]>([]);
  const [found, setFound] = useState<PlanExplained | null>(null);
  const [busy, setBusy] = useState(false);
  const [failure, setFailure] = useState("");

  const open = async (event: Event) => {
    if (!(event.currentTarget as HTMLDetailsElement).open || nodes) return;
    try {
      const cluster: { nodes: KnownNode[] } = await admin("cluster?brief=true");
      const first = cluster.nodes.find((n) => n.devices.length);
      setNodes(cluster.nodes);
      setName(unusedName(cluster.nodes));
      setDevices(first?.devices.length ?? 1);
      setDevice(first ? `${first.node}/${first.devices[0]!.device_id}` : "");
      setGib(inGib(first?.devices[0]!.budget_bytes ?? 0));
    } catch (error) {
      setFailure(error instanceof Error ? error.message : String(error));
    }
  };

  const all = (nodes ?? []).flatMap((n) => n.devices.map((d) => ({ ...d, node: n.node, id: `${n.node}/${d.device_id}` })));
  const chosen = all.find((d) => d.id === device);
  const nbytes = Math.round(Number(gib) * GIB);

  const choose = (next: Kind) => {
    setKind(next);
    // The name of a new node is no node that can be lost.
    setName(next === "drop_node" ? nodes?.[0]?.node ?? "" : unusedName(nodes ?? []));
    setGib(inGib((next === "budget" ? chosen : all[0])?.budget_bytes ?? 0));
  };
  const assumption = (): Assumption => {
    if (kind === "add_node") return { kind, node: name, devices, nbytes };
    if (kind === "drop_node") return { kind, node: name };
    return { kind, node: chosen?.node, device: chosen?.device_id, nbytes };
  };
  const form = useRef<HTMLFormElement>(null);
  const add = () => {
    if (form.current?.reportValidity()) setAdded([...added, assumption()]);
  };
  const submit = async (event: Event) => {
    event.preventDefault();
    setBusy(true);
    setFailure("");
    try {
      setFound(await change("explain", { model, what_if: [...added, assumption()] }));
    } catch (error) {
      setFound(null);
      setFailure(error instanceof Error ? error.message : String(error));
    } finally {
      setBusy(false);
    }
  };

  return (
    <details class="card" onToggle={open}>
      <summary>What if the cluster were different?</summary>
      <p class="quiet">
        The scheduler decides for the cluster as it is now, changed by the assumptions. It starts and stops nothing.
      </p>
      {added.length > 0 && (
        <ul aria-label="Assumptions">
          {added.map((a, i) => (
            <li key={i}>
              {describe(a)}{" "}
              <button type="button" onClick={() => setAdded(added.filter((_, j) => j !== i))} aria-label={`Remove: ${describe(a)}`}>
                Remove
              </button>
            </li>
          ))}
        </ul>
      )}
      {nodes && (
        <form class="row" onSubmit={submit} ref={form}>
          <label>
            {added.length ? "And suppose" : "Suppose"}{" "}
            <select value={kind} onChange={(event) => choose(event.currentTarget.value as Kind)}>
              {KINDS.map(([value, label]) => <option key={value} value={value}>{label}</option>)}
            </select>
          </label>
          {kind === "add_node" && (
            <>
              <label>Name of the node <input required maxLength={100} value={name} onInput={(event) => setName(event.currentTarget.value)} /></label>
              <label>Devices <input type="number" min={1} max={64} required value={devices} onInput={(event) => setDevices(Number(event.currentTarget.value))} /></label>
            </>
          )}
          {kind === "budget" && (
            <label>
              Device{" "}
              <select
                value={device}
                onChange={(event) => {
                  setDevice(event.currentTarget.value);
                  setGib(inGib(all.find((d) => d.id === event.currentTarget.value)?.budget_bytes ?? 0));
                }}
              >
                {all.map((d) => <option key={d.id} value={d.id}>{d.id}</option>)}
              </select>
            </label>
          )}
          {kind === "drop_node" && (
            <label>
              Node{" "}
              <select value={name} onChange={(event) => setName(event.currentTarget.value)}>
                {nodes.map((n) => <option key={n.node}>{n.node}</option>)}
              </select>
            </label>
          )}
          {kind !== "drop_node" && (
            <label>
              {kind === "budget" ? "Budget in GiB" : "GiB of each device"}{" "}
              <input type="number" min={0.001} step="any" required value={gib} onInput={(event) => setGib(event.currentTarget.value)} />
            </label>
          )}
          <button type="button" onClick={add}>Add another</button>
          <button type="submit" class="primary" disabled={busy}>Ask the scheduler</button>
          {kind === "budget" && chosen && <span class="quiet">now {size(chosen.budget_bytes)}</span>}
        </form>
      )}
      <Alert text={failure} />
      {found && <Answer found={found} happened={happened} />}
    </details>
  );
}

function describe(a: Assumption): string {
  if (a.kind === "drop_node") return `node ${a.node} is gone`;
  if (a.kind === "add_node") return `node ${a.node} with ${a.devices} devices of ${size(a.nbytes ?? 0)}`;
  return `${a.node}/${a.device} has a budget of ${size(a.nbytes ?? 0)}`;
}

function place(plan: Plan | undefined): string {
  return plan?.chosen ? `${plan.chosen.node} ${plan.chosen.device_ids.join(", ")}` : "no device";
}

function Answer({ found, happened }: { found: PlanExplained; happened?: Plan }) {
  const { plan } = found;
  const rows: [string, string, string][] = [
    ["Decision", happened ? words(happened.way) : "", found.runs_already ? "nothing starts: it runs already" : words(plan.way)],
    ["Device", happened ? place(happened) : "", place(plan)],
    ["Would leave", happened?.chosen?.victims.join(", ") ?? "", plan.chosen?.victims.join(", ") ?? ""],
    ["Predicted", optional(happened?.chosen?.predicted_ms), optional(plan.chosen?.predicted_ms)],
    ["Measured", happened && happened.measured_ms !== null ? `${happened.outcome} after ${duration(happened.measured_ms)}` : "", ""],
    ["Reason", happened?.reason ?? "", plan.reason],
  ];
  return (
    <section aria-label="Decision under the assumption" aria-live="polite">
      <h2>Supposing that {found.assumed.join(", and ")}</h2>
      <div class="scroll" tabIndex={0} role="region" aria-label="Comparison with what happened">
        <table>
          <caption>What happened, and what would be decided now for {plan.model}</caption>
          <thead>
            <tr><td /><th scope="col">What happened</th><th scope="col">What if</th></tr>
          </thead>
          <tbody>
            {rows.filter(([, before, after]) => before || after).map(([title, before, after]) => (
              <tr key={title}><th scope="row">{title}</th><td>{before}</td><td>{after}</td></tr>
            ))}
          </tbody>
        </table>
      </div>
      <CandidateTable plan={plan} name="Candidates under the assumption" />
      {found.others.map((other) => (
        <p key={other.plan_id}>Before it, {other.model} would start{other.chosen ? ` on ${other.chosen.node}` : ""}.</p>
      ))}
    </section>
  );
}
