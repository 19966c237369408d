// Nodes and devices with their memory by model, live. Each part can be selected.

import { useMemo, useState } from "preact/hooks";
import { Details, isSame, stateOf, type Selected } from "./clusterdetails";
import { counted, size } from "./format";
import { Flows } from "./flows";
import type { Live } from "./live";
import { divide, GONE, KINDS, MemoryBar, PARKED, type Part } from "./memorybar";
import { Badge, Freshness, Prose, useFilter } from "./parts";
import type { Device, Instance, Node } from "./types";

/** Nodes that are drawn at once; the filter and a button show others. */
const NODES = 25;

interface Select {
  selected: Selected;
  select: (s: Selected) => void;
}

/** A node with what is on it. */
interface Place {
  name: string;
  node: Node;
  devices: [string, Device][];
  instances: [string, Instance][];
}

function places(live: Live): Place[] {
  const found = new Map<string, Place>();
  for (const [name, node] of Object.entries(live.nodes)) found.set(name, { name, node, devices: [], instances: [] });
  for (const entry of Object.entries(live.devices)) found.get(entry[1].node)?.devices.push(entry);
  for (const entry of Object.entries(live.instances)) found.get(entry[1].node)?.instances.push(entry);
  return [...found.values()].sort((a, b) => a.name.localeCompare(b.name, undefined, { numeric: true }));
}

/** What the filter finds: a node by its name, state, labels, devices and models. */
function searched({ name, node, devices, instances }: Place): string {
  const state = [node.alive ? "" : "lost", node.cordoned ? "cordoned" : ""];
  const labels = Object.entries(node.labels).map(([k, v]) => `${k}=${v}`);
  return [name, ...state, ...labels, ...devices.map(([, d]) => d.name), ...instances.map(([, i]) => `${i.model} ${i.state}`)].join(" ");
}

export function ClusterPage({ live, mayChange }: { live: Live; mayChange: boolean }) {
  const [selected, select] = useState<Selected>(null);
  const nodes = useMemo(() => places(live), [live.nodes, live.devices, live.instances]);
  const { shown, field, more } = useFilter(nodes, searched, NODES);
  const waiting = Object.entries(live.models).filter(([, m]) => m.waiting || (m.error && m.state === "failed"));
  return (
    <>
      <h1>Cluster</h1>
      <Freshness live={live} />
      {live.arrived.has("cluster") && !nodes.length && <p>No node has reported yet. <code>thaw logs nodeagent</code> says why.</p>}
      <Totals live={live} />
      <ul class="legend" aria-label="Legend of the memory bars">
        {Object.entries(KINDS).map(([kind, { name, about }]) => (
          <li key={kind} title={about}><span class={`swatch seg-${kind}`} />{name}</li>
        ))}
      </ul>
      {nodes.length > 1 && field("Find a node, or the nodes with a model")}
      <div class="columns">
        <div>
          {shown.map((place) => <NodeCard key={place.name} place={place} live={live} selected={selected} select={select} />)}
          {more("nodes")}
          {waiting.length > 0 && (
            <section class="card" aria-label="Waiting or failed models">
              <h2>Waiting or failed models</h2>
              <ul>
                {waiting.slice(0, 100).map(([name, m]) => (
                  <li key={name}>
                    <button type="button" class="link" onClick={() => select({ kind: "model", id: name })}>{name}</button>{" "}
                    <Badge state={m.state} /> {m.waiting ? `${counted(m.waiting, "request")} waiting. ` : ""}
                    {m.error && <Prose text={m.error} />}
                  </li>
                ))}
              </ul>
              {waiting.length > 100 && <p>The first 100 of {waiting.length}. <a href="#/models">See the catalogue</a></p>}
            </section>
          )}
        </div>
        {selected && (
          <aside class="card" aria-label="Details">
            <button type="button" class="close" aria-label="Close the details" onClick={() => select(null)}>×</button>
            <Details selected={selected} select={select} live={live} mayChange={mayChange} />
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

function NodeCard({ place, live, selected, select }: { place: Place; live: Live } & Select) {
  const { name, node, devices, instances } = place;
  const parked = instances.filter(([, i]) => PARKED.has(i.state));
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
          id={id}
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
              {i.model} {stateOf(i)}
            </button>
          ))}
        </p>
      )}
      <Flows name={name} node={node} live={live} select={(link) => select({ kind: "link", id: name, link })} />
    </section>
  );
}

function DeviceBar(props: { id: string; device: Device; instances: [string, Instance][] } & Select) {
  const { id, device, instances, selected, select } = props;
  const parts = divide(device, instances);
  const shown = instances.filter(([, i]) => !GONE.has(i.state) && !PARKED.has(i.state));
  const chosen = (part: Part): Selected =>
    part.instance ? { kind: "instance", id: part.instance, part: part.kind } : { kind: "device", id, part: part.kind };
  return (
    <div class="device">
      <div class="device-head">
        <button type="button" class="link" aria-label={`Device ${device.device_id}`} onClick={() => select({ kind: "device", id })}>{device.device_id}</button>{" "}
        <span class="quiet">{device.name}</span>
        <span class="right">
          {size(device.reserved_bytes)} of {size(device.budget_bytes)} reserved, {size(device.used_bytes)} in use
        </span>
      </div>
      <MemoryBar device={device} parts={parts} isSelected={(part) => isSame(chosen(part), selected)} select={(part) => select(chosen(part))} />
      <div class="chips">
        {shown.map(([key, i]) => (
          <button key={key} type="button" class="chip" onClick={() => select({ kind: "instance", id: key })}>
            {i.model} <Badge state={i.state} />
            {i.phase && i.state !== "ready" ? ` ${i.phase} ${Math.round(100 * i.progress)}%` : ""}
            {i.active ? ` ${i.active} running` : ""}
          </button>
        ))}
      </div>
    </div>
  );
}
