// A run as a whole: what became of its prompts, whether the laws hold, how its batches went, why rollouts failed.

function overview(runs, go) {
  return el("section.overview", {}, runs.map((run) => runSummary(run, runs.length > 1)), verdicts(runs), batchCharts(runs), runs.map((run) => sampleCharts(run, runs.length > 1)), runs.map((run) => passRates(run, runs.length > 1)), runs.map((run) => failureTable(run, go)));
}

function runSummary(run, several) {
  const { info } = run;
  const endpoint = info.endpoint || {};
  const facts = [info.recipe, info.status, info.started && `started ${info.started}`, endpoint.model || info.model, info.server && info.server.version].filter(Boolean);
  const estimates = Object.entries(info.estimates || {});
  return el("section.summary", {},
    several ? el("h2", {}, visibleText(run.title)) : null,
    el("p.facts", {}, visibleText(facts.join(" · "))),
    info.error ? el("p.bad", {}, visibleText(String(info.error))) : null,
    estimates.length ? el("table", {}, el("tbody", {}, estimates.map(([name, value]) => el("tr", {}, el("th", {}, name), el("td", {}, `${shown(value.value)} [${shown(value.low)}, ${shown(value.high)}]`))))) : null,
    lengthBias(run),
    accountingChart(run));
}

/** A warning where groups that were dropped for their age made the rollouts in batches shorter than all. */
function lengthBias(run) {
  const last = run.metrics[run.metrics.length - 1] || {};
  if (!(last["staleness/length"] < 0.95)) return null;
  return el("p.bad", {}, `max_staleness drops long groups: ${Math.round(100 * last["staleness/dropped"])} % of the groups were too old, and a rollout in a batch has ${shown(last["staleness/length"])} of the mean length of all`);
}

function accountingChart(run) {
  const counts = run.info.accounting;
  const byReason = new Map();
  for (let position = 0; position < run.count; position++) {
    const outcome = run.name("outcome", run.groups.outcome[position]);
    if (outcome !== "dropped" && outcome !== "failed") continue;
    const rows = run.rows(position);
    const cause = rows.map((row) => causeOf(run, row)).find((found) => found !== null);
    const name = outcome === "failed" ? `failed: ${cause || run.name("reason", run.groups.reason[position]) || "unknown"}` : `dropped: ${run.name("reason", run.groups.reason[position]) || "by the filter"}`;
    byReason.set(name, (byReason.get(name) || 0) + 1);
  }
  if (!counts) return null;
  const ends = [{ name: "in a batch", count: counts.in_batch, colour: "var(--good)" }];
  for (const [name, count] of [...byReason].sort(([, a], [, b]) => b - a)) ends.push({ name: visibleText(name).slice(0, 60), count, colour: name.startsWith("failed") ? "var(--bad)" : "var(--middle)" });
  ends.push({ name: "ready, in no batch", count: counts.ready, colour: "var(--a)" }, { name: "in flight", count: counts.in_flight, colour: "var(--b)" }, { name: "returned to the data", count: counts.returned, colour: "var(--none)" });
  return flowChart("where the prompts went", counts.taken, ends);
}

function verdicts(runs) {
  return runs.filter((run) => run.report).map(({ report, title }) => el(report.ok ? "section.verdict.good" : "section.verdict.bad", {},
    el("h3", {}, runs.length > 1 ? `${visibleText(title)}: ` : "", report.ok ? "laws 1 to 5 hold" : "a law is broken"),
    el("p", {}, report.laws.map(([law, name, broken]) => `${law} ${name}${broken ? ` (${broken} violations)` : ""}`).join(" · ")),
    report.violations.length ? el("ul", {}, report.violations.map(([law, place, got, expected]) => el("li", {}, visibleText(`law ${law}: ${place}: got ${got}; expected ${expected}`)))) : null,
    report.notes.length ? el("details", {}, el("summary", {}, `${report.notes.length} checks were not made`), el("ul", {}, report.notes.map((note) => el("li", {}, visibleText(note))))) : null));
}

const BATCH_CHARTS = [
  ["reward of a batch", [["reward/mean", "mean", "reward/std"]]],
  ["share of groups without spread, kept and dropped", [["zero spread", "share"]]],
  ["sampled tokens of a rollout", [["sampled_tokens/kept", "kept"], ["sampled_tokens/all", "all that finished"], ["sampled_tokens/dropped", "dropped"]]],
  ["response length", [["response_length/mean", "mean"], ["response_length/max", "largest"]]],
  ["turns", [["turns/mean", "mean"]]],
  ["tool calls of a rollout", [["episode/tool_calls", "calls"], ["episode/tool_errors", "errors"]]],
  ["prefix cache", [["prefix_cache_hit_rate", "share of prompt tokens"]]],
  ["prompts that the sampler knows", [["sampler/tried", "tried"], ["sampler/always_passed", "always passed"], ["sampler/never_passed", "never passed"]]],
  ["policy versions in a batch", [["policy_versions", "versions"], ["staleness/max", "largest staleness"], ["staleness/mean", "mean staleness"]]],
  ["groups dropped for their age", [["staleness/dropped", "share"], ["staleness/length", "length in batches over that of all"]]],
  ["share of the slots that run a rollout", [["slots/busy", "share"]]],
  ["seconds of a batch", [["seconds", "batch"], ["episode/generation_seconds", "generation, of a rollout"], ["episode/environment_seconds", "environment, of a rollout"]]],
];

