// What is wrong with the mesh, what it means, and what to do: the findings of `thaw doctor` that need no access to a node's machine.

import { useEffect, useState } from "preact/hooks";
import { admin } from "./api";
import { clock } from "./format";
import { Action, Alert, Badge, Prose, useFilter } from "./parts";

interface Finding {
  subject: string;
  level: "ok" | "warn" | "fail";
  text: string;
  remedy: string;
  meaning: string;
}

const SEVERITY = { fail: 0, warn: 1, ok: 2 };
const NAMES = { fail: "failure", warn: "warning", ok: "ok" };

function summary(findings: Finding[]): string {
  const count = (level: Finding["level"], one: string, many: string) => {
    const n = findings.filter((f) => f.level === level).length;
    return n ? `${n} ${n === 1 ? one : many}` : "";
  };
  const parts = [count("fail", "failure", "failures"), count("warn", "warning", "warnings")].filter(Boolean);
  return parts.length ? parts.join(" and ") : "No problem found";
}

export function DoctorPage() {
  const [findings, setFindings] = useState<Finding[] | null>(null);
  const [at, setAt] = useState(0);
  const [failure, setFailure] = useState("");
  const { shown, field, more } = useFilter(findings ?? [], (f) => `${NAMES[f.level]} ${f.subject} ${f.text}`);
  const check = async () => {
    const found: { findings: Finding[] } = await admin("doctor");
    setFindings([...found.findings].sort((a, b) => SEVERITY[a.level] - SEVERITY[b.level]));
    setAt(Date.now() / 1000);
    setFailure("");
  };
  useEffect(() => void check().catch((error: Error) => setFailure(error.message)), []);
  return (
    <>
      <h1>Doctor</h1>
      <Alert text={failure} />
      <p class="row">
        <span role="status">{findings ? `${summary(findings)}, checked at ${clock(at)}.` : failure ? "" : "Checking …"}</span>
        <Action label="Check again" run={check} />
      </p>
      {field("Find a finding")}
      {findings && (
        <div class="scroll" tabIndex={0} role="region" aria-label="Table of findings">
          <table>
            <caption class="hidden">Findings, failures first</caption>
            <thead>
              <tr>
                {["Severity", "Part", "Finding", "What it means", "What to do"].map((title) => <th key={title} scope="col">{title}</th>)}
              </tr>
            </thead>
            <tbody>
              {shown.map((f, i) => (
                <tr key={i}>
                  <td><Badge state={NAMES[f.level]} /></td>
                  <th scope="row">{f.subject}</th>
                  <td class="text"><Prose text={f.text} /></td>
                  <td class="text"><Prose text={f.meaning} /></td>
                  <td class="text"><Prose text={f.remedy} /></td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {more("findings")}
      <p class="quiet">
        These checks need no access to a machine. <code>thaw doctor</code> on a node's machine also checks its disk, memory, swap, GPUs, ports and servers.
      </p>
    </>
  );
}
