// A conversation with one model: the stream of its answers, and how long they took.

import { useEffect, useRef, useState } from "preact/hooks";
import { stream } from "./api";

export interface Turn {
  role: "user" | "assistant";
  content: string;
}

/** The latest answer; times are those of `performance.now()`. */
export interface Answer {
  note: string;
  sentAt: number;
  firstTokenAt: number | null;
  lastTokenAt: number | null;
  /** As the engine counts them; null until the stream's end. */
  completionTokens: number | null;
  requestId: string;
  /** The model's last placement decision when the request was sent: a later one is a cold start for it. */
  planBefore: string | null;
}

export interface Chat {
  turns: Turn[];
  answer: Answer | null;
  failure: string;
  busy: boolean;
  ask: (model: string, text: string, maxTokens: number, planBefore: string | null) => Promise<void>;
  stop: () => void;
  clear: () => void;
}

/** Split a stream into events and comments, as the gateway writes them. */
async function* lines(body: ReadableStream<BufferSource>): AsyncGenerator<string> {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += value;
    const complete = rest.split("\n");
    rest = complete.pop()!;
    yield* complete.filter(Boolean);
  }
}

/** The messages to send. A question without an answer is left out: chat templates may refuse two questions in a row. */
export function messagesOf(turns: Turn[]): Turn[] {
  return turns.filter((turn, i) => turn.content && (turn.role === "assistant" || turns[i + 1]?.content !== ""));
}

/** Tokens per second after the first one; null before an answer of two tokens has ended. */
export function tokensPerSecond(answer: Answer): number | null {
  const { completionTokens, firstTokenAt, lastTokenAt } = answer;
  if (completionTokens === null || completionTokens < 2 || firstTokenAt === null || lastTokenAt === null) return null;
  return lastTokenAt > firstTokenAt ? ((completionTokens - 1) * 1000) / (lastTokenAt - firstTokenAt) : null;
}

export function useChat(): Chat {
  const [turns, setTurns] = useState<Turn[]>([]);
  const [answer, setAnswer] = useState<Answer | null>(null);
  const [failure, setFailure] = useState("");
  const [busy, setBusy] = useState(false);
  const abort = useRef<AbortController | undefined>(undefined);
  useEffect(() => () => abort.current?.abort(), []);

  const ask = async (model: string, text: string, maxTokens: number, planBefore: string | null) => {
    const asked: Turn[] = [...turns, { role: "user", content: text }];
    const update = (more: Partial<Answer>) => setAnswer((before) => before && { ...before, ...more });
    const receive = (event: any) => {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) update({ completionTokens: event.usage.completion_tokens });
      const token: string = event.choices?.[0]?.delta?.content ?? "";
      if (!token) return;
      const now = performance.now();
      setAnswer((before) => before && { ...before, firstTokenAt: before.firstTokenAt ?? now, lastTokenAt: now, note: "generating" });
      setTurns((before) => {
        const last = before[before.length - 1]!;
        return [...before.slice(0, -1), { ...last, content: last.content + token }];
      });
    };
    abort.current = new AbortController();
    setBusy(true);
    setFailure("");
    setTurns([...asked, { role: "assistant", content: "" }]);
    setAnswer({ note: "sent", sentAt: performance.now(), firstTokenAt: null, lastTokenAt: null, completionTokens: null, requestId: "", planBefore });
    try {
      const messages = messagesOf(asked);
      const body = { model, messages, max_tokens: maxTokens, stream: true, stream_options: { include_usage: true } };
      const response = await stream("/api/v1/chat/completions", body, abort.current.signal);
      update({ requestId: response.headers.get("x-request-id") ?? "" });
      let ended = false;
      for await (const line of lines(response.body as ReadableStream<BufferSource>)) {
        if (line.startsWith(":")) update({ note: line.slice(1).trim() });
        else if (line === "data: [DONE]") ended = true;
        else if (line.startsWith("data: ")) receive(JSON.parse(line.slice(6)));
      }
      if (!ended) throw new Error("The connection to the gateway ended in the middle of the answer.");
      update({ note: "done" });
    } catch (error) {
      const stopped = error instanceof DOMException && error.name === "AbortError";
      update({ note: stopped ? "stopped" : "failed" });
      if (!stopped) setFailure(error instanceof Error ? error.message : String(error));
    } finally {
      setBusy(false);
    }
  };
  const clear = () => {
    setTurns([]);
    setAnswer(null);
    setFailure("");
  };
  return { turns, answer, failure, busy, ask, stop: () => abort.current?.abort(), clear };
}
