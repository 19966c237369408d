// API keys with their limits: add, rotate, revoke, and who changed them.

import { useEffect, useState } from "preact/hooks";
import { admin, change, remove } from "./api";
import { Action, Alert, Badge } from "./parts";

interface Key {
  name: string;
  scope: string;
  created: number;
  models: string[];
  expires: number | null;
  requests_per_minute: number | null;
  tokens_per_minute: number | null;
  concurrent_requests: number | null;
}

interface Entry {
  at: number;
  actor: string;
  address: string;
  action: string;
  key: string;
}

/** A new key and its digest. The gateway receives the digest alone. */
async function generate(): Promise<{ key: string; sha256: string }> {
  if (!crypto.subtle) throw new Error("The browser makes keys on HTTPS and on localhost only. Use `thaw keys add` instead.");
  const hex = (bytes: Uint8Array) => [...bytes].map((b) => b.toString(16).padStart(2, "0")).join("");
  const key = `sk-thaw-${hex(crypto.getRandomValues(new Uint8Array(24)))}`;
  const digest = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(key));
  return { key, sha256: hex(new Uint8Array(digest)) };
}

const NAME = /^[A-Za-z0-9][A-Za-z0-9._@-]{0,99}$/;

const day = (unix: number) => new Date(unix * 1000).toLocaleString();
const limit = (value: number | null) => (value === null ? "" : value);

export function KeysPage({ mayChange }: { mayChange: boolean }) {
  const [keys, setKeys] = useState<Key[] | null>(null);
  const [note, setNote] = useState("");
  const [log, setLog] = useState<Entry[]>([]);
  const [made, setMade] = useState<{ name: string; key: string } | null>(null);
  const [failure, setFailure] = useState("");

  const refresh = async () => {
    try {
      const found: { keys: Key[]; configured: number; required: boolean } = await admin("keys");
      setKeys(found.keys);
      const settings = found.configured ? `${found.configured} more inference keys are in the gateway's settings. ` : "";
      const needed = found.required || found.configured > 0 || found.keys.some((k) => k.scope === "inference");
      setNote(`${settings}${needed ? "Inference needs a key." : "Inference needs a key as soon as an inference key exists."}`);
      if (mayChange) setLog((await admin("key-log?limit=50")).entries);
      setFailure("");
    } catch (error) {
      setFailure(error instanceof Error ? error.message : String(error));
    }
  };
  useEffect(() => void refresh(), []);

  const rotate = async (name: string) => {
    const { key, sha256 } = await generate();
    await change(`keys/${encodeURIComponent(name)}/rotate`, { sha256 });
    setMade({ name, key });
    await refresh();
  };
  const revoke = async (name: string) => {
    if (!window.confirm(`Revoke the key ${name}? Its requests end at once.`)) return;
    await remove(`keys/${encodeURIComponent(name)}`);
    await refresh();
  };

  return (
    <>
      <h1>Keys</h1>
      <Alert text={failure} />
      {made && (
        <p class="notice" role="status">
          The key of {made.name}, which is shown once: <code>{made.key}</code>{" "}
          <button type="button" onClick={() => setMade(null)}>Hide</button>
        </p>
      )}
      {mayChange && <NewKey done={async (name, key) => { setMade({ name, key }); await refresh(); }} />}
      {keys && !keys.length && <p>No key has been added yet.</p>}
      <div class="scroll" tabIndex={0} role="region" aria-label="Table of keys">
        <table>
          <caption>{note}</caption>
          <thead>
            <tr>
              {["Name", "Scope", "Models", "Requests per minute", "Tokens per minute", "Concurrent", "Added", "Expires"].map((title) => (
                <th key={title} scope="col">{title}</th>
              ))}
              {mayChange && <th scope="col">Actions</th>}
            </tr>
          </thead>
          <tbody>
            {(keys ?? []).map((k) => (
              <tr key={`${k.name} ${k.created}`}>
                <th scope="row">{k.name}</th>
                <td><Badge state={k.scope} /></td>
                <td>{k.models.join(", ") || "all"}</td>
                <td class="number">{limit(k.requests_per_minute)}</td>
                <td class="number">{limit(k.tokens_per_minute)}</td>
                <td class="number">{limit(k.concurrent_requests)}</td>
                <td>{day(k.created)}</td>
                <td>{k.expires === null ? "" : day(k.expires)}</td>
                {mayChange && (
                  <td>
                    <Action label="Rotate" description={`Rotate the key ${k.name}: the old one stays valid for an hour`} run={() => rotate(k.name)} />
                    <Action label="Revoke" description={`Revoke the key ${k.name}`} run={() => revoke(k.name)} />
                  </td>
                )}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {log.length > 0 && (
        <section class="card" aria-label="Changes of keys">
          <h2>Changes</h2>
          <div class="scroll" tabIndex={0} role="region" aria-label="Who changed which key">
            <table>
              <thead><tr>{["Time", "By", "From", "Change", "Key"].map((title) => <th key={title} scope="col">{title}</th>)}</tr></thead>
              <tbody>
                {log.map((e, i) => (
                  <tr key={i}>
                    <td>{day(e.at)}</td>
                    <td>{e.actor}</td>
                    <td>{e.address}</td>
                    <td>{e.action}</td>
                    <td>{e.key}</td>
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
        </section>
      )}
    </>
  );
}

function NewKey({ done }: { done: (name: string, key: string) => Promise<void> }) {
  const [name, setName] = useState("");
  const [scope, setScope] = useState("inference");
  const [models, setModels] = useState("");
  const [rpm, setRpm] = useState("");
  const [tpm, setTpm] = useState("");
  const [concurrent, setConcurrent] = useState("");
  const add = async () => {
    if (!NAME.test(name)) throw new Error("A name has letters, digits and . _ @ - only, begins with a letter or digit, and has 100 characters at most.");
    const { key, sha256 } = await generate();
    const number = (text: string) => (text ? Number(text) : null);
    const limits = { requests_per_minute: number(rpm), tokens_per_minute: number(tpm), concurrent_requests: number(concurrent) };
    await change("keys", { name, scope, sha256, models: models.split(/[\s,]+/).filter(Boolean), ...limits });
    setName("");
    await done(name, key);
  };
  const numeric = (label: string, value: string, set: (text: string) => void) => (
    <label>{label} <input type="number" min={1} value={value} onInput={(event) => set(event.currentTarget.value)} /></label>
  );
  return (
    <section class="card" aria-label="Add a key">
      <h2>Add a key</h2>
      <div class="row">
        <label>Name <input value={name} onInput={(event) => setName(event.currentTarget.value)} /></label>
        <label>
          Scope{" "}
          <select value={scope} onChange={(event) => setScope(event.currentTarget.value)}>
            {["inference", "read-only", "admin"].map((s) => <option key={s}>{s}</option>)}
          </select>
        </label>
        <label>Models (patterns; empty: all) <input value={models} onInput={(event) => setModels(event.currentTarget.value)} /></label>
        {numeric("Requests per minute", rpm, setRpm)}
        {numeric("Tokens per minute", tpm, setTpm)}
        {numeric("Concurrent requests", concurrent, setConcurrent)}
        <Action label="Add" description="Add the key" primary run={add} disabled={!name} />
      </div>
    </section>
  );
}
