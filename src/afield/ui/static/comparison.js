// Figures of the page Compare, computed from the runs' data.

// Mean seconds of collecting and training a step, over the lines that have both; NaN without any.
export function stepSeconds(lines) {
  const timed = lines.filter((m) => Number.isFinite(m.collect_s) && Number.isFinite(m.train_s));
  return timed.reduce((sum, m) => sum + m.collect_s + m.train_s, 0) / timed.length;
}

// Names of the estimates of evaluations, in their order: mean reward and pass@k.
export function estimateNames(runs) {
  return [...new Set(runs.flatMap((run) => Object.keys(run.evaluation?.estimates || {})))];
}

// Split whose rollouts are compared: an evaluation has validation rollouts only.
export const sharedSplit = (runs) => (runs.some((run) => run.split === "val") ? "val" : "train");

// Mean rewards of tasks that both runs have in a split, with the largest difference first.
export function differences(tables, split) {
  const tasks = new Map();
  tables.forEach((table, side) => {
    for (let row = 0; row < table.rows; row++) {
      if (Number.isNaN(table.reward[row]) || table.text("split", row) !== split) continue;
      const task = table.text("task_id", row);
      if (!tasks.has(task)) tasks.set(task, { task, sums: [0, 0], ns: [0, 0] });
      const entry = tasks.get(task);
      entry.sums[side] += table.reward[row];
      entry.ns[side] += 1;
    }
  });
  const both = [...tasks.values()].filter((t) => t.ns[0] && t.ns[1]).map((t) => ({ ...t, means: t.sums.map((sum, i) => sum / t.ns[i]) }));
  return both.sort((a, b) => Math.abs(b.means[1] - b.means[0]) - Math.abs(a.means[1] - a.means[0]));
}
