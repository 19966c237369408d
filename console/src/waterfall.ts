// The rows of a waterfall: the same rule as thaw/cli/waterfall.py, with which the tests compare it.

import type { Segment, Span } from "./types";

export type Stretch = [start: number, end: number];

export interface Row {
  phase: string;
  process: string;
  start: number;
  duration: number;
  waited: number;
  spans: Stretch[];
  critical: Stretch[];
}

/**
 * A row for each phase of each process, in order of start. Every instant of the critical path is on
 * exactly one row, so the rows' `waited` sum to its length. Instants that no span of their phase
 * covers get a row without a process.
 */
export function rows(spans: Span[], critical: Segment[], start: number, end: number): Row[] {
  const groups = new Map<string, Stretch[]>();
  const keyOf = (phase: string, process: string) => `${phase}\0${process}`;
  for (const s of spans) {
    if (s.start_ms + s.duration_ms > start && s.start_ms < end) {
      push(groups, keyOf(s.phase, s.process), [s.start_ms, s.start_ms + s.duration_ms]);
    }
  }
  const waited = new Map<string, Stretch[]>();
  for (const segment of critical) {
    const covering = [...groups].filter(([key]) => key.startsWith(`${segment.phase}\0`));
    for (const [process, piece] of pieces(segment, covering)) push(waited, keyOf(segment.phase, process), piece);
  }
  for (const [key, stretches] of waited) if (!groups.has(key)) groups.set(key, stretches);
  const first = (stretches: Stretch[]) => Math.min(...stretches.map(([s]) => s));
  return [...groups]
    .sort(([, a], [, b]) => first(a) - first(b))
    .map(([key, members]) => {
      const [phase = "", process = ""] = key.split("\0");
      const mine = waited.get(key) ?? [];
      const from = Math.max(start, first(members));
      const to = Math.min(end, Math.max(...members.map(([, e]) => e)));
      const total = mine.reduce((sum, [s, e]) => sum + e - s, 0);
      return { phase, process, start: from - start, duration: to - from, waited: total, spans: members, critical: mine };
    });
}

function push(groups: Map<string, Stretch[]>, key: string, stretch: Stretch): void {
  const found = groups.get(key);
  if (found) found.push(stretch);
  else groups.set(key, [stretch]);
}

/** Cut the segment where a span of its phase begins or ends; each piece has its first process. */
function pieces(segment: Segment, covering: [string, Stretch[]][]): [string, Stretch][] {
  const [begin, end] = [segment.start_ms, segment.start_ms + segment.duration_ms];
  const edges = new Set<number>([begin, end]);
  for (const [, stretches] of covering) {
    for (const edge of stretches.flat()) if (begin < edge && edge < end) edges.add(edge);
  }
  const sorted = [...edges].sort((a, b) => a - b);
  const found: [string, Stretch][] = [];
  for (let i = 0; i + 1 < sorted.length; i++) {
    const [left, right] = [sorted[i]!, sorted[i + 1]!];
    const owner = covering.find(([, stretches]) => stretches.some(([s, e]) => s <= left && right <= e));
    found.push([owner ? owner[0].split("\0")[1]! : "", [left, right]]);
  }
  return found;
}