function batchCharts(runs) {
  const most = Math.max(...runs.map((run) => run.metrics.length));
  if (!most) return null;
  const labels = Array.from({ length: most }, (_, batch) => `batch ${batch}`);
  const known = new Set(BATCH_CHARTS.flatMap(([, lines]) => lines.map(([name]) => name)));
  const charts = BATCH_CHARTS.map(([title, lines]) => lineChart(title, runs.flatMap((run) => lines.map(([name, label, spread]) => {
    const values = labels.map((_, batch) => valueOf(run, batch, name));
    const about = spread && labels.map((_, batch) => valueOf(run, batch, spread));
    return {
      name: runs.length > 1 ? `${run.title}: ${label}` : label,
      values,
      ...(about && runs.length === 1 ? { low: values.map((value, batch) => isNumber(value) && isNumber(about[batch]) ? value - about[batch] : null), high: values.map((value, batch) => isNumber(value) && isNumber(about[batch]) ? value + about[batch] : null) } : {}),
    };
  })), labels)).filter(Boolean);
  const others = [...new Set(runs.flatMap((run) => run.metrics.flatMap((line) => Object.keys(line))))].filter((name) => !known.has(name) && !["batch", "crc32"].includes(name)).sort();
  const other = el("div", {});
  const choice = el("select", { name: "metric", "aria-label": "another metric", onchange: (event) => other.replaceChildren(...[lineChart(event.target.value, runs.map((run) => ({ name: run.title, values: labels.map((_, batch) => valueOf(run, batch, event.target.value)) })), labels)].filter(Boolean)) },
    el("option", { value: "" }, "another metric …"), others.map((name) => el("option", { value: name }, name)));
  return el("section.charts", {}, charts, el("div", {}, choice, other));
}

function valueOf(run, batch, name) {
  const line = run.metrics[batch];
  if (!line) return null;
  return name === "zero spread" ? zeroSpread(run)[batch] : (line[name] ?? null);
}

/** For each batch: the share of groups without spread among those that were kept or dropped since the batch before. */
function zeroSpread(run) {
  if (!run.zeroSpread) {
    const positions = Array.from({ length: run.count }, (_, position) => position);
    const dropped = positions.filter((position) => run.name("outcome", run.groups.outcome[position]) === "dropped"); // in the order in which they were
    const kept = new Map();
    for (const position of positions) {
      const batch = run.groups.batch[position];
      if (batch === null) continue;
      if (!kept.has(batch)) kept.set(batch, []);
      kept.get(batch).push(position);
    }
    let before = 0;
    run.zeroSpread = run.metrics.map((line) => {
      const until = line["prompts/dropped"] ?? before;
      const settled = [...(kept.get(line.batch) || []), ...dropped.slice(before, until)];
      before = until;
      return settled.length ? settled.filter((position) => spreadOf(run, position) === 0).length / settled.length : null;
    });
  }
  return run.zeroSpread;
}

function sampleCharts(run, several) {
  const counted = (kind) => {
    const counts = new Map();
    run.samples[kind].forEach((number) => counts.set(run.name(kind, number), (counts.get(run.name(kind, number)) || 0) + 1));
    return [...counts].sort(([, a], [, b]) => b - a);
  };
  const title = several ? `${run.title}: ` : "";
  return el("section.charts", {}, countChart(`${title}why rollouts stopped`, counted("stop").filter(([name]) => name)), countChart(`${title}status`, counted("status")), histogram(`${title}rewards`, run.samples.reward), histogram(`${title}trained tokens of a sample`, run.samples.trained), histogram(`${title}turns`, run.samples.turns));
}

/** The prompts that a sampler has tried, by estimated pass rate, at the last batch; nothing without a sampler. */
function passRates(run, several) {
  const counts = Object.entries(run.metrics.at(-1) || {}).filter(([name]) => name.startsWith(PASS_RATE)).map(([name, count]) => [name.slice(PASS_RATE.length), count]);
  if (!counts.length) return null;
  return el("section.charts", {}, countChart(`${several ? `${run.title}: ` : ""}prompts by estimated pass rate`, counts.sort(([a], [b]) => a.localeCompare(b))));
}

const PASS_RATE = "sampler/pass_rate/";

function histogram(title, values) {
  const present = values.filter(isNumber);
  const distinct = [...new Set(present)].sort((a, b) => a - b);
  if (distinct.length <= 1) return null;
  if (distinct.length <= 12) return countChart(title, distinct.map((value) => [shown(value), present.filter((other) => other === value).length]));
  const [low, high, bins] = [distinct[0], distinct[distinct.length - 1], 12];
  const counts = new Array(bins).fill(0);
  for (const value of present) counts[Math.min(bins - 1, Math.floor(((value - low) / (high - low)) * bins))]++;
  return countChart(title, counts.map((count, bin) => [`${shown(low + ((high - low) * bin) / bins)} …`, count]));
}

function failureTable(run, go) {
  if (!run.failures.length) return null;
  return el("section.failures", {}, el("h3", {}, "failures"), [...run.failures].sort((a, b) => b.count - a.count).map((failure) => el("details", {},
    el("summary", {}, el("b", {}, String(failure.count)), ` × ${visibleText(failure.cause)}: ${visibleText(failure.message)} `,
      el("a", { href: `#group=${failure.group}&sample=${failure.sample}` }, `group ${failure.group}, sample ${failure.sample}`)),
    el("pre", {}, visibleText(failure.traceback)))));
}
