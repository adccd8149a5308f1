// The application: address to page, header, keys, colours.

import { api, exported } from "./api.js";
import { Link, Loaded, go, html, onKeys, parseHash, render, useData, useEffect, useLayoutEffect, useRef, useState } from "./components.js";
import { ComparePage } from "./pages/compare.js";
import { DiffPage } from "./pages/diff.js";
import { ExcludedPage } from "./pages/excluded.js";
import { GatewayPage } from "./pages/gateway.js";
import { GroupPage } from "./pages/group.js";
import { RolloutPage } from "./pages/rollout.js";
import { RolloutsPage } from "./pages/rollouts.js";
import { RunPage } from "./pages/run.js";
import { RunsPage } from "./pages/runs.js";
import { TimelinePage } from "./pages/timeline.js";

const RUN_TABS = [["", "Run"], ["rollouts", "Rollouts"], ["timeline", "Timeline"], ["excluded", "Excluded"]];

// Page, its data's address, and the tab of the run that it belongs to.
function route({ parts, query }) {
  const [kind, run, page, id] = parts;
  if (kind === "compare") return [ComparePage, api.runs(), null];
  if (kind === "gateway") return [GatewayPage, api.gateway(), null];
  if (kind !== "r") return [RunsPage, api.runs(), null];
  switch (page) {
    case "rollouts": return [RolloutsPage, api.of(run, "rollouts"), "rollouts"];
    case "o": return [RolloutPage, api.of(run, "rollouts", id), "rollouts"];
    case "g": return [GroupPage, api.of(run, "groups", id), "rollouts"];
    case "diff": return [DiffPage, api.diff(query.a || "", query.b || "", run, query.run_b || run), "rollouts"];
    case "timeline": return [TimelinePage, api.of(run, "timeline"), "timeline"];
    case "excluded": return [ExcludedPage, api.of(run, "excluded"), "excluded"];
    default: return [RunPage, api.run(run), ""];
  }
}

const stored = () => { try { return localStorage.getItem("afield-theme"); } catch { return null; } };
const system = matchMedia("(prefers-color-scheme: dark)");

function applyTheme() {
  document.documentElement.dataset.theme = stored() || (system.matches ? "dark" : "light");
}

function toggleTheme() {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("afield-theme", next); } catch { /* private mode */ }
  document.documentElement.dataset.theme = next;
  dispatchEvent(new HashChangeEvent("hashchange"));
}

const KEYS = [
  ["j k ↑ ↓", "move in a table"], ["Enter", "open the row"], ["/", "search"], ["1 2 3 4", "pages of the run"],
  ["[ ]", "previous and next rollout"], ["← →", "move the window of tokens"], ["u", "up: rollout, group, run, all runs"],
  ["t", "dark or light"], ["?", "this help"],
];

function App() {
  const [place, setPlace] = useState(parseHash());
  const help = useRef(null);
  const [Page, json, tab] = route(place);
  const [kind, run, page] = place.parts;
  const inRun = kind === "r" && run;
  useEffect(() => {
    const listener = () => setPlace(parseHash());
    addEventListener("hashchange", listener);
    listener(); // the address may have changed since the first rendering
    system.addEventListener("change", () => { applyTheme(); listener(); });
    return () => removeEventListener("hashchange", listener);
  }, []);
  useEffect(() => { scrollTo(0, 0); }, [place.parts.join("/")]);
  useEffect(() => { document.title = [...place.parts.slice(1), "afield"].join(" · "); }, [place]);
  useLayoutEffect(() => onKeys({
    t: toggleTheme,
    "?": () => help.current.showModal(),
    "/": () => document.querySelector("input[type=search]")?.focus(),
    u: () => (inRun ? go(page && page !== "rollouts" && tab === "rollouts" ? ["r", run, "rollouts"] : page ? ["r", run] : []) : go([])),
    ...(inRun ? Object.fromEntries(RUN_TABS.map(([name], i) => [String(i + 1), () => go(["r", run, name].filter(Boolean))])) : {}),
  }), [place]);
  return html`
    <header class="top">
      <${Link} to=${[]} class="brand">afield</${Link}>
      ${inRun && html`<nav aria-label="run">${RUN_TABS.map(([name, title]) => html`<${Link} to=${["r", run, name].filter(Boolean)}
        aria-current=${tab === name ? "page" : null}>${title}</${Link}>`)}</nav>`}
      <nav class="right" aria-label="all runs">
        <${Link} to=${[]} aria-current=${kind ? null : "page"}>Runs</${Link}>
        <${Link} to=${["compare"]} query=${inRun ? { runs: run } : {}} aria-current=${kind === "compare" ? "page" : null}>Compare</${Link}>
        ${!exported && html`<${Link} to=${["gateway"]} aria-current=${kind === "gateway" ? "page" : null}>Gateway</${Link}>`}
        <button onClick=${toggleTheme} title="dark or light (t)" aria-label="dark or light">◐</button>
        <button onClick=${() => help.current.showModal()} title="keys (?)" aria-label="keys" class="hide-phone">?</button>
      </nav>
    </header>
    <main><${Page} key=${place.parts.join("/")} parts=${place.parts} query=${place.query} /></main>
    <footer>${exported ? "exported file" : html`<a href=${json} target="_blank" rel="noopener">this page as JSON</a>`}</footer>
    <dialog ref=${help} onClick=${(e) => e.currentTarget.close()}><table><tbody>
      ${KEYS.map(([key, text]) => html`<tr><td><kbd>${key}</kbd></td><td>${text}</td></tr>`)}</tbody></table></dialog>`;
}

applyTheme();
const root = document.getElementById("app");
root.replaceChildren();
render(html`<${App} />`, root);
