// Records of the live views (services/gateway/domain/console_view.py) and of the admin API.

export interface Plan {
  plan_id: string;
  way: string;
  outcome: string;
  trigger: string;
  node: string | null;
  devices: string[];
  predicted_ms: number | null;
  measured_ms: number | null;
  created: number;
}

export interface Model {
  state: string;
  engine: string;
  pin: boolean;
  task: string;
  source: string;
  base: string | null;
  aliases: string[];
  weights_bytes: number;
  context_length: number;
  waiting: number;
  error: string | null;
  objective: { total: number; met: number; percentile: number; required: number } | null;
  park: { state: string; reason: string } | null;
  plan: Plan | null;
}

export interface Node {
  alive: boolean;
  cordoned: boolean;
  loader_alive: boolean;
  labels: Record<string, string>;
  snapshot_budget_bytes: number;
  snapshot_bytes: number;
  dram_budget_bytes: number;
  /** Without what instances have. */
  dram_bytes: number;
  ssd_budget_bytes: number;
  ssd_bytes: number;
  loads: Load[];
  links: Link[];
}

/** Weights on their way to a node. `total_bytes` 0: not known yet. */
export interface Load {
  model: string;
  total_bytes: number;
  loaded_bytes: number;
  fetched_bytes: number;
  on_devices: Record<string, number>;
}

export interface Link {
  link: string;
  bytes_per_second: number | null;
  /** Its bandwidth is a setting of an experiment. */
  is_paced: boolean;
  queued_bytes: number;
  loads: number;
  models: string[];
  /** Since the loader's start. */
  moved_bytes: number;
  finish_ms: number | null;
}

export interface Pull {
  model: string;
  node: string;
  tier: "ssd" | "dram";
  state: "running" | "waiting";
  reason: string;
  /** Unix seconds. */
  since: number;
  loaded_bytes: number;
  total_bytes: number;
  bytes_per_second: number | null;
}

export interface Device {
  node: string;
  device_id: string;
  kind: string;
  name: string;
  memory: string;
  budget_bytes: number;
  reserved_bytes: number;
  executor_bytes: number;
  used_bytes: number;
  separate: Separate | null;
}

export interface Separate {
  total_bytes: number;
  free_bytes: number;
  mapped_bytes: number;
  reusable_bytes: number;
  lent_bytes: number;
  models: { model: string; mapped_bytes: number; reusable_bytes: number; shared_bytes: number }[];
}

export interface Instance {
  node: string;
  model: string;
  revision: string;
  devices: string[];
  engine: string;
  state: string;
  phase: string | null;
  progress: number;
  plan_id: string;
  weights_bytes: number;
  private_bytes: number;
  kv_bytes: number;
  reserved_bytes: number;
  capacity: number;
  active: number;
  waiting: number;
  completed: number;
  tokens: number;
  idle_s: number | null;
  can_suspend: boolean;
  cannot_suspend: string;
  suspended_by: "cpu" | "cuda" | "sleep" | "sleep_cuda" | null;
  snapshot_bytes: number;
  swap_bytes: number;
  error: string | null;
  adapters: string[];
}

/** A request that has not ended. */
export interface ActiveRequest {
  model: string;
  endpoint: string;
  state: "waiting" | "running" | "following";
  /** Unix seconds. */
  received: number;
  instance_id: string | null;
  node: string;
  attempts: number;
  ttft_ms: number | null;
  output_tokens: number;
}

export interface RequestRecord {
  model: string;
  endpoint: string;
  received: number;
  instance_id: string | null;
  cold: boolean;
  status: number;
  error: string | null;
  ttft_ms: number | null;
  duration_ms: number;
  prompt_tokens: number;
  completion_tokens: number;
  phases: Record<string, number>;
  moves: number;
}

export interface Span {
  phase: string;
  start_ms: number;
  duration_ms: number;
  process: string;
}

export interface Segment {
  phase: string;
  start_ms: number;
  duration_ms: number;
}

export interface RequestTrace extends RequestRecord {
  request_id: string;
  trace_id: string;
  load_plan_id: string | null;
  spans: Span[];
  critical_path: Segment[];
}

export interface LoadTrace {
  plan_id: string;
  model: string;
  node: string;
  duration_ms: number;
  outcome: string;
  spans: Span[];
  critical_path: Segment[];
}

export interface Candidate {
  node: string;
  device_ids: string[];
  way: string;
  ready_by: string;
  predicted_ms: number | null;
  predicted: Record<string, number>;
  needed_bytes: number;
  free_bytes: number;
  victims: string[];
  excluded: string | null;
  source: string;
}

export interface PlanExplained {
  plan: {
    plan_id: string;
    model: string;
    created: number;
    trigger: string;
    way: string;
    reason: string;
    outcome: string;
    measured_ms: number | null;
    chosen: Candidate | null;
    candidates: Candidate[];
    error: { message: string } | null;
  };
  assumed: string[];
  others: PlanExplained["plan"][];
  runs_already: boolean;
}
