// Charts over the time of day. Tables on the same page have their values.

import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { duration } from "./format";
import type { RequestRecord } from "./types";

export const HEIGHT = 180;

function series(requests: RequestRecord[]): uPlot.AlignedData {
  const sorted = requests.filter((r) => r.ttft_ms !== null).sort((a, b) => a.received - b.received);
  const pick = (cold: boolean) => sorted.map((r) => (r.cold === cold ? r.ttft_ms : null));
  return [sorted.map((r) => r.received), pick(true), pick(false)];
}

export function colour(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function LatencyChart({ requests }: { requests: RequestRecord[] }) {
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | undefined>(undefined);
  useEffect(() => {
    const element = box.current!;
    const axis = { stroke: colour("--text"), grid: { stroke: colour("--line") }, ticks: { stroke: colour("--line") } };
    const dots = (label: string, stroke: string): uPlot.Series => ({
      label,
      stroke,
      paths: () => null,
      points: { show: true, size: 6, fill: stroke },
      value: (_, ms) => (ms === null || ms === undefined ? "" : duration(ms)),
    });
    const options: uPlot.Options = {
      width: element.clientWidth,
      height: HEIGHT,
      scales: { y: { distr: 3 } },
      axes: [axis, { ...axis, size: 70, values: (_, ticks) => ticks.map((ms) => (ms === null ? "" : duration(ms))) }],
      series: [{}, dots("cold start", colour("--cold")), dots("warm", colour("--warm"))],
    };
    plot.current = new uPlot(options, series(requests), element);
    const resized = new ResizeObserver(() => plot.current?.setSize({ width: element.clientWidth, height: HEIGHT }));
    resized.observe(element);
    return () => {
      resized.disconnect();
      plot.current?.destroy();
    };
  }, []);
  useEffect(() => plot.current?.setData(series(requests)), [requests]);
  return <div ref={box} class="chart" role="img" aria-label="Times to the first token of the latest requests. The table below has the values." />;
}

const HOUR_S = 3600;

/** Sums of the latest hours as bars, side by side; `data` has the hours in Unix seconds and a row for each of two names. */
export function Bars({ data, hours, names, label }: { data: number[][]; hours: number; names: string[]; label: string }) {
  const box = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const element = box.current!;
    const axis = { stroke: colour("--text"), grid: { stroke: colour("--line") }, ticks: { stroke: colour("--line") } };
    const colours = [colour("--weights"), colour("--kv")];
    const last = Math.floor(Date.now() / 1000 / HOUR_S) * HOUR_S;
    // The present hour is the last of the span. Bars are centred on the begin of their hour.
    const range: [number, number] = [last - (hours - 0.5) * HOUR_S, last + 0.5 * HOUR_S];
    // An hour has its share of the chart's width, also if no other hour has a bar.
    const width = Math.max(1, Math.min(20, (0.4 * element.clientWidth) / hours));
    const bars = [-1, 1].map((align) => uPlot.paths.bars!({ size: [0.4, width], align: align as -1 | 1 }));
    const options: uPlot.Options = {
      width: element.clientWidth,
      height: HEIGHT,
      scales: { x: { range }, y: { range: (_, __, max) => [0, max || 1] } },
      axes: [axis, { ...axis, size: 80, values: (_, ticks) => ticks.map((n) => n.toLocaleString()) }],
      series: [{}, ...names.map((name, i) => ({ label: name, stroke: colours[i], fill: colours[i], paths: bars[i], points: { show: false } }))],
    };
    const plot = new uPlot(options, data as uPlot.AlignedData, element);
    return () => plot.destroy();
  }, [data, hours]);
  return <div ref={box} class="chart" role="img" aria-label={label} />;
}
