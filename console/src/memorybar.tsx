// The memory of a device as a bar; each of its parts can be selected, also with the keyboard.

import { useState } from "preact/hooks";
import { size } from "./format";
import type { Device, Instance } from "./types";

export interface Part {
  key: string;
  kind: Kind;
  label: string;
  bytes: number;
  /** The instance that has it; undefined: it is the device's. */
  instance?: string;
}

export const PARKED = new Set(["suspended", "asleep"]);
/** States of a model that `wake` changes. */
export const WAKEABLE = new Set(["cold", "suspended", "asleep", "failed"]);
export const GONE = new Set(["stopped", "failed"]);

/** The parts of a memory bar: the name of a kind, and what it is. */
export const KINDS = {
  weights: { name: "weights", about: "Weights of one model. They leave the device when its instance sleeps or ends." },
  shared: { name: "shared weights", about: "Weights that several models or instances have. They are in memory once, and stay until the last one leaves." },
  kv: { name: "KV cache in use", about: "Keys and values of the sequences that the instance has now. They grow with each token and are freed with the sequences." },
  process: { name: "other memory of the engine", about: "The engine's process: libraries, compiled code and buffers." },
  rest: { name: "reserved, not in use", about: "Booked for the instance, as room for its KV cache and buffers. Other instances cannot have it." },
  waiting: { name: "waits for memory", about: "An instance that starts when other instances have given back so much." },
  parked: { name: "left by suspended engines", about: "Memory that a suspended engine keeps on the device. The rest of it is in host memory or swap." },
  executor: { name: "executor", about: "The engine process of the device that hosts several models (isolation: shared)." },
  reusable: { name: "reusable weights", about: "Weights of models that do not run. The next load of such a model copies less; memory for another model replaces them." },
  free: { name: "free", about: "Not reserved. The scheduler places instances here." },
} as const;
export type Kind = keyof typeof KINDS;

/** Bytes of weights on a separate device that several of its models map; each unit counts once. */
export function sharedBytes(device: Device): number {
  if (!device.separate) return 0;
  const own = device.separate.models.reduce((sum, m) => sum + Math.max(0, m.mapped_bytes - m.shared_bytes), 0);
  const shares = device.separate.models.some((m) => m.mapped_bytes && m.shared_bytes);
  return shares ? Math.max(0, device.separate.mapped_bytes - own) : 0;
}

/** Divide a device's budget among its instances, the executor, weights for reuse, and free memory. */
export function divide(device: Device, instances: [string, Instance][]): Part[] {
  const found: Part[] = [];
  const revisions = new Map<string, number>();
  for (const [, i] of instances) if (i.revision && !GONE.has(i.state)) revisions.set(i.revision, (revisions.get(i.revision) ?? 0) + 1);
  const shared = sharedBytes(device);
  for (const [id, i] of instances) {
    if (GONE.has(i.state) || !i.reserved_bytes) continue;
    const share = i.devices.length || 1;
    let left = i.reserved_bytes / share;
    const take = (kind: Kind, bytes: number) => {
      const part = Math.min(left, bytes / share);
      left -= part;
      if (part >= 1) found.push({ key: `${id} ${kind}`, kind, label: `${i.model}: ${KINDS[kind].name}`, bytes: part, instance: id });
    };
    if (PARKED.has(i.state)) {
      take("parked", i.reserved_bytes);
      continue;
    }
    if (i.phase === "reserve" && i.state === "preparing") {
      take("waiting", i.reserved_bytes);
      continue;
    }
    if (shared) {
      // They are drawn once for the device, below.
      const common = device.separate!.models.find((m) => m.model === i.model)?.shared_bytes ?? 0;
      left = Math.max(0, left - Math.min(common, i.weights_bytes / share));
      take("weights", Math.max(0, i.weights_bytes - common * share));
    } else {
      take((revisions.get(i.revision) ?? 0) > 1 ? "shared" : "weights", i.weights_bytes);
    }
    take("kv", i.kv_bytes);
    // A process's own memory is measured with its KV cache.
    take("process", Math.max(0, i.private_bytes - i.kv_bytes));
    take("rest", i.reserved_bytes);
  }
  const ofDevice = (kind: Kind, bytes: number) => {
    if (bytes >= 1) found.push({ key: kind, kind, label: KINDS[kind].name, bytes });
  };
  ofDevice("shared", shared);
  ofDevice("executor", device.executor_bytes);
  const free = Math.max(0, device.budget_bytes - found.reduce((sum, s) => sum + s.bytes, 0));
  const reusable = Math.min(free, device.separate?.reusable_bytes ?? 0);
  ofDevice("reusable", reusable);
  ofDevice("free", free - reusable);
  return found;
}

/** Tab reaches a bar; the arrow keys, Home and End go to its other parts. */
export function MemoryBar(props: { device: Device; parts: Part[]; isSelected: (part: Part) => boolean; select: (part: Part) => void }) {
  const { device, parts, isSelected, select } = props;
  const [current, setCurrent] = useState("");
  const reachable = parts.some((p) => p.key === current) ? current : parts[0]?.key;
  const total = Math.max(1, device.budget_bytes, parts.reduce((sum, p) => sum + p.bytes, 0));
  const move = (event: KeyboardEvent) => {
    const buttons = [...(event.currentTarget as HTMLElement).querySelectorAll("button")];
    const at = buttons.indexOf(document.activeElement as HTMLButtonElement);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: buttons.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    buttons[Math.min(buttons.length - 1, Math.max(0, to))]?.focus();
  };
  return (
    <div class="bar" role="toolbar" aria-label={`Memory of ${device.device_id}: ${parts.map((p) => `${p.label} ${size(p.bytes)}`).join(", ")}`} onKeyDown={move}>
      {parts.map((p) => (
        <button
          key={p.key}
          type="button"
          class={`seg seg-${p.kind} ${isSelected(p) ? "selected" : ""}`}
          style={{ width: `${(100 * p.bytes) / total}%` }}
          title={`${p.label}: ${size(p.bytes)}`}
          aria-label={`${p.label}: ${size(p.bytes)}`}
          tabIndex={p.key === reachable ? 0 : -1}
          onFocus={() => setCurrent(p.key)}
          onClick={() => select(p)}
        />
      ))}
    </div>
  );
}
