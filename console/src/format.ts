// Numbers as the command line prints them.

const UNITS: [number, string][] = [
  [2 ** 40, "TiB"],
  [2 ** 30, "GiB"],
  [2 ** 20, "MiB"],
  [2 ** 10, "KiB"],
];

export function size(bytes: number): string {
  for (const [unit, name] of UNITS) {
    if (Math.abs(bytes) >= unit) return `${(bytes / unit).toFixed(1)} ${name}`;
  }
  return `${bytes} B`;
}

export function duration(ms: number): string {
  if (ms < 1) return "<1 ms";
  if (ms < 999.5) return `${Math.round(ms)} ms`;
  if (ms < 59_995) return `${(ms / 1000).toFixed(2)} s`;
  const seconds = Math.round(ms / 1000);
  return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
}

export function optional(ms: number | null | undefined): string {
  return ms === null || ms === undefined ? "" : duration(ms);
}

export function idle(seconds: number): string {
  if (seconds < 60) return seconds < 10 ? "under 10 s" : `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  return `${Math.floor(seconds / 3600)} h`;
}

export function clock(unix: number): string {
  return new Date(unix * 1000).toLocaleTimeString();
}

/** The value below which a share of the numbers lies. */
export function percentile(values: number[], share: number): number | null {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.max(0, Math.ceil(share * sorted.length) - 1)] ?? null;
}

export const words = (name: string): string => name.replaceAll("_", " ");

/** A number of things, by the singular of a regular noun. */
export const counted = (n: number, noun: string): string => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
