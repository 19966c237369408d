// A chat with a model: streamed, with the phase shown while the model wakes, and as curl and Python.

import { useEffect, useRef, useState } from "preact/hooks";
import { get, send } from "./api";
import { duration } from "./format";
import type { Live } from "./live";
import { Freshness } from "./parts";

interface Turn {
  role: "user" | "assistant";
  content: string;
}

interface Progress {
  note: string;
  started: number;
  firstToken: number | null;
  requestId: string;
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

function quoteForShell(text: string): string {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

export function asCurl(origin: string, body: object): string {
  return [
    `curl -N ${origin}/v1/chat/completions`,
    `  -H "Authorization: Bearer $THAW_API_KEY"`,
    `  -H 'Content-Type: application/json'`,
    `  -d ${quoteForShell(JSON.stringify(body))}`,
  ].join(" \\\n");
}

/** JSON strings and numbers are Python literals too; the request has no true, false or null but `stream`. */
export function asPython(origin: string, body: { model: string; messages: object[]; max_tokens: number }): string {
  return [
    "import os",
    "import openai",
    "",
    `client = openai.OpenAI(base_url=${JSON.stringify(`${origin}/v1`)}, api_key=os.environ.get("THAW_API_KEY", "none"))`,
    "stream = client.chat.completions.create(",
    `    model=${JSON.stringify(body.model)},`,
    `    messages=${JSON.stringify(body.messages)},`,
    `    max_tokens=${body.max_tokens},`,
    "    stream=True,",
    ")",
    "for chunk in stream:",
    `    print(chunk.choices[0].delta.content or "", end="", flush=True)`,
  ].join("\n");
}

export function PlaygroundPage({ live }: { live: Live | null }) {
  const [names, setNames] = useState<string[]>([]);
  const [model, setModel] = useState("");
  const [text, setText] = useState("");
  const [maxTokens, setMaxTokens] = useState(128);
  const [turns, setTurns] = useState<Turn[]>([]);
  const [progress, setProgress] = useState<Progress | null>(null);
  const [failure, setFailure] = useState("");
  const abort = useRef<AbortController | undefined>(undefined);
  const busy = progress !== null && abort.current !== undefined;

  useEffect(() => {
    get("/api/v1/models").then(
      (page: { data: { id: string; task: string }[] }) => {
        const chats = page.data.filter((m) => m.task !== "embed").map((m) => m.id).sort();
        setNames(chats);
        setModel((before) => before || chats[0] || "");
      },
      (error: Error) => setFailure(`${error.message} Log out, and log in with an inference key to use the playground.`),
    );
    return () => abort.current?.abort();
  }, []);

  const asked: Turn[] = text ? [...turns, { role: "user", content: text }] : turns;
  const body = { model, messages: asked.filter((t) => t.content), max_tokens: maxTokens, stream: true };

  const submit = async (event: Event) => {
    event.preventDefault();
    if (!model || !text || busy) return;
    const started = performance.now();
    abort.current = new AbortController();
    setFailure("");
    setText("");
    setTurns([...asked, { role: "assistant", content: "" }]);
    setProgress({ note: "sent", started, firstToken: null, requestId: "" });
    try {
      const response = await send("/api/v1/chat/completions", body, abort.current.signal);
      if (!response.ok || !response.body) throw new Error((await response.json())?.error?.message ?? `Status ${response.status}`);
      const requestId = response.headers.get("x-request-id") ?? "";
      setProgress((p) => p && { ...p, requestId });
      for await (const line of lines(response.body as ReadableStream<BufferSource>)) {
        if (line.startsWith(":")) setProgress((p) => p && { ...p, note: line.slice(1).trim() });
        else if (line.startsWith("data: ") && line !== "data: [DONE]") {
          const chunk = JSON.parse(line.slice(6));
          if (chunk.error) throw new Error(chunk.error.message);
          const token: string = chunk.choices?.[0]?.delta?.content ?? "";
          if (!token) continue;
          setProgress((p) => p && { ...p, firstToken: p.firstToken ?? performance.now(), note: "generating" });
          setTurns((before) => {
            const last = before[before.length - 1]!;
            return [...before.slice(0, -1), { ...last, content: last.content + token }];
          });
        }
      }
      setProgress((p) => p && { ...p, note: "done" });
    } catch (error) {
      const stopped = error instanceof DOMException && error.name === "AbortError";
      setProgress((p) => p && { ...p, note: stopped ? "stopped" : "failed" });
      if (!stopped) setFailure(error instanceof Error ? error.message : String(error));
    } finally {
      abort.current = undefined;
      // A rendering shows that the request is over.
      setTurns((before) => [...before]);
    }
  };

  const start = live && Object.values(live.instances).find((i) => i.model === model && i.phase && ["preparing", "loading", "resuming"].includes(i.state));
  const origin = window.location.origin;
  return (
    <>
      <h1>Playground</h1>
      {live && <Freshness live={live} />}
      <form class="card" onSubmit={submit}>
        <div class="row">
          <label>
            Model{" "}
            <select value={model} onChange={(event) => setModel(event.currentTarget.value)}>
              {names.map((name) => <option key={name}>{name}</option>)}
            </select>
          </label>
          <label>
            Tokens at most{" "}
            <input type="number" min={1} max={100000} value={maxTokens} onInput={(event) => setMaxTokens(Number(event.currentTarget.value) || 1)} />
          </label>
          <button type="button" onClick={() => setTurns([])} disabled={busy || !turns.length}>New chat</button>
        </div>
        <div class="chat" role="log" aria-label="Conversation">
          {turns.map((turn, i) => (
            <p key={i} class={`turn ${turn.role}`}><b>{turn.role === "user" ? "You" : model}</b> {turn.content}</p>
          ))}
        </div>
        {progress && (
          <p role="status" class="quiet" aria-label="Progress">
            {busy && start ? `${model} wakes: ${start.phase} ${Math.round(100 * start.progress)}%` : progress.note}
            {progress.firstToken !== null && `, first token after ${duration(progress.firstToken - progress.started)}`}
            {progress.requestId && live && progress.note === "done" && (
              <> (<a href={`#/requests/${encodeURIComponent(progress.requestId)}`}>waterfall</a>)</>
            )}
          </p>
        )}
        {failure && <p class="failure" role="alert">{failure}</p>}
        <label class="block">
          Message
          <textarea rows={3} value={text} onInput={(event) => setText(event.currentTarget.value)}
            onKeyDown={(event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && submit(event)} />
        </label>
        <button type="submit" class="primary" disabled={busy || !model || !text}>Send</button>{" "}
        <button type="button" disabled={!busy} onClick={() => abort.current?.abort()}>Stop</button>
      </form>
      <details class="card">
        <summary>This request as curl and as Python</summary>
        <h2>curl</h2>
        <pre tabIndex={0} aria-label="The request as curl">{asCurl(origin, body)}</pre>
        <h2>Python</h2>
        <pre tabIndex={0} aria-label="The request as Python">{asPython(origin, body)}</pre>
      </details>
    </>
  );
}
