// The console: login, navigation, and the page that the address names.

import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { post, REFUSED, session, type Session } from "./api";
import { ClusterPage } from "./cluster";
import { DoctorPage } from "./doctor";
import { KeysPage } from "./keys";
import { useLive } from "./live";
import { LogsPage } from "./logs";
import { ModelsPage } from "./models";
import { Alert } from "./parts";
import { PlaygroundPage } from "./playground";
import { ExplainPage, RequestPage, RequestsPage } from "./requests";
import { SimulatePage } from "./simulate";
import { UsagePage } from "./usage";
import "./style.css";

const PAGES = [
  ["cluster", "Cluster"],
  ["models", "Models"],
  ["requests", "Requests"],
  ["playground", "Playground"],
  ["usage", "Usage"],
  ["keys", "Keys"],
  ["doctor", "Doctor"],
  ["logs", "Logs"],
  ["simulate", "Simulate"],
] as const;

function useRoute(): string[] {
  const read = () => window.location.hash.replace(/^#\//, "").split("/").map(decode);
  const [route, setRoute] = useState(read);
  useEffect(() => {
    const changed = () => setRoute(read());
    window.addEventListener("hashchange", changed);
    changed(); // the address may have changed since the first render
    return () => window.removeEventListener("hashchange", changed);
  }, []);
  return route;
}

function decode(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function App() {
  const [rights, setRights] = useState<Session | null>(null);
  const [failure, setFailure] = useState("");
  const refresh = () =>
    session().then(
      (found) => {
        setRights(found);
        setFailure("");
      },
      (error: Error) => {
        setFailure(error.message);
        window.setTimeout(refresh, 2000);
      },
    );
  useEffect(() => {
    // Pages without a live view learn of the end of their session by a refused request.
    window.addEventListener(REFUSED, refresh);
    void refresh();
    return () => window.removeEventListener(REFUSED, refresh);
  }, []);
  if (!rights) return <main>{failure ? <Alert text={failure} /> : <p>Connecting …</p>}</main>;
  // Inference without any key may be open although the admin API is not: the login comes first then.
  if (!rights.view && !rights.key) return <LoginPage done={refresh} />;
  return <Shell rights={rights} changed={refresh} />;
}

function LoginPage({ done }: { done: () => void }) {
  const [key, setKey] = useState("");
  const [failure, setFailure] = useState("");
  const submit = async (event: Event) => {
    event.preventDefault();
    try {
      await post("/login", { key });
      setKey("");
      done();
    } catch (error) {
      setFailure(error instanceof Error ? error.message : String(error));
    }
  };
  return (
    <main class="login">
      <h1>Thaw console</h1>
      <form class="card" onSubmit={submit}>
        <label class="block">
          API key
          <input type="password" autocomplete="off" autofocus value={key} onInput={(event) => setKey(event.currentTarget.value)} />
        </label>
        <button type="submit" class="primary" disabled={!key}>Log in</button>
        <Alert text={failure} />
        <p class="quiet">
          An admin key opens everything (<code>thaw up</code> prints where it is), a read-only key the views, an inference key the playground. The page does not keep the key.
        </p>
      </form>
    </main>
  );
}

function Shell({ rights, changed }: { rights: Session; changed: () => void }) {
  const route = useRoute();
  const pages = PAGES.filter(([page]) => (page === "logs" ? rights.change : rights.view || page === "playground"));
  const page = pages.some(([name]) => name === route[0]) || (rights.view && route[0] === "explain") ? route[0]! : pages[0]![0];
  useEffect(() => {
    document.title = `Thaw: ${PAGES.find(([name]) => name === page)?.[1] ?? "placement"}`;
  }, [page]);
  const [failure, setFailure] = useState("");
  const logout = async () => {
    try {
      await post("/logout");
      changed();
    } catch (error) {
      setFailure(`You are still logged in. ${error instanceof Error ? error.message : String(error)}`);
    }
  };
  return (
    <>
      <a class="skip" href="#main" onClick={(event) => { event.preventDefault(); document.getElementById("main")?.focus(); }}>Skip to the content</a>
      <header>
        <b>Thaw</b>
        <nav aria-label="Pages">
          {pages.map(([name, title]) => (
            <a key={name} href={`#/${name}`} aria-current={page === name ? "page" : undefined}>{title}</a>
          ))}
        </nav>
        {rights.key && <button type="button" onClick={logout}>Log out</button>}
      </header>
      <main id="main" tabIndex={-1}>
        <Alert text={failure} />
        {page === "cluster" && <WithLive topics="cluster" expired={changed} show={(live) => <ClusterPage live={live} mayChange={rights.change} />} />}
        {page === "models" && <WithLive topics="cluster,requests" expired={changed} show={(live) => <ModelsPage live={live} mayChange={rights.change} name={route[1]} />} />}
        {page === "requests" && (route[1] ? <RequestPage id={route[1]} jaeger={rights.jaeger} /> : <WithLive topics="requests" expired={changed} show={(live) => <RequestsPage live={live} />} />)}
        {page === "usage" && <UsagePage />}
        {page === "keys" && <KeysPage mayChange={rights.change} />}
        {page === "doctor" && <DoctorPage />}
        {page === "logs" && <WithLive topics="cluster" expired={changed} show={(live) => <LogsPage live={live} node={route[1]} name={route[2]} />} />}
        {page === "simulate" && <SimulatePage mayChange={rights.change} />}
        {page === "explain" && <ExplainPage about={route.slice(1).join("/")} />}
        {page === "playground" && (rights.view ? <WithLive topics="cluster" expired={changed} show={(live) => <PlaygroundPage live={live} mayAsk={rights.inference} />} /> : <PlaygroundPage live={null} mayAsk={rights.inference} />)}
      </main>
    </>
  );
}

function WithLive(props: { topics: string; expired: () => void; show: (live: ReturnType<typeof useLive>) => preact.ComponentChildren }) {
  return <>{props.show(useLive(props.topics, props.expired))}</>;
}

render(<App />, document.getElementById("root")!);
