// A chat with one model, or with two side by side: streamed, with the phase and estimate while they wake.

import { useEffect, useState } from "preact/hooks";
import { ApiError, get } from "./api";
import { messagesOf, tokensPerSecond, useChat, type Answer, type Chat, type Turn } from "./chat";
import { asCurl, asPython } from "./code";
import { duration } from "./format";
import type { Live } from "./live";
import { Alert, Freshness } from "./parts";

const WAKING = ["preparing", "loading", "resuming"];

export function PlaygroundPage({ live, mayAsk }: { live: Live | null; mayAsk: boolean }) {
  const [names, setNames] = useState<string[]>([]);
  const [model, setModel] = useState("");
  const [other, setOther] = useState("");
  const [text, setText] = useState("");
  const [maxTokens, setMaxTokens] = useState(128);
  const [failure, setFailure] = useState("");
  const first = useChat();
  const second = useChat();
  const busy = first.busy || second.busy;

  // Models that are registered or removed while the page is open.
  const registered = Object.keys(live?.models ?? {}).sort().join("\n");
  useEffect(() => {
    let current = true;
    const show = (page: { data: { id: string; task: string }[] }) => {
      if (!current) return;
      const chats = page.data.filter((m) => m.task !== "embed").map((m) => m.id).sort();
      setNames(chats);
      setModel((before) => (chats.includes(before) ? before : chats[0] ?? ""));
      setOther((before) => (chats.includes(before) ? before : ""));
      setFailure("");
    };
    const fail = (error: Error) => {
      if (!current) return;
      const isRefused = error instanceof ApiError && (error.status === 401 || error.status === 403);
      setFailure(`${error.message}${isRefused ? " Log out, and log in with an inference key to use the playground." : ""}`);
    };
    get("/api/v1/models").then(show, fail);
    return () => {
      current = false;
    };
  }, [registered]);

  const columns: [string, Chat][] = other ? [[model, first], [other, second]] : [[model, first]];
  const submit = (event: Event) => {
    event.preventDefault();
    if (!mayAsk || !model || !text || busy) return;
    setText("");
    for (const [name, chat] of columns) void chat.ask(name, text, maxTokens, live?.models[name]?.plan?.plan_id ?? null);
  };
  const choose = (name: string) => {
    setModel(name);
    if (name === other) setOther("");
  };
  const clear = () => {
    first.clear();
    second.clear();
  };
  return (
    <>
      <h1>Playground</h1>
      {live && <Freshness live={live} />}
      {!mayAsk && !failure && <p class="notice">The key of this session may not ask models. Log out, and log in with an inference key to use the playground.</p>}
      <form class="card" onSubmit={submit}>
        <div class="row">
          <label>
            Model{" "}
            <select value={model} disabled={busy} onChange={(event) => choose(event.currentTarget.value)}>
              {names.map((name) => <option key={name}>{name}</option>)}
            </select>
          </label>
          <label>
            Compare with{" "}
            <select value={other} disabled={busy} onChange={(event) => { setOther(event.currentTarget.value); second.clear(); }}>
              <option value="">none</option>
              {names.filter((name) => name !== model).map((name) => <option key={name}>{name}</option>)}
            </select>
          </label>
          <label>
            Tokens at most{" "}
            <input type="number" min={1} max={100000} value={maxTokens} onInput={(event) => setMaxTokens(Number(event.currentTarget.value) || 1)} />
          </label>
          <button type="button" onClick={clear} disabled={busy || !(first.turns.length || second.turns.length)}>New chat</button>
        </div>
        <div class="side-by-side">
          {columns.map(([name, chat], i) => <Conversation key={i} model={name} chat={chat} live={live} />)}
        </div>
        <Alert text={failure} />
        <label class="block">
          Message
          <textarea rows={3} value={text} onInput={(event) => setText(event.currentTarget.value)}
            onKeyDown={(event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && submit(event)} />
        </label>
        <button type="submit" class="primary" disabled={!mayAsk || busy || !model || !text}>Send</button>{" "}
        <button type="button" disabled={!busy} onClick={() => columns.forEach(([, chat]) => chat.stop())}>Stop</button>
      </form>
      <details class="card">
        <summary>This request as curl and as Python</summary>
        {columns.map(([name, chat]) => <Code key={name} model={name} turns={chat.turns} text={text} maxTokens={maxTokens} />)}
      </details>
    </>
  );
}

function Conversation({ model, chat, live }: { model: string; chat: Chat; live: Live | null }) {
  return (
    <section aria-label={`Conversation with ${model}`}>
      <h2>{model}</h2>
      <div class="chat" role="log" tabIndex={0} aria-label={`Messages of ${model}`}>
        {chat.turns.map((turn, i) => (
          <p key={i} class={`turn ${turn.role}`}><b>{turn.role === "user" ? "You" : model}</b> {turn.content}</p>
        ))}
      </div>
      {chat.answer && <Progress model={model} answer={chat.answer} busy={chat.busy} live={live} />}
      <Alert text={chat.failure} />
    </section>
  );
}

/** What the model does, the estimate of its start, and the times of its answer. */
function Progress({ model, answer, busy, live }: { model: string; answer: Answer; busy: boolean; live: Live | null }) {
  const waits = busy && answer.firstTokenAt === null;
  const start = waits && live && Object.values(live.instances).find((i) => i.model === model && i.phase && WAKING.includes(i.state));
  // The gateway's comments say it, after some seconds without a token.
  const remaining = /eta=([\d.]+s)/.exec(answer.note)?.[1];
  const latest = live?.models[model]?.plan;
  const plan = latest && latest.plan_id !== answer.planBefore ? latest : null;
  const speed = tokensPerSecond(answer);
  const facts = [
    start ? `${model} wakes: ${start.phase} ${Math.round(100 * start.progress)}%` : answer.note,
    start && remaining && `ready in about ${remaining}`,
    plan && plan.predicted_ms !== null && `cold start, estimated at ${duration(plan.predicted_ms)}`,
    plan && plan.measured_ms !== null && `it took ${duration(plan.measured_ms)}`,
    answer.firstTokenAt !== null && `first token after ${duration(answer.firstTokenAt - answer.sentAt)}`,
    speed !== null && `${speed.toFixed(1)} tokens/s`,
    answer.completionTokens !== null && `${answer.completionTokens} tokens`,
  ];
  return (
    <p role="status" class="quiet" aria-label={`Progress of ${model}`}>
      {facts.filter(Boolean).join(", ")}
      {answer.requestId && live && !busy && answer.note === "done" && (
        <> (<a href={`#/requests/${encodeURIComponent(answer.requestId)}`}>waterfall</a>)</>
      )}
    </p>
  );
}

function Code({ model, turns, text, maxTokens }: { model: string; turns: Turn[]; text: string; maxTokens: number }) {
  const sent = turns[turns.length - 1]?.content === "" ? turns.slice(0, -1) : turns; // the answer has not begun
  const asked: Turn[] = text ? [...turns, { role: "user", content: text }] : sent;
  const body = { model, messages: messagesOf(asked), max_tokens: maxTokens, stream: true };
  const origin = window.location.origin;
  return (
    <>
      <h2>{model}: curl</h2>
      <pre tabIndex={0} role="region" aria-label={`The request as curl, to ${model}`}>{asCurl(origin, body)}</pre>
      <h2>{model}: Python</h2>
      <pre tabIndex={0} role="region" aria-label={`The request as Python, to ${model}`}>{asPython(origin, body)}</pre>
    </>
  );
}
