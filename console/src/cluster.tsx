// Nodes and devices with their memory by model, live.

import { useState } from "preact/hooks";
import { change, inPath } from "./api";
import { counted, idle, size } from "./format";
import type { Live } from "./live";
import { logLink } from "./logs";
import { Action, Badge, Facts, Freshness } from "./parts";
import type { Device, Instance, Node } from "./types";

interface Segment {
  key: string;
  kind: string;
  label: string;
  bytes: number;
  instance?: string;
}

const PARKED = new Set(["suspended", "asleep"]);
const GONE = new Set(["stopped", "failed"]);

/** The parts of a memory bar, by kind. */
const KINDS: Record<string, string> = {
  weights: "weights",
  kv: "KV cache in use",
  process: "other memory of the engine",
  rest: "reserved, not in use",
  parked: "left by suspended engines",
  executor: "executor",
  reusable: "reusable weights",
  free: "free",
};

/** Divide a device's budget among its instances, the executor, weights for reuse, and free memory. */
export function segments(device: Device, instances: [string, Instance][]): Segment[] {
  const found: Segment[] = [];
  for (const [id, i] of instances) {
    if (GONE.has(i.state) || !i.reserved_bytes) continue;
    const share = i.devices.length || 1;
    let left = i.reserved_bytes / share;
    const take = (kind: string, bytes: number) => {
      const part = Math.min(left, bytes / share);
      left -= part;
      if (part >= 1) found.push({ key: `${id} ${kind}`, kind, label: `${i.model}: ${KINDS[kind]}`, bytes: part, instance: id });
    };
    if (PARKED.has(i.state)) {
      take("parked", i.reserved_bytes);
      continue;
    }
    take("weights", i.weights_bytes);
    take("kv", i.kv_bytes);
    // A process's own memory is measured with its KV cache.
    take("process", Math.max(0, i.private_bytes - i.kv_bytes));
    take("rest", i.reserved_bytes);
  }
  if (device.executor_bytes) found.push({ key: "executor", kind: "executor", label: "executor", bytes: device.executor_bytes });
  const free = Math.max(0, device.budget_bytes - found.reduce((sum, s) => sum + s.bytes, 0));
  const reusable = Math.min(free, device.separate?.reusable_bytes ?? 0);
  if (reusable) found.push({ key: "reusable", kind: "reusable", label: "reusable weights", bytes: reusable });
  if (free - reusable >= 1) found.push({ key: "free", kind: "free", label: "free", bytes: free - reusable });
  return found;
}

type Selected = { kind: "node" | "instance"; id: string } | null;

export function ClusterPage({ live, mayChange }: { live: Live; mayChange: boolean }) {
  const [selected, select] = useState<Selected>(null);
  const nodes = Object.entries(live.nodes).sort(([a], [b]) => a.localeCompare(b));
  const waiting = Object.entries(live.models).filter(([, m]) => m.waiting || (m.error && m.state === "failed"));
  return (
    <>
      <h1>Cluster</h1>
      <Freshness live={live} />
      {live.arrived.has("cluster") && !nodes.length && <p>No node has reported yet. `thaw logs nodeagent` says why.</p>}
      <Totals live={live} />
      <ul class="legend" aria-label="Legend of the memory bars">
        {Object.entries(KINDS).map(([kind, label]) => (
          <li key={kind}><span class={`swatch seg-${kind}`} />{label}</li>
        ))}
      </ul>
      <div class="columns">
        <div>
          {nodes.map(([name, node]) => (
            <NodeCard key={name} name={name} node={node} live={live} selected={selected} select={select} />
          ))}
          {waiting.length > 0 && (
            <section class="card">
              <h2>Waiting or failed models</h2>
              <ul>
                {waiting.map(([name, m]) => (
                  <li key={name}>
                    <b>{name}</b> <Badge state={m.state} /> {m.waiting ? `${m.waiting} requests wait. ` : ""}
                    {m.error}
                  </li>
                ))}
              </ul>
            </section>
          )}
        </div>
        {selected && (
          <aside class="card" aria-label="Details">
            <button type="button" class="close" aria-label="Close the details" onClick={() => select(null)}>×</button>
            {selected.kind === "node" && live.nodes[selected.id] && (
              <NodeDetails name={selected.id} node={live.nodes[selected.id]!} live={live} mayChange={mayChange} />
            )}
            {selected.kind === "instance" &&
              (live.instances[selected.id] ? (
                <InstanceDetails id={selected.id} instance={live.instances[selected.id]!} live={live} mayChange={mayChange} />
              ) : (
                <p>This instance has ended.</p>
              ))}
          </aside>
        )}
      </div>
    </>
  );
}

