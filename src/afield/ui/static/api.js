// Data of the pages: from the server, or from the page itself if it was exported.

const element = document.getElementById("data");
export const exported = element !== null;
const embedded = exported ? JSON.parse(element.textContent) : {};
const TYPES = { f4: Float32Array, f8: Float64Array, u4: Uint32Array, u1: Uint8Array };

async function request(path) {
  if (!exported) {
    const response = await fetch(path);
    if (!response.ok) {
      const body = await response.json().catch(() => ({}));
      throw new Error(body.error || `${path}: HTTP ${response.status}`);
    }
    return response;
  }
  const address = path in embedded ? path : path.split("?")[0]; // ranges are parts of the whole
  if (!(address in embedded)) throw new Error("This file does not have these data; open the run with afield ui.");
  const bytes = Uint8Array.from(atob(embedded[address]), (c) => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip")));
}

export async function getJson(path) {
  return (await request(path)).json();
}

// A columnar answer as typed arrays by name; `text(name, row)` reads columns of strings.
export async function getColumns(path) {
  const buffer = await (await request(path)).arrayBuffer();
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const strings = {};
  const table = { header, rows: header.rows, text: (name, row) => strings[name][table[name][row]], strings };
  for (const { name, type, offset, values } of header.columns) {
    table[name] = new TYPES[type](buffer, 4 + length + offset, header.rows);
    if (values) strings[name] = values;
  }
  return table;
}

// Calls `changed` with the keys of runs that changed; returns a function that ends it.
export function live(changed) {
  if (exported) return () => {};
  const source = new EventSource("/api/live");
  source.onmessage = (event) => changed(JSON.parse(event.data).runs);
  return () => source.close();
}

export const api = {
  runs: () => "/api/runs",
  run: (run) => `/api/runs/${encodeURIComponent(run)}`,
  of: (run, kind, ...names) =>
    `/api/runs/${[run, kind, ...names].map(encodeURIComponent).join("/")}`,
  diff: (a, b, runA, runB) => `/api/diff?${new URLSearchParams({ run_a: runA, a, run_b: runB, b })}`,
  gateway: () => "/api/gateway",
};
