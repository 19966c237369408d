// The last hour again, under another policy or with one node less: what `thaw simulate --from-mesh` computes.

import { useEffect, useRef, useState } from "preact/hooks";
import { admin, stream } from "./api";
import { duration } from "./format";
import { Alert } from "./parts";

interface Options {
  installed: boolean;
  policies: string[];
  policy: string | null;
  nodes: string[];
}

interface Run {
  policy: string;
  without: string | null;
  requests: number;
  failed: number;
  timed_out: number;
  cold: number;
  ttft: Record<"mean" | "p50" | "p99", number | null>;
  slo_attainment: number | null;
  loads: Record<string, number>;
  stops: number;
  suspensions: number;
  migrations: number;
}

interface Result {
  recorded: { requests: number; cold: number; left_out: number; ttft: Record<string, number | null> };
  runs: Run[];
  command: string;
}

interface Progress {
  done: number;
  of: number;
}

const HOURS: [string, number][] = [["10 minutes", 600], ["hour", 3600], ["6 hours", 6 * 3600], ["24 hours", 24 * 3600]];
const PATH = "simulations";

/** The events of a simulation, as they arrive. */
async function* events(response: Response): AsyncGenerator<[string, any]> {
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (text + value).split("\n\n");
    text = blocks.pop()!;
    for (const block of blocks) {
      const found = /^event: (\w+)\ndata: (.*)$/s.exec(block);
      if (found) yield [found[1]!, JSON.parse(found[2]!)];
    }
  }
}

export function SimulatePage({ mayChange }: { mayChange: boolean }) {
  const [options, setOptions] = useState<Options | null>(null);
  const [other, setOther] = useState("");
  const [without, setWithout] = useState("");
  const [seconds, setSeconds] = useState(3600);
  const [progress, setProgress] = useState<Progress | null>(null);
  const [result, setResult] = useState<Result | null>(null);
  const [failure, setFailure] = useState("");
  const running = useRef<AbortController | null>(null);
  useEffect(() => {
    admin(PATH).then(setOptions, (error: Error) => setFailure(error.message));
    // Leaving the page ends its simulation.
    return () => running.current?.abort();
  }, []);

  const present = options?.policy ?? options?.policies[0] ?? "";
  const submit = async (event: Event) => {
    event.preventDefault();
    const mine = new AbortController();
    running.current = mine;
    setFailure("");
    setResult(null);
    setProgress({ done: 0, of: 0 });
    try {
      const policies = other ? [present, other] : [present];
      const response = await stream(`/api/admin/v1/${PATH}`, { policies, without: without || null, last_s: seconds }, mine.signal);
      let ended = false;
      for await (const [name, data] of events(response)) {
        if (name === "progress") setProgress(data);
        if (name === "result") setResult(data);
        if (name === "error") setFailure(data.message);
        ended ||= name !== "progress";
      }
      if (!ended) setFailure("The connection to the gateway ended before the simulation did.");
    } catch (error) {
      if (!mine.signal.aborted) setFailure(error instanceof Error ? error.message : String(error));
    } finally {
      running.current = null;
      setProgress(null);
    }
  };

  return (
    <>
      <h1>Simulate</h1>
      <p class="quiet">
        The recorded requests once more, on simulated nodes and engines with the times that this mesh has measured. The live scheduler's
        decisions are simulated too. It starts and stops nothing in the mesh.
      </p>
      {options && !options.installed && <p class="notice">This gateway has no simulator. Run <code>thaw simulate --from-mesh</code> on another machine.</p>}
      {options?.installed && (
        <form class="row" onSubmit={submit}>
          <label>
            Requests of the last{" "}
            <select value={seconds} onChange={(event) => setSeconds(Number(event.currentTarget.value))}>
              {HOURS.map(([label, value]) => <option key={value} value={value}>{label}</option>)}
            </select>
          </label>
          <span>Policy <b>{present}</b></span>
          <label>
            Another policy{" "}
            <select value={other} onChange={(event) => setOther(event.currentTarget.value)}>
              <option value="">none</option>
              {options.policies.filter((name) => name !== present).map((name) => <option key={name}>{name}</option>)}
            </select>
          </label>
          <label>
            One node less{" "}
            <select value={without} onChange={(event) => setWithout(event.currentTarget.value)} disabled={options.nodes.length < 2}>
              <option value="">none</option>
              {options.nodes.map((name) => <option key={name}>{name}</option>)}
            </select>
          </label>
          <button type="submit" class="primary" disabled={!mayChange || progress !== null}>Simulate</button>
          {progress && <button type="button" onClick={() => running.current?.abort()}>Cancel</button>}
        </form>
      )}
      {options?.installed && !mayChange && <p class="quiet">Simulations need an admin key.</p>}
      {progress && (
        <p role="status">
          <progress aria-label="Progress of the simulation" max={progress.of || 1} value={progress.done} />{" "}
          {progress.of ? `simulation ${Math.min(progress.done + 1, progress.of)} of ${progress.of}` : "reading the recorded requests"} …
        </p>
      )}
      <Alert text={failure} />
      {result && <Comparison result={result} />}
    </>
  );
}

