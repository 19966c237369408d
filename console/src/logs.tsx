// Logs of engines and of a node's services: the last lines, and new ones while the page follows.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { admin } from "./api";
import { size } from "./format";
import type { Live } from "./live";
import { Alert, Freshness } from "./parts";

interface LogFile {
  name: string;
  nbytes: number;
  model: string | null;
}

interface Part {
  lines: string[];
  rest: string;
  position: number;
  skipped: boolean;
}

interface Line {
  time: string;
  level: string;
  text: string;
}

const POLL_MS = 2000;
const MOST_LINES = 5000;
const NOT_SHOWN = new Set(["time", "level", "message", "service", "logger", "exception", "color_message"]);

/** A line as `thaw logs` prints it: time, level, message and fields of a JSON record; another line as it is. */
export function parse(line: string): Line {
  try {
    const entry = JSON.parse(line);
    if (typeof entry.time !== "string") return { time: "", level: "", text: line };
    const fields = Object.entries(entry).filter(([name, value]) => !NOT_SHOWN.has(name) && value !== null);
    const parts = [String(entry.message ?? ""), ...fields.map(([name, value]) => `${name}=${typeof value === "object" ? JSON.stringify(value) : value}`)];
    const text = parts.join(" ") + (entry.exception ? `\n${entry.exception}` : "");
    return { time: entry.time.slice(11, 23), level: String(entry.level ?? ""), text };
  } catch {
    return { time: "", level: "", text: line };
  }
}

const path = (node: string, name: string) => `nodes/${encodeURIComponent(node)}/logs/${encodeURIComponent(name)}`;
export const logLink = (node: string, name: string) => `#/logs/${encodeURIComponent(node)}/${encodeURIComponent(name)}`;

export function LogsPage({ live, node: wanted, name }: { live: Live; node?: string; name?: string }) {
  const nodes = Object.keys(live.nodes).sort();
  const node = wanted || nodes[0] || "";
  const [logs, setLogs] = useState<LogFile[]>([]);
  const [about, setAbout] = useState("");
  const [failure, setFailure] = useState("");
  const asked = useRef(0);
  const list = () => {
    const mine = ++asked.current;
    if (!node) return;
    admin(`nodes/${encodeURIComponent(node)}/logs`).then(
      (found: { logs: LogFile[] }) => {
        if (mine !== asked.current) return; // another node was chosen meanwhile
        setLogs(found.logs);
        setFailure("");
      },
      (error: Error) => {
        if (mine !== asked.current) return;
        setLogs([]);
        setFailure(error.message);
      },
    );
  };
  useEffect(list, [node]);
  const go = (to: string) => void (window.location.hash = to);
  const query = about.trim().toLowerCase();
  const matching = logs.filter((l) => l.name === name || `${l.name} ${l.model ?? ""}`.toLowerCase().includes(query));
  return (
    <>
      <h1>Logs</h1>
      <Freshness live={live} />
      <div class="row">
        <label>
          Node{" "}
          <select value={node} onChange={(event) => go(`#/logs/${encodeURIComponent(event.currentTarget.value)}`)}>
            {(nodes.includes(node) || !node ? nodes : [node, ...nodes]).map((n) => <option key={n}>{n}</option>)}
          </select>
        </label>
        <label>Instance, model or service <input type="search" value={about} onInput={(event) => setAbout(event.currentTarget.value)} /></label>
        <label>
          Log{" "}
          <select aria-label="Log" value={name ?? ""} onChange={(event) => go(logLink(node, event.currentTarget.value))}>
            <option value="">choose one of {matching.length}</option>
            {matching.map((l) => <option key={l.name} value={l.name}>{`${l.name}${l.model ? ` (${l.model})` : ""}, ${size(l.nbytes)}`}</option>)}
          </select>
        </label>
        <button type="button" onClick={list}>List again</button>
      </div>
      <Alert text={failure} />
      {name && <Log key={`${node} ${name}`} node={node} name={name} />}
      <p class="quiet">Logs may contain prompts and secrets: only an admin key reads them. Services in containers write no files; their launcher has their logs.</p>
    </>
  );
}

function Log({ node, name }: { node: string; name: string }) {
  const [lines, setLines] = useState<string[]>([]);
  const [rest, setRest] = useState("");
  const [skipped, setSkipped] = useState(false);
  const [count, setCount] = useState(200);
  const [follow, setFollow] = useState(true);
  const [query, setQuery] = useState("");
  const [failure, setFailure] = useState("");
  const [arrived, setArrived] = useState(false);
  const box = useRef<HTMLPreElement>(null);
  const position = useRef<number | null>(null);

  const read = async (after: number | null, isCurrent: () => boolean) => {
    const part: Part = await admin(`${path(node, name)}?lines=${after === null ? count : 2000}${after === null ? "" : `&after=${after}`}`);
    if (!isCurrent()) return;
    position.current = part.position;
    setSkipped((before) => part.skipped || (after !== null && before));
    // A log that was rotated begins again: its lines follow those that are shown.
    setLines((before) => (after === null ? part.lines : [...before, ...part.lines].slice(-MOST_LINES)));
    setRest(part.rest);
    setFailure("");
    setArrived(true);
  };
  useEffect(() => {
    let timer: number | undefined;
    let ended = false;
    const poll = async (after: number | null) => {
      try {
        if (!document.hidden || after === null) await read(after, () => !ended);
      } catch (error) {
        if (!ended) setFailure(error instanceof Error ? error.message : String(error));
      }
      if (!ended && follow) timer = window.setTimeout(() => void poll(position.current), POLL_MS);
    };
    void poll(null);
    return () => {
      ended = true;
      window.clearTimeout(timer);
    };
  }, [count, follow]);
  useEffect(() => {
    if (follow && box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [lines, rest, follow]);

  const wanted = query.trim().toLowerCase();
  const all = useMemo(() => (rest ? [...lines, rest] : lines).map(parse), [lines, rest]);
  const shown = wanted ? all.filter((line) => `${line.time} ${line.level} ${line.text}`.toLowerCase().includes(wanted)) : all;
  return (
    <section aria-label={`Log ${name}`}>
      <h2>{name}</h2>
      <div class="row">
        <label>
          Lines{" "}
          <select aria-label="Lines" value={count} onChange={(event) => setCount(Number(event.currentTarget.value))}>
            {[50, 200, 1000, 2000].map((n) => <option key={n}>{n}</option>)}
          </select>
        </label>
        <label>Lines with <input type="search" value={query} onInput={(event) => setQuery(event.currentTarget.value)} /></label>
        <label><input type="checkbox" checked={follow} onChange={(event) => setFollow(event.currentTarget.checked)} /> Follow</label>
        <span class="quiet" role="status">{arrived ? `${shown.length} of ${all.length} lines` : failure ? "" : "Reading …"}</span>
      </div>
      <Alert text={failure} />
      <pre class="log" ref={box} tabIndex={0} role="region" aria-label={`Lines of ${name}`}>
        {skipped && <span class="quiet">Earlier lines are left out.{"\n"}</span>}
        {shown.map(({ time, level, text }, i) => (
          <span key={i} class={`line level-${level}`}>
            {time && <span class="quiet">{time} </span>}
            {level && <b>{level} </b>}
            {text}
            {"\n"}
          </span>
        ))}
      </pre>
    </section>
  );
}
