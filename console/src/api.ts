// Requests to the gateway. The session is a cookie that this script cannot read.

const SESSION_TIMEOUT_MS = 10_000;
const CHANGE = { "x-thaw-console": "1", "content-type": "application/json" };

export interface Session {
  view: boolean;
  change: boolean;
  inference: boolean;
  key: boolean;
  guarded: boolean;
  /** Where Jaeger shows traces; absent: nowhere, or not to this session. */
  jaeger?: string;
}

/** Dispatched on the window when the gateway refuses the session's key: it was revoked, or the session has ended. */
export const REFUSED = "thaw-refused";

export class ApiError extends Error {
  constructor(
    message: string,
    readonly status: number,
  ) {
    super(message);
  }
}

async function decode(response: Response): Promise<any> {
  const text = await response.text();
  let body: any = null;
  try {
    body = text ? JSON.parse(text) : null;
  } catch {
    throw new ApiError(`The gateway answered with status ${response.status}.`, response.status);
  }
  if (!response.ok) throw new ApiError(body?.error?.message ?? `Status ${response.status}`, response.status);
  return body;
}

/** Report a refusal. `session` does not: its caller is who asks again. */
function report(response: Response): Response {
  if (response.status === 401) window.dispatchEvent(new Event(REFUSED));
  return response;
}

async function send(path: string, body?: unknown, method = "POST", signal?: AbortSignal): Promise<Response> {
  const content = body === undefined ? undefined : JSON.stringify(body);
  return report(await fetch(`/ui${path}`, { method, headers: CHANGE, body: content, signal }));
}

export async function get(path: string): Promise<any> {
  return decode(report(await fetch(`/ui${path}`)));
}

export async function post(path: string, body?: unknown): Promise<any> {
  return decode(await send(path, body));
}

/** A response that the caller reads as it arrives. An error of the gateway is thrown. */
export async function stream(path: string, body: unknown, signal: AbortSignal): Promise<Response> {
  const response = await send(path, body, "POST", signal);
  if (!response.ok) await decode(response);
  return response;
}

/** Without it the page shows nothing: unlike others, this request has a time limit. */
export async function session(): Promise<Session> {
  const late = new AbortController();
  const timer = window.setTimeout(() => late.abort(), SESSION_TIMEOUT_MS);
  try {
    return await decode(await fetch("/ui/session", { signal: late.signal }));
  } catch (error) {
    throw late.signal.aborted ? new ApiError("The gateway does not answer. This page asks it again.", 0) : error;
  } finally {
    window.clearTimeout(timer);
  }
}

export const admin = (path: string): Promise<any> => get(`/api/admin/v1/${path}`);
export const change = (path: string, body?: unknown): Promise<any> => post(`/api/admin/v1/${path}`, body);
export const patch = async (path: string, body: unknown): Promise<any> => decode(await send(`/api/admin/v1/${path}`, body, "PATCH"));
export const remove = async (path: string): Promise<any> => decode(await send(`/api/admin/v1/${path}`, undefined, "DELETE"));
/** Names of models may contain slashes, which stay separators of the path. */
export const inPath = (name: string): string => name.split("/").map(encodeURIComponent).join("/");
