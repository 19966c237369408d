// Elements that several pages use.

import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { clock } from "./format";
import type { Live } from "./live";

/** Text of the command line, in which commands stand between backticks. */
export function Prose({ text }: { text: string }) {
  const parts = text.split("`");
  return <>{parts.length % 2 ? parts.map((part, i) => (i % 2 ? <code key={i}>{part}</code> : part)) : text}</>;
}

/** What has failed, if anything. */
export function Alert({ text }: { text: string | undefined }) {
  return text ? <p class="failure" role="alert"><Prose text={text} /></p> : null;
}

export function Badge({ state }: { state: string }) {
  return <span class={`badge state-${state}`}>{state}</span>;
}

/** Say that the data are old or that a source does not answer. */
export function Freshness({ live }: { live: Live }) {
  const errors = Object.values(live.errors);
  if (!live.connected && live.at) {
    return (
      <p class="notice" role="status">
        No connection to the gateway. The data are from {clock(live.at)}; the page reconnects by itself.
      </p>
    );
  }
  if (!live.connected) return <p class="notice" role="status">Connecting to the gateway …</p>;
  if (errors.length) return <p class="notice" role="status"><Prose text={errors.join(" ")} /></p>;
  return null;
}

/** A button that shows its request's failure beside it. */
export function Action(props: { label: string; description?: string; run: () => Promise<unknown>; primary?: boolean; disabled?: boolean }) {
  const [busy, setBusy] = useState(false);
  const [failure, setFailure] = useState("");
  const run = async () => {
    setBusy(true);
    setFailure("");
    try {
      await props.run();
    } catch (error) {
      setFailure(error instanceof Error ? error.message : String(error));
    } finally {
      setBusy(false);
    }
  };
  return (
    <span class="action">
      <button
        type="button"
        class={props.primary ? "primary" : ""}
        disabled={busy || props.disabled}
        aria-label={props.description}
        onClick={run}
      >
        {busy ? `${props.label} …` : props.label}
      </button>
      {failure && <span class="failure" role="alert"><Prose text={failure} /></span>}
    </span>
  );
}

export function Facts({ items }: { items: [string, ComponentChildren][] }) {
  return (
    <dl class="facts">
      {items
        .filter(([, value]) => value !== null && value !== undefined && value !== "")
        .map(([name, value]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{value}</dd>
          </div>
        ))}
    </dl>
  );
}

/** A search field above a long table, of which only the first rows are drawn. */
export function useFilter<T>(items: T[], text: (item: T) => string, step = 100) {
  const [query, setQuery] = useState("");
  const [limit, setLimit] = useState(step);
  const wanted = query.trim().toLowerCase();
  const found = wanted ? items.filter((item) => text(item).toLowerCase().includes(wanted)) : items;
  const field = (label: string) => (
    <label class="search">
      {label}{" "}
      <input type="search" value={query} onInput={(event) => setQuery(event.currentTarget.value)} />
      <span class="quiet">
        {found.length > limit ? ` the first ${limit} of ${found.length}` : wanted ? ` ${found.length} of ${items.length}` : ` all ${items.length}`}
      </span>
    </label>
  );
  const more = (things: string) =>
    found.length > limit && (
      <p>
        <button type="button" onClick={() => setLimit(limit + step)}>
          Show {Math.min(step, found.length - limit)} more {things}
        </button>
      </p>
    );
  return { shown: found.slice(0, limit), field, more };
}
