// Change settings of a registered model: the difference first, then the change.

import { useState } from "preact/hooks";
import { admin, inPath, patch } from "./api";
import { Field, SETTINGS, toSpec, toTexts, type Spec, type Texts } from "./modelform";
import { Action, Alert } from "./parts";

interface Preview {
  version: string;
  changes: { setting: string; before: unknown; after: unknown }[];
}

const written = (value: unknown) => (value === null ? "default" : typeof value === "object" ? JSON.stringify(value) : String(value));

export function ChangeModel({ name }: { name: string }) {
  const [before, setBefore] = useState<Spec | null>(null);
  const [texts, setTexts] = useState<Texts>({});
  const [preview, setPreview] = useState<Preview | null>(null);
  const [done, setDone] = useState("");
  const [failure, setFailure] = useState("");
  const path = `models/${inPath(name)}/settings`;

  const read = async () => {
    const { settings }: { settings: Spec } = await admin(path);
    setBefore(settings);
    setTexts(toTexts(SETTINGS, settings));
    setPreview(null);
    setFailure("");
  };
  const open = (event: Event) => {
    if (!(event.currentTarget as HTMLDetailsElement).open) return;
    setDone("");
    read().catch((error: Error) => setFailure(error.message));
  };
  /** The settings whose text has changed; a field that was emptied stands for the default. */
  const settings = (): Spec => {
    const old = toTexts(SETTINGS, before ?? {});
    const spec = toSpec(SETTINGS, texts, {});
    return Object.fromEntries(SETTINGS.filter(({ key }) => texts[key] !== old[key]).map(({ key }) => [key, spec[key] ?? null]));
  };
  const show = async () => {
    setDone("");
    setPreview(await patch(path, { settings: settings(), dry_run: true }));
  };
  const apply = async () => {
    const found: Preview = await patch(path, { settings: settings(), version: preview!.version });
    setPreview(null);
    setDone(`Changed: ${found.changes.map((c) => c.setting).join(", ")}.`);
    const after = { ...before, ...Object.fromEntries(found.changes.map((c) => [c.setting, c.after])) };
    setBefore(after);
    setTexts(toTexts(SETTINGS, after));
  };
  return (
    <details onToggle={open}>
      <summary>Change settings</summary>
      <Alert text={failure} />
      {before && (
        <>
          <div class="row" role="group" aria-label={`Settings of ${name}`}>
            {SETTINGS.map((of) => (
              <Field key={of.key} of={of} texts={texts} change={(changed) => { setTexts(changed); setPreview(null); }} />
            ))}
          </div>
          <p>
            <Action label="Show the change" description={`Show the change of ${name}`} run={show} />
            {preview && preview.changes.length > 0 && <Action label="Apply" description={`Apply the change of ${name}`} primary run={apply} />}
          </p>
          {preview && !preview.changes.length && <p role="status">Nothing would change.</p>}
          {preview && preview.changes.length > 0 && (
            <table>
              <caption>The change, which is not applied yet</caption>
              <thead><tr>{["Setting", "Now", "Then"].map((title) => <th key={title} scope="col">{title}</th>)}</tr></thead>
              <tbody>
                {preview.changes.map((c) => (
                  <tr key={c.setting}>
                    <th scope="row">{c.setting}</th>
                    <td class="text">{written(c.before)}</td>
                    <td class="text">{written(c.after)}</td>
                  </tr>
                ))}
              </tbody>
            </table>
          )}
          {done && <p role="status">{done}</p>}
        </>
      )}
    </details>
  );
}
