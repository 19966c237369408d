// Add a model from a directory on the nodes, the hub or a URL, and follow it until it is ready.

import { useRef, useState } from "preact/hooks";
import { change, inPath } from "./api";
import { duration, size } from "./format";
import type { Live } from "./live";
import { Field, FIRST_SETTINGS, toSpec, type Texts } from "./modelform";
import { Alert, Badge } from "./parts";

interface Added {
  added: string[];
  changed: string[];
}

const SOURCES = /^(hf|https?|s3|gs|az|engine):\/\/./;

function fault(name: string, source: string): string {
  if (!name.trim()) return "Give the model a name.";
  if (SOURCES.test(source) || source.startsWith("/")) return "";
  return "Write the directory in full, as /models/llama, or a source as hf://org/name, https://…, s3://…, gs://… or az://….";
}

export function AddModel({ live }: { live: Live }) {
  const [name, setName] = useState("");
  const [source, setSource] = useState("");
  const [texts, setTexts] = useState<Texts>({});
  const [replace, setReplace] = useState(false);
  const [wake, setWake] = useState(true);
  const [step, setStep] = useState("");
  const [started, setStarted] = useState<string | null>(null);
  const [failure, setFailure] = useState("");
  const busy = useRef(false);

  const add = async () => {
    const model = name.trim();
    const spec = toSpec(FIRST_SETTINGS, texts, { name: model, source: source.trim() });
    setStep("Reading the model's files …");
    const result: Added = await change("models", { specs: [spec], reread: true, replace });
    const done = result.added.length ? "is added" : result.changed.length ? "is changed" : "is registered with these settings already";
    if (!wake || spec.base) return setStep(`${model} ${done}. Nothing is loaded until a request asks for it.`);
    setStep(`${model} ${done}. Starting it …`);
    setStarted(model);
    const { took_ms }: { took_ms: number } = await change(`models/${inPath(model)}/wake`);
    setStep(`${model} ${done}, and ready${took_ms ? ` after ${duration(took_ms)}` : ""}.`);
  };
  const submit = async (event: Event) => {
    event.preventDefault();
    if (busy.current) return;
    const found = fault(name, source.trim());
    setFailure(found);
    if (found) return;
    busy.current = true;
    setStep("");
    try {
      await add();
    } catch (error) {
      setStep("");
      setFailure(error instanceof Error ? error.message : String(error));
    } finally {
      setStarted(null);
      busy.current = false;
    }
  };
  return (
    <details class="card">
      <summary>Add a model</summary>
      <form onSubmit={submit} noValidate aria-label="Add a model">
        <div class="row">
          <label>Name <input value={name} onInput={(event) => setName(event.currentTarget.value)} /></label>
          <label class="wide">
            Source <input value={source} placeholder="/models/llama or hf://org/name" onInput={(event) => setSource(event.currentTarget.value)} />
          </label>
          <label><input type="checkbox" checked={wake} onChange={(event) => setWake(event.currentTarget.checked)} /> Start it at once</label>
          <button type="submit" class="primary">Add</button>
        </div>
        <details>
          <summary>More settings</summary>
          <div class="row">
            {FIRST_SETTINGS.map((of) => <Field key={of.key} of={of} texts={texts} change={setTexts} />)}
            <label><input type="checkbox" checked={replace} onChange={(event) => setReplace(event.currentTarget.checked)} /> Replace the source of a registered model</label>
          </div>
        </details>
        <p class="quiet">A directory is one on the nodes, with the same path on each that may serve the model. Environment, commands and containers: <code>thaw models add --config</code>.</p>
      </form>
      <Alert text={failure} />
      <div role="status" aria-label="Progress of the model">
        {step && <p>{step}</p>}
        {started !== null && <Progress name={started} live={live} />}
      </div>
    </details>
  );
}

/** The loads of a model on nodes, and its instances that are not ready yet. */
function Progress({ name, live }: { name: string; live: Live }) {
  const loads = Object.entries(live.nodes).flatMap(([node, n]) => n.loads.filter((l) => l.model === name).map((l) => ({ node, ...l })));
  const instances = Object.values(live.instances).filter((i) => i.model === name && ["preparing", "loading", "resuming"].includes(i.state));
  const model = live.models[name];
  return (
    <>
      {instances.map((i) => (
        <p key={i.plan_id}>
          <Badge state={i.state} /> on {i.node} {i.devices.join(", ")}: {i.phase ?? "starting"}{" "}
          <meter min={0} max={1} value={i.progress} aria-label={`Progress on ${i.node}`} /> {Math.round(100 * i.progress)}%
        </p>
      ))}
      {loads.map((l) => (
        <p key={l.node}>
          {l.node}: {l.fetched_bytes ? `${size(l.fetched_bytes)} downloaded, ` : ""}{size(l.loaded_bytes)} of {size(l.total_bytes)} in memory{" "}
          <meter min={0} max={l.total_bytes || 1} value={l.loaded_bytes} aria-label={`Loaded on ${l.node}`} />
        </p>
      ))}
      {!instances.length && !loads.length && model && model.waiting > 0 && <p>It waits for memory.</p>}
    </>
  );
}
