// The views of a page, kept current by one server-sent event stream.

import { useEffect, useState } from "preact/hooks";
import { session } from "./api";
import type { ActiveRequest, Instance, Device, Model, Node, Pull, RequestRecord } from "./types";

type Section = Record<string, any>;
interface Update {
  seq: number;
  at: number;
  view?: Record<string, Section>;
  changes?: Record<string, Section>;
  error: string | null;
}

export interface Live {
  models: Record<string, Model>;
  nodes: Record<string, Node>;
  devices: Record<string, Device>;
  instances: Record<string, Instance>;
  pulls: Record<string, Pull>;
  requests: Record<string, RequestRecord>;
  active: Record<string, ActiveRequest>;
  gateways: Record<string, { active: number }>;
  cluster: Record<string, { id: string; epoch: number }>;
  /** Topics whose view has arrived. */
  arrived: Set<string>;
  connected: boolean;
  /** Unix seconds of the latest data. */
  at: number;
  /** Seconds that this machine's clock is ahead of the gateway's. */
  ahead_s: number;
  errors: Record<string, string>;
}

const RETRY_MS = 1000;

function empty(): Live {
  const sections = { models: {}, nodes: {}, devices: {}, instances: {}, pulls: {}, requests: {}, active: {}, gateways: {}, cluster: {} };
  return { ...sections, arrived: new Set(), connected: false, at: 0, ahead_s: 0, errors: {} };
}

/** Apply an update to a copy: sections that did not change keep their identity. */
function apply(before: Live, topic: string, update: Update): Live {
  const after: Live = { ...before, connected: true, at: update.at, ahead_s: Date.now() / 1000 - update.at, errors: { ...before.errors } };
  if (update.error) after.errors[topic] = update.error;
  else delete after.errors[topic];
  const sections = after as unknown as Record<string, Section>;
  if (update.view) Object.assign(sections, update.view);
  for (const [name, changed] of Object.entries(update.changes ?? {})) {
    const section = { ...sections[name] };
    for (const [id, record] of Object.entries(changed)) {
      if (record === null) delete section[id];
      else section[id] = record;
    }
    sections[name] = section;
  }
  if (!update.error || update.view) after.arrived = new Set(before.arrived).add(topic);
  return after;
}

/** Follow topics while a page is shown. `onExpired`: the session has ended. */
export function useLive(topics: string, onExpired: () => void): Live {
  const [live, setLive] = useState<Live>(empty);
  useEffect(() => {
    let source: EventSource | undefined;
    let timer: number | undefined;
    let ended = false;
    const connect = () => {
      source = new EventSource(`/ui/events?topics=${topics}`);
      for (const topic of topics.split(",")) {
        source.addEventListener(topic, (event) => {
          const update = JSON.parse((event as MessageEvent).data) as Update;
          setLive((before) => apply(before, topic, update));
        });
      }
      source.onopen = () => setLive((before) => ({ ...before, connected: true }));
      source.onerror = () => {
        // The browser retries a lost connection, but not one that was refused: this does both.
        source?.close();
        setLive((before) => ({ ...before, connected: false }));
        if (!ended) timer = window.setTimeout(retry, RETRY_MS);
      };
    };
    const retry = async () => {
      try {
        if (!(await session()).view) return onExpired();
      } catch {
        // The gateway is not there yet.
        if (!ended) timer = window.setTimeout(retry, RETRY_MS);
        return;
      }
      if (!ended) connect();
    };
    connect();
    return () => {
      ended = true;
      window.clearTimeout(timer);
      source?.close();
    };
  }, [topics]);
  return live;
}