const title = (run: Run): string => (run.without === null ? run.policy : `${run.policy}, without ${run.without}`);
const seconds = (value: number | null | undefined): string => (value === null || value === undefined ? "" : duration(1000 * value));
const starts = (run: Run): number => Object.values(run.loads).reduce((sum, n) => sum + n, 0);

/** A figure, and how much it differs from that of the present policy on all nodes. */
function Figure({ value, base, show }: { value: number | null; base: number | null; show: (value: number) => string }) {
  const difference = value !== null && base !== null && base > 0 ? Math.round((100 * (value - base)) / base) : 0;
  return (
    <td class="number">
      {value === null ? "" : show(value)}
      {difference !== 0 && <span class="quiet"> {difference > 0 ? "+" : "−"}{Math.abs(difference)}%</span>}
    </td>
  );
}

function Comparison({ result }: { result: Result }) {
  const { recorded, runs, command } = result;
  const base = runs[0]!;
  const columns: [string, (run: Run) => number | null, (value: number) => string][] = [
    ["TTFT mean", (r) => r.ttft.mean, seconds],
    ["TTFT p50", (r) => r.ttft.p50, seconds],
    ["TTFT p99", (r) => r.ttft.p99, seconds],
    ["In time", (r) => r.slo_attainment, (share) => `${Number((100 * share).toFixed(1))}%`],
    ["Cold requests", (r) => r.cold, String],
    ["Starts", starts, String],
    ["Stops", (r) => r.stops, String],
    ["Suspensions", (r) => r.suspensions, String],
    ["Migrations", (r) => r.migrations, String],
    ["Failed", (r) => r.failed + r.timed_out, String],
  ];
  const measured: Record<string, string> = {
    "TTFT mean": seconds(recorded.ttft.mean),
    "TTFT p50": seconds(recorded.ttft.p50),
    "TTFT p99": seconds(recorded.ttft.p99),
    "Cold requests": String(recorded.cold),
  };
  return (
    <section class="card" aria-label="Comparison" aria-live="polite">
      <h2>{base.requests} requests</h2>
      <div class="scroll" tabIndex={0} role="region" aria-label="Table of the comparison">
        <table>
          <caption>
            Differences are to the first simulation: it has the same errors of the simulator as the others.
            {recorded.left_out > 0 && ` Left out: ${recorded.left_out} requests without a token or a registered model.`}
          </caption>
          <thead>
            <tr><td />{columns.map(([name]) => <th key={name} scope="col">{name}</th>)}</tr>
          </thead>
          <tbody>
            <tr>
              <th scope="row">measured</th>
              {columns.map(([name]) => <td key={name} class="number">{measured[name] ?? ""}</td>)}
            </tr>
            {runs.map((run) => (
              <tr key={title(run)}>
                <th scope="row">{title(run)}</th>
                {columns.map(([name, value, show]) => <Figure key={name} value={value(run)} base={run === base ? null : value(base)} show={show} />)}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <p>The same from a terminal:</p>
      <pre tabIndex={0} role="region" aria-label="Command line of this simulation">{command}</pre>
    </section>
  );
}
