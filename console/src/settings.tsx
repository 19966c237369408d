// The settings of a model as the thaw.yaml that would give them.

import { useState } from "preact/hooks";
import { admin, inPath } from "./api";
import { Alert } from "./parts";

export function ModelSettings({ name }: { name: string }) {
  const [yaml, setYaml] = useState("");
  const [failure, setFailure] = useState("");
  const open = (event: Event) => {
    if (!(event.currentTarget as HTMLDetailsElement).open) return;
    setFailure("");
    admin(`models/${inPath(name)}/settings`).then(
      (found: { yaml: string }) => setYaml(found.yaml),
      (error: Error) => setFailure(error.message),
    );
  };
  return (
    <details onToggle={open}>
      <summary>Settings as YAML</summary>
      <Alert text={failure} />
      {yaml && <pre tabIndex={0} role="region" aria-label={`Settings of ${name} as YAML`}>{yaml}</pre>}
    </details>
  );
}