function Totals({ live }: { live: Live }) {
  const devices = Object.values(live.devices);
  const instances = Object.values(live.instances);
  const sum = (values: number[]) => values.reduce((a, b) => a + b, 0);
  return (
    <p class="totals">
      {counted(Object.keys(live.models).length, "model")}, {counted(instances.filter((i) => i.state === "ready").length, "ready instance")} on{" "}
      {counted(devices.length, "device")}; {size(sum(devices.map((d) => d.reserved_bytes)))} of {size(sum(devices.map((d) => d.budget_bytes)))}{" "}
      reserved; requests: {sum(instances.map((i) => i.active))} running,{" "}
      {sum(Object.values(live.models).map((m) => m.waiting)) + sum(instances.map((i) => i.waiting))} waiting
    </p>
  );
}

interface CardProps {
  name: string;
  node: Node;
  live: Live;
  selected: Selected;
  select: (s: Selected) => void;
}

function NodeCard({ name, node, live, selected, select }: CardProps) {
  const devices = Object.entries(live.devices).filter(([, d]) => d.node === name);
  const instances = Object.entries(live.instances).filter(([, i]) => i.node === name);
  const parked = instances.filter(([, i]) => PARKED.has(i.state));
  const flows = node.links.filter((l) => l.loads || l.queued_bytes);
  return (
    <section class={`card node ${node.alive ? "" : "lost"}`} aria-label={`Node ${name}`}>
      <h2>
        <button type="button" class="link" onClick={() => select({ kind: "node", id: name })}>{name}</button>{" "}
        {!node.alive && <Badge state="lost" />} {node.cordoned && <Badge state="cordoned" />}{" "}
        {node.alive && !node.loader_alive && <Badge state="no loader" />}
      </h2>
      {devices.map(([id, device]) => (
        <DeviceBar
          key={id}
          device={device}
          instances={instances.filter(([, i]) => i.devices.includes(device.device_id))}
          selected={selected}
          select={select}
        />
      ))}
      {parked.length > 0 && (
        <p>
          Suspended:{" "}
          {parked.map(([id, i]) => (
            <button key={id} type="button" class="chip" onClick={() => select({ kind: "instance", id })}>
              {i.model} {i.snapshot_bytes ? size(i.snapshot_bytes) : ""}
            </button>
          ))}
        </p>
      )}
      {flows.map((l) => (
        <p key={l.link} class="quiet">
          {l.link}: {l.loads} loads, {size(l.queued_bytes)} queued
          {l.bytes_per_second ? `, ${size(l.bytes_per_second)}/s` : ""}
        </p>
      ))}
    </section>
  );
}

function DeviceBar(props: {
  device: Device;
  instances: [string, Instance][];
  selected: Selected;
  select: (s: Selected) => void;
}) {
  const { device, instances, selected, select } = props;
  const parts = segments(device, instances);
  const total = Math.max(1, device.budget_bytes, parts.reduce((sum, s) => sum + s.bytes, 0));
  const shown = instances.filter(([, i]) => !GONE.has(i.state) && !PARKED.has(i.state));
  return (
    <div class="device">
      <div class="device-head">
        <b>{device.device_id}</b> <span class="quiet">{device.name}</span>
        <span class="right">
          {size(device.reserved_bytes)} of {size(device.budget_bytes)} reserved, {size(device.used_bytes)} in use
        </span>
      </div>
      <div class="bar" role="img" aria-label={`Memory of ${device.device_id}: ${parts.map((s) => `${s.label} ${size(s.bytes)}`).join(", ")}`}>
        {parts.map((s) => (
          <span
            key={s.key}
            class={`seg seg-${s.kind} ${s.instance && selected?.id === s.instance ? "selected" : ""}`}
            style={{ width: `${(100 * s.bytes) / total}%` }}
            title={`${s.label}: ${size(s.bytes)}`}
            onClick={() => s.instance && select({ kind: "instance", id: s.instance })}
          />
        ))}
      </div>
      <div class="chips">
        {shown.map(([id, i]) => (
          <button key={id} type="button" class="chip" onClick={() => select({ kind: "instance", id })}>
            {i.model} <Badge state={i.state} />
            {i.phase && i.state !== "ready" ? ` ${i.phase} ${Math.round(100 * i.progress)}%` : ""}
            {i.active ? ` ${i.active} running` : ""}
          </button>
        ))}
      </div>
    </div>
  );
}

