// The compliance tests of Open Responses, as their own command line runs them.
// usage: node openresponses.mjs TSX SOURCE

import { execFile } from 'node:child_process';
import { appendFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';

const [tsx, source] = process.argv.slice(2);
const { SUITE_BASE_URL: base, SUITE_API_KEY: apiKey, SUITE_MODEL: model, AFIELD_SUITE_RESULTS: file } = process.env;
const argv = ['bin/compliance-test.ts', '--base-url', `${base}/v1`, '--api-key', apiKey, '--model', model, '--json'];
const env = { ...process.env, NODE_OPTIONS: `--require ${fileURLToPath(new URL('websocket.cjs', import.meta.url))}` };
execFile(tsx, argv, { cwd: source, env, maxBuffer: 1 << 28 }, (_, stdout, stderr) => {
  console.log(stdout, stderr);
  for (const result of JSON.parse(stdout).results) {
    const detail = (result.errors ?? []).join('; ').replace(/\s+/g, ' ').slice(0, 400);
    appendFileSync(file, JSON.stringify({ test: result.id, outcome: result.status, detail }) + '\n');
  }
  appendFileSync(file, JSON.stringify({ finished: true }) + '\n');
});
