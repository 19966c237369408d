// Links of a node, and the weights that flow over them.

import { duration, size } from "./format";
import type { Live } from "./live";
import type { Link, Load, Node } from "./types";

/** What a link is, and between what it is. */
export function ends(node: string, link: string): { kind: string; from: string; to: string } {
  const [kind = "", ...rest] = link.split(":");
  const name = rest.join(":");
  const memory = `the memory of ${node}`;
  if (kind === "ssd") return { kind: "disk", from: `disk ${name} of ${node}`, to: memory };
  if (kind === "remote") return { kind: "remote source", from: name, to: memory };
  if (kind === "peer") return { kind: "another node", from: `node ${name}`, to: memory };
  if (kind === "bus") return { kind: "bus of a device", from: memory, to: `device ${name}` };
  const [source = "", target = ""] = name.split(">");
  if (kind === "p2p") return { kind: "from one device to another", from: `device ${source}`, to: `device ${target}` };
  return { kind, from: name, to: node };
}

export const isBusy = (link: Link): boolean => link.loads > 0 || link.queued_bytes > 0;

/** The rate of a load: that of the links that it is on, as they were measured. */
function rate(load: Load, links: Link[]): number {
  const used = links.filter((l) => l.models.includes(load.model) && !l.link.startsWith("bus:") && !l.link.startsWith("p2p:"));
  return used.reduce((sum, l) => sum + (l.bytes_per_second ?? 0), 0);
}

/** Loads in progress and links in use; a link can be selected. */
export function Flows(props: { name: string; node: Node; live: Live; select: (link: string) => void }) {
  const { name, node, live, select } = props;
  const busy = node.links.filter(isBusy);
  return (
    <>
      {node.loads.map((load) => <Flow key={load.model} name={name} load={load} node={node} live={live} />)}
      {busy.map((l) => (
        <p key={l.link} class="flow">
          <button type="button" class="link" onClick={() => select(l.link)}>{l.link}</button>{" "}
          {l.models.join(", ") || `${l.loads} loads`}: {size(l.queued_bytes)} queued
          {l.bytes_per_second ? `, ${size(l.bytes_per_second)}/s${l.is_paced ? " (paced)" : ""}` : ""}
          {l.finish_ms ? `, ${duration(l.finish_ms)} left` : ""}
        </p>
      ))}
    </>
  );
}

/** One model's weights: from which source to which devices, bytes so far, and rate. */
export function Flow({ name, load, node, live }: { name: string; load: Load; node: Node; live: Live }) {
  const over = node.links.filter((l) => l.models.includes(load.model)).map((l) => l.link);
  const speed = rate(load, node.links);
  const devices = Object.entries(load.on_devices);
  return (
    <p class="flow" aria-label={`Load of ${load.model} on ${name}`} role="group">
      <b>{load.model}</b> from {live.models[load.model]?.source ?? "its source"} to the memory of {name}
      {over.length > 0 && <> over {over.join(", ")}</>}: {size(load.loaded_bytes)}
      {load.total_bytes ? ` of ${size(load.total_bytes)} ` : " "}
      {load.total_bytes > 0 && <meter min={0} max={load.total_bytes} value={load.loaded_bytes} aria-label={`Loaded of ${load.model}`} />}
      {load.fetched_bytes > 0 && ` ${size(load.fetched_bytes)} received`}
      {speed > 0 && ` ${size(speed)}/s`}
      {devices.map(([device, bytes]) => ` ${size(bytes)} on ${device}`).join(",")}
    </p>
  );
}
