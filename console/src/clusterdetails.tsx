// What a selected part of the cluster is, and what can be done with it.

import { useState } from "preact/hooks";
import { change, inPath, patch, remove } from "./api";
import { counted, duration, idle, size } from "./format";
import { ends, Flow } from "./flows";
import type { Live } from "./live";
import { logLink } from "./logs";
import { GONE, KINDS, PARKED, sharedBytes, WAKEABLE, type Kind } from "./memorybar";
import { modelLink } from "./models";
import { Action, Badge, Facts, Prose } from "./parts";
import type { Device, Instance, Link, Model, Node } from "./types";

export type Selected =
  | { kind: "node"; id: string }
  | { kind: "device"; id: string; part?: Kind }
  | { kind: "instance"; id: string; part?: Kind }
  | { kind: "link"; id: string; link: string }
  | { kind: "model"; id: string }
  | null;

interface Panel {
  live: Live;
  mayChange: boolean;
  select: (s: Selected) => void;
}

export const isSame = (a: Selected, b: Selected): boolean => JSON.stringify(a) === JSON.stringify(b);

/** Where the memory of a suspended engine is. */
export function stateOf(i: Instance): string {
  // Snapshots by "cpu" are in swap; the others begin in host memory, and `snapshot_bytes` is what is left there.
  const host = i.suspended_by === "cpu" ? 0 : i.snapshot_bytes;
  const parts = [host ? `${size(host)} in host memory` : "", i.swap_bytes ? `${size(i.swap_bytes)} in swap` : ""];
  return parts.filter(Boolean).join(", ");
}

export function Details({ selected, ...panel }: { selected: NonNullable<Selected> } & Panel) {
  const { live } = panel;
  if (selected.kind === "instance") {
    const found = live.instances[selected.id];
    return found ? <InstanceDetails id={selected.id} instance={found} part={selected.part} {...panel} /> : <p>This instance has ended.</p>;
  }
  if (selected.kind === "device") {
    const found = live.devices[selected.id];
    return found ? <DeviceDetails id={selected.id} device={found} part={selected.part} {...panel} /> : <p>This device is gone.</p>;
  }
  if (selected.kind === "model") {
    const found = live.models[selected.id];
    return found ? <ModelSummary name={selected.id} model={found} {...panel} /> : <p>This model was removed.</p>;
  }
  const node = live.nodes[selected.id];
  if (!node) return <p>This node is gone.</p>;
  if (selected.kind === "link") return <LinkDetails name={selected.id} node={node} link={selected.link} {...panel} />;
  return <NodeDetails name={selected.id} node={node} {...panel} />;
}

function About({ part }: { part?: Kind }) {
  return part ? <p class="notice"><b>{KINDS[part].name}</b>: {KINDS[part].about}</p> : null;
}

const used = (bytes: number, budget: number) => (budget ? `${size(bytes)} of ${size(budget)}` : "");