function NodeDetails({ name, node, live, mayChange }: { name: string; node: Node; live: Live; mayChange: boolean }) {
  const path = `nodes/${encodeURIComponent(name)}`;
  const count = Object.values(live.instances).filter((i) => i.node === name && !GONE.has(i.state)).length;
  return (
    <>
      <h2>Node {name}</h2>
      <Facts
        items={[
          ["State", node.alive ? "alive" : "lost"],
          ["New instances", node.cordoned ? "none: the node is cordoned" : "allowed"],
          ["Loader", node.loader_alive ? "alive" : "does not report"],
          ["Instances", count],
          ["Labels", Object.entries(node.labels).map(([k, v]) => `${k}=${v}`).join(", ")],
          ["Host memory for weights", size(node.dram_budget_bytes)],
          ["Disk cache", node.ssd_budget_bytes ? size(node.ssd_budget_bytes) : ""],
          ["Snapshots", `${size(node.snapshot_bytes)} of ${size(node.snapshot_budget_bytes)}`],
        ]}
      />
      {node.links.length > 0 && (
        <table>
          <caption>Links</caption>
          <thead><tr><th scope="col">Link</th><th scope="col">Bandwidth</th><th scope="col">Loads</th><th scope="col">Queued</th></tr></thead>
          <tbody>
            {node.links.map((l) => (
              <tr key={l.link}>
                <td>{l.link}</td>
                <td class="number">{l.bytes_per_second ? `${size(l.bytes_per_second)}/s` : ""}</td>
                <td class="number">{l.loads}</td>
                <td class="number">{size(l.queued_bytes)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
      {mayChange && (
        <p>
          {node.cordoned ? (
            <Action label="Uncordon" description={`Uncordon ${name}: allow new instances`} run={() => change(`${path}/uncordon`)} />
          ) : (
            <Action label="Cordon" description={`Cordon ${name}: no new instances`} run={() => change(`${path}/cordon`)} />
          )}
          <Action label="Drain" description={`Drain ${name}: cordon it and let every instance leave`} run={() => change(`${path}/drain`)} />
        </p>
      )}
    </>
  );
}

function InstanceDetails({ id, instance: i, live, mayChange }: { id: string; instance: Instance; live: Live; mayChange: boolean }) {
  const others = Object.keys(live.nodes).filter((n) => n !== i.node && live.nodes[n]!.alive);
  const [target, setTarget] = useState("");
  return (
    <>
      <h2>{i.model}</h2>
      <Facts
        items={[
          ["State", <><Badge state={i.state} /> {i.phase && i.state !== "ready" ? `${i.phase} ${Math.round(100 * i.progress)}%` : ""}</>],
          ["Instance", <code>{id}</code>],
          ["Place", `${i.node} ${i.devices.join(", ")}`],
          ["Engine", i.engine],
          ["Weights", size(i.weights_bytes)],
          ["Own memory", size(i.private_bytes)],
          ["KV cache", `${size(i.kv_bytes)} in use`],
          ["Reserved", size(i.reserved_bytes)],
          ["Requests", `${i.active} of ${i.capacity} running, ${i.waiting} waiting, ${i.completed} completed`],
          ["Tokens", i.tokens],
          ["Idle", i.idle_s === null ? "" : idle(i.idle_s)],
          ["Suspension", i.can_suspend ? "possible" : i.cannot_suspend],
          ["Adapters", i.adapters.join(", ")],
          ["Error", i.error],
          ["Placement", <a href={`#/explain/${encodeURIComponent(i.plan_id)}`}>Why it is there</a>],
          ["Log", mayChange ? <a href={logLink(i.node, `${id}.engine`)}>Log of its engine</a> : ""],
        ]}
      />
      {mayChange && (
        <p>
          <Action label="Sleep" description={`Put ${i.model} to sleep`} run={() => change(`models/${inPath(i.model)}/sleep`)} />
          <Action label="Wake" description={`Wake ${i.model}`} run={() => change(`models/${inPath(i.model)}/wake`)} />
        </p>
      )}
      {mayChange && i.state === "ready" && others.length > 0 && (
        <p>
          <label>
            Migrate to{" "}
            <select value={target} onChange={(event) => setTarget(event.currentTarget.value)}>
              <option value="">the scheduler's choice</option>
              {others.map((n) => <option key={n}>{n}</option>)}
            </select>
          </label>
          <Action
            label="Migrate"
            description={`Migrate the requests of ${i.model}`}
            run={() => change("migrations", { instance_id: id, node: target || null, wait: false })}
          />
        </p>
      )}
    </>
  );
}
