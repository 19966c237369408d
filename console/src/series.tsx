// Charts of intervals of time. Tables on the same page have their values.

import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import { colour, HEIGHT } from "./chart";

export interface Series {
  label: string;
  /** Name of a colour in style.css. */
  colour: string;
  values: (number | null)[];
  dashed?: boolean;
}

interface Props {
  label: string;
  /** Begins of the intervals in Unix seconds. */
  at: number[];
  stepS: number;
  series: Series[];
  format: (value: number) => string;
}

/** `make` gives uPlot what depends on the kind of chart. */
function useChart(props: Props, make: (element: HTMLElement) => { options: Partial<uPlot.Options>; data: uPlot.AlignedData }) {
  const box = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const element = box.current!;
    const { options, data } = make(element);
    const line = { stroke: colour("--line") };
    const axis = { stroke: colour("--text"), grid: line, ticks: line };
    const values = (_: uPlot, ticks: number[]) => ticks.map((n) => (n === null ? "" : props.format(n)));
    const end = props.at[props.at.length - 1]! + props.stepS;
    const plot = new uPlot(
      {
        width: element.clientWidth,
        height: HEIGHT,
        series: [],
        ...options,
        axes: [axis, { ...axis, size: 70, values }],
        scales: { x: { range: [props.at[0]!, end] }, ...options.scales },
      },
      data,
      element,
    );
    const resized = new ResizeObserver(() => plot.setSize({ width: element.clientWidth, height: HEIGHT }));
    resized.observe(element);
    return () => {
      resized.disconnect();
      plot.destroy();
    };
  }, [props.at, props.series]);
  return <div ref={box} class="chart" role="img" aria-label={props.label} />;
}

/** Points joined by lines, in the middle of their intervals; intervals without a value are left out. */
export function Lines(props: Props & { logarithmic?: boolean; max?: number }) {
  return useChart(props, () => ({
    options: {
      scales: { y: props.max === undefined ? { distr: props.logarithmic ? 3 : 1 } : { range: [0, props.max] } },
      series: [
        {},
        ...props.series.map((s): uPlot.Series => ({
          label: s.label,
          stroke: colour(s.colour),
          dash: s.dashed ? [6, 4] : undefined,
          spanGaps: true,
          points: { show: true, size: 6, fill: colour(s.colour) },
          value: (_, value) => (value === null || value === undefined ? "" : props.format(value)),
        })),
      ],
    },
    data: [props.at.map((at) => at + props.stepS / 2), ...props.series.map((s) => s.values)] as uPlot.AlignedData,
  }));
}

/** Bars of the intervals, one series upon the other. */
export function Stacks(props: Props) {
  return useChart(props, (element) => {
    const total = props.at.map(() => 0);
    // The sums up to each series. The largest are drawn first, and the others in front of them.
    const sums = props.series.map((s) => s.values.map((value, i) => (total[i]! += value ?? 0))).reverse();
    const drawn = [...props.series].reverse();
    const width = Math.max(1, (0.8 * element.clientWidth) / props.at.length);
    const bars = uPlot.paths.bars!({ size: [0.8, width] });
    return {
      options: {
        scales: { y: { range: (_, __, max) => [0, max || 1] } },
        series: [
          {},
          ...drawn.map((s): uPlot.Series => ({
            label: s.label,
            stroke: colour(s.colour),
            fill: colour(s.colour),
            paths: bars,
            points: { show: false },
            value: (_, __, ___, i) => {
              const value = i === null || i === undefined ? null : s.values[i];
              return value ? props.format(value) : "";
            },
          })),
        ],
      },
      data: [props.at.map((at) => at + props.stepS / 2), ...sums] as uPlot.AlignedData,
    };
  });
}