function NodeDetails({ name, node, live, mayChange, select }: { name: string; node: Node } & Panel) {
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
          ["Weights cached in host memory", used(node.dram_bytes, node.dram_budget_bytes)],
          ["Weights cached on disk", used(node.ssd_bytes, node.ssd_budget_bytes)],
          ["Snapshots", used(node.snapshot_bytes, node.snapshot_budget_bytes)],
        ]}
      />
      {node.links.length > 0 && (
        <table>
          <caption>Links</caption>
          <thead><tr><th scope="col">Link</th><th scope="col">Bandwidth</th><th scope="col">Loads</th><th scope="col">Queued</th></tr></thead>
          <tbody>
            {node.links.map((l) => (
              <tr key={l.link}>
                <td><button type="button" class="link" onClick={() => select({ kind: "link", id: name, link: l.link })}>{l.link}</button></td>
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
          {node.alive ? (
            <Action label="Drain" description={`Drain ${name}: cordon it and let every instance leave`} run={() => change(`${path}/drain`)} />
          ) : (
            <Action label="Remove" description={`Remove ${name}: its machine is gone for good`} run={() => remove(path)} />
          )}
        </p>
      )}
    </>
  );
}

function bandwidth(link: Link): string {
  if (!link.bytes_per_second) return "not measured yet";
  return `${size(link.bytes_per_second)}/s, ${link.is_paced ? "paced: a setting, not the machine's" : "as measured by the latest loads"}`;
}

function LinkDetails({ name, node, link, live, mayChange }: { name: string; node: Node; link: string } & Panel) {
  const found = node.links.find((l) => l.link === link);
  const { kind, from, to } = ends(name, link);
  const loads = node.loads.filter((load) => found?.models.includes(load.model));
  const pulls = Object.entries(live.pulls).filter(([, p]) => p.node === name && found?.models.includes(p.model));
  return (
    <>
      <h2>Link {link}</h2>
      {!found && <p>The loader does not report this link now.</p>}
      <Facts
        items={[
          ["What it is", kind],
          ["From", from],
          ["To", to],
          ["Bandwidth", found && bandwidth(found)],
          ["Moved", found && `${size(found.moved_bytes)} since the loader's start`],
          ["Queued", found && `${size(found.queued_bytes)} of ${counted(found.loads, "load")}`],
          ["Done in", found?.finish_ms ? duration(found.finish_ms) : ""],
          ["Models", found?.models.map((m, i) => <>{i > 0 && ", "}<a href={modelLink(m)}>{m}</a></>)],
        ]}
      />
      {loads.map((load) => <Flow key={load.model} name={name} load={load} node={node} live={live} />)}
      {mayChange && pulls.map(([key, p]) => (
        <Action
          key={key}
          label="Cancel the download"
          description={`Cancel the download of ${p.model} to ${p.node}`}
          run={() => remove(`models/${inPath(p.model)}/pull?node=${encodeURIComponent(p.node)}&tier=${p.tier}`)}
        />
      ))}
      {!found?.loads && <p class="quiet">Nothing flows now. A start or a download of a model uses the link.</p>}
    </>
  );
}

function DeviceDetails({ id, device: d, part, live, select }: { id: string; device: Device; part?: Kind } & Panel) {
  const there = Object.entries(live.instances).filter(([, i]) => i.node === d.node && i.devices.includes(d.device_id) && !GONE.has(i.state));
  return (
    <>
      <h2>Device {d.device_id}</h2>
      <About part={part} />
      <Facts
        items={[
          ["Node", <button type="button" class="link" onClick={() => select({ kind: "node", id: d.node })}>{d.node}</button>],
          ["Kind", `${d.kind} ${d.name}`],
          ["Memory", d.memory === "separate" ? "separate: weights are copied there, and stay for reuse" : d.memory],
          ["Budget", size(d.budget_bytes)],
          ["Reserved", size(d.reserved_bytes)],
          ["In use", `${size(d.used_bytes)}, as measured`],
          ["Executor", d.executor_bytes ? size(d.executor_bytes) : ""],
          ["Weights that run", d.separate ? size(d.separate.mapped_bytes) : ""],
          ["Shared by models", d.separate ? size(sharedBytes(d)) : ""],
          ["Reusable weights", d.separate ? size(d.separate.reusable_bytes) : ""],
          ["KV caches", d.separate?.lent_bytes ? size(d.separate.lent_bytes) : ""],
        ]}
      />
      {d.separate && d.separate.models.length > 0 && (
        <table>
          <caption>Weights on {id} by model; shared: another model has them too</caption>
          <thead><tr>{["Model", "Running", "Reusable", "Shared"].map((title) => <th key={title} scope="col">{title}</th>)}</tr></thead>
          <tbody>
            {d.separate.models.map((m) => (
              <tr key={m.model}>
                <th scope="row"><a href={modelLink(m.model)}>{m.model}</a></th>
                <td class="number">{size(m.mapped_bytes)}</td>
                <td class="number">{size(m.reusable_bytes)}</td>
                <td class="number">{size(m.shared_bytes)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
      <p>
        {there.length ? "Select an instance to put it to sleep, migrate or pin it: " : "No instance is there. "}
        {there.map(([key, i]) => (
          <button key={key} type="button" class="chip" onClick={() => select({ kind: "instance", id: key })}>{i.model} {i.state}</button>
        ))}
      </p>
      <p class="quiet">To empty the device, drain its node.</p>
    </>
  );
}

function ModelSummary({ name, model: m, mayChange }: { name: string; model: Model } & Panel) {
  return (
    <>
      <h2><a href={modelLink(name)}>{name}</a></h2>
      <Facts
        items={[
          ["State", <Badge state={m.state} />],
          ["Waiting", m.waiting ? counted(m.waiting, "request") : ""],
          ["Error", m.error],
          ["Weights", size(m.weights_bytes)],
          ["Source", <code>{m.source}</code>],
          ["Placement", <a href={`#/explain/${encodeURIComponent(m.plan?.plan_id ?? name)}`}>The last decision</a>],
        ]}
      />
      {mayChange && !m.base && <p><ModelActions name={name} model={m} /></p>}
    </>
  );
}

function ModelActions({ name, model }: { name: string; model?: Model }) {
  const pin = (on: boolean) => () => patch(`models/${inPath(name)}/settings`, { settings: { pin: on } });
  return (
    <>
      {model && WAKEABLE.has(model.state) ? (
        <Action label="Wake" description={`Wake ${name}`} run={() => change(`models/${inPath(name)}/wake`)} />
      ) : (
        <Action label="Sleep" description={`Put ${name} to sleep`} run={() => change(`models/${inPath(name)}/sleep`)} />
      )}
      {model && !model.base && (model.pin ? (
        <Action label="Unpin" description={`Unpin ${name}: it may be evicted`} run={pin(false)} />
      ) : (
        <Action label="Pin" description={`Pin ${name}: never evict it`} run={pin(true)} />
      ))}
    </>
  );
}

function InstanceDetails(props: { id: string; instance: Instance; part?: Kind } & Panel) {
  const { id, instance: i, part, live, mayChange } = props;
  const others = Object.keys(live.nodes).filter((n) => n !== i.node && live.nodes[n]!.alive);
  const [target, setTarget] = useState("");
  return (
    <>
      <h2><a href={modelLink(i.model)}>{i.model}</a></h2>
      <About part={part} />
      <Facts
        items={[
          ["State", <><Badge state={i.state} /> {i.phase && i.state !== "ready" ? `${i.phase} ${Math.round(100 * i.progress)}%` : ""}</>],
          ["Pinned", live.models[i.model]?.pin ? "yes: it is never evicted" : "no"],
          ["Instance", <code>{id}</code>],
          ["Place", `${i.node} ${i.devices.join(", ")}`],
          ["Engine", i.engine],
          ["Weights", size(i.weights_bytes)],
          ["Own memory", size(i.private_bytes)],
          ["KV cache", `${size(i.kv_bytes)} in use`],
          ["Reserved", size(i.reserved_bytes)],
          ["Suspended", PARKED.has(i.state) ? stateOf(i) || "no snapshot: its weights are read again" : ""],
          ["Requests", `${i.active} of ${i.capacity} running, ${i.waiting} waiting, ${i.completed} completed`],
          ["Tokens", i.tokens],
          ["Idle", i.idle_s === null ? "" : idle(i.idle_s)],
          ["Suspension", i.can_suspend ? "possible" : i.cannot_suspend && <Prose text={i.cannot_suspend} />],
          ["Adapters", i.adapters.join(", ")],
          ["Error", i.error],
          ["Placement", <a href={`#/explain/${encodeURIComponent(i.plan_id)}`}>Why it is there</a>],
          ["Log", mayChange ? <a href={logLink(i.node, `${id}.engine`)}>Log of its engine</a> : ""],
        ]}
      />
      {mayChange && <p><ModelActions name={i.model} model={live.models[i.model]} /></p>}
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
