// Pulls: a model's weights on their way to a node, whoever ordered them.

import { useState } from "preact/hooks";
import { change, inPath, remove } from "./api";
import { size } from "./format";
import type { Live } from "./live";
import { Action } from "./parts";
import type { Model, Pull } from "./types";

/** Engines whose weights the loader can bring. The others download what they need themselves. */
const LOADED = new Set(["builtin", "vllm"]);
const TIERS = { ssd: "disk", dram: "memory" };

/** The pulls of a model in progress, a button that orders one, and buttons that cancel them. */
export function Pulls({ name, model, live, mayChange }: { name: string; model: Model; live: Live; mayChange: boolean }) {
  const [result, setResult] = useState("");
  const pulls = Object.entries(live.pulls).filter(([, p]) => p.model === name);
  const mayPull = mayChange && !model.base && LOADED.has(model.engine) && model.source.includes("://");
  const run = async () => {
    setResult("");
    const { node, was_there }: { node: string; was_there: boolean } = await change(`models/${inPath(name)}/pull`);
    setResult(was_there ? `${node} has it on its disk already.` : `It is on the disk of ${node}.`);
  };
  return (
    <>
      {mayPull && <> <Action label="Download" description={`Download ${name} to a node's disk`} run={run} /></>}
      <span role="status" aria-label={`Download of ${name}`}>
        {result}
        {pulls.map(([key, p]) => <Progress key={key} pull={p} />)}
      </span>
      {mayChange && pulls.map(([key, p]) => (
        <Action
          key={key}
          label="Cancel"
          description={`Cancel the download of ${name} to the ${TIERS[p.tier]} of ${p.node}`}
          run={() => remove(`models/${inPath(name)}/pull?node=${encodeURIComponent(p.node)}&tier=${p.tier}`)}
        />
      ))}
    </>
  );
}

function Progress({ pull: p }: { pull: Pull }) {
  return (
    <span class="pull">
      {p.node}, {TIERS[p.tier]}: {size(p.loaded_bytes)} of {size(p.total_bytes)}
      {p.bytes_per_second !== null && `, ${size(p.bytes_per_second)}/s`}
      {p.state === "waiting" && ` (waits: ${p.reason})`}{" "}
      <meter min={0} max={p.total_bytes || 1} value={p.loaded_bytes} aria-label={`Downloaded to ${p.node}`} />
    </span>
  );
}
