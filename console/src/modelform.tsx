// Fields of a model's settings: texts of a form, and the JSON of a ModelSpec.

export type Texts = Record<string, string>;
export type Spec = Record<string, any>;

interface FieldType {
  key: string;
  label: string;
  kind: "number" | "flag" | "words" | "text" | "size" | "engine";
  help?: string;
}

const GIB = 2 ** 30;
const ENGINES = ["builtin", "vllm", "llamacpp", "sglang", "ollama", "tensorrt-llm", "openai"];

/** Settings that can change without another source. */
export const SETTINGS: FieldType[] = [
  { key: "pin", label: "Pin: never evict it", kind: "flag" },
  { key: "keep_alive", label: "Seconds it stays when idle", kind: "number", help: "-1: until evicted" },
  { key: "priority", label: "Priority", kind: "number", help: "-100 to 100" },
  { key: "max_model_len", label: "Context in tokens", kind: "number", help: "empty: the model's own" },
  { key: "max_concurrency", label: "Sequences at once", kind: "number" },
  { key: "memory", label: "Memory in GiB", kind: "size", help: "empty: computed" },
  { key: "aliases", label: "Other names", kind: "words" },
];
export const FIRST_SETTINGS: FieldType[] = [
  { key: "engine", label: "Engine", kind: "engine" },
  { key: "base", label: "LoRA adapter of", kind: "text", help: "name of its base" },
  { key: "stages", label: "Pipeline stages", kind: "number" },
  { key: "trust_remote_code", label: "Run the model's own Python code", kind: "flag" },
  ...SETTINGS,
];

export function Field({ of, texts, change }: { of: FieldType; texts: Texts; change: (texts: Texts) => void }) {
  const value = texts[of.key] ?? "";
  const set = (text: string) => change({ ...texts, [of.key]: text });
  if (of.kind === "flag") {
    return <label><input type="checkbox" checked={value === "yes"} onChange={(event) => set(event.currentTarget.checked ? "yes" : "")} /> {of.label}</label>;
  }
  if (of.kind === "engine") {
    return (
      <label>
        {of.label}{" "}
        <select value={value || "builtin"} onChange={(event) => set(event.currentTarget.value)}>
          {ENGINES.map((engine) => <option key={engine}>{engine}</option>)}
        </select>
      </label>
    );
  }
  if (of.kind === "number" || of.kind === "size") {
    return <label>{of.label} <input type="number" step="any" placeholder={of.help} value={value} onInput={(event) => set(event.currentTarget.value)} /></label>;
  }
  return <label>{of.label} <input placeholder={of.help} value={value} onInput={(event) => set(event.currentTarget.value)} /></label>;
}

/** The setting that a text gives; undefined: the default. */
function setting(of: FieldType, text: string): unknown {
  if (of.kind === "flag") return text === "yes";
  if (!text.trim()) return undefined;
  if (of.kind === "number") return Number(text);
  if (of.kind === "size") return Math.round(Number(text) * GIB);
  return of.kind === "words" ? text.split(/[\s,]+/).filter(Boolean) : text.trim();
}

export function toSpec(fields: FieldType[], texts: Texts, base: Spec): Spec {
  const spec = { ...base };
  for (const of of fields) {
    const value = setting(of, texts[of.key] ?? "");
    if (value === undefined) delete spec[of.key];
    else spec[of.key] = value;
  }
  return spec;
}

export function toTexts(fields: FieldType[], spec: Spec): Texts {
  const texts: Texts = {};
  for (const of of fields) {
    const value = spec[of.key];
    if (of.kind === "flag") texts[of.key] = value ? "yes" : "";
    else if (value === null || value === undefined) texts[of.key] = "";
    else if (of.kind === "size") texts[of.key] = String(value / GIB);
    else texts[of.key] = Array.isArray(value) ? value.join(" ") : String(value);
  }
  return texts;
}
