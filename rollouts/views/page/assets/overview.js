// A run as a whole: what became of its prompts, whether the laws hold, how its batches went, why rollouts failed.

function overview(runs, go) {
  const several = runs.length > 1;
  return el("section.overview", {}, runs.map((run) => runSummary(run, several)), verdicts(runs), runs.map((run) => sources(run, several)), batches(runs), runs.map((run) => sampleCharts(run, several)), runs.map((run) => passRates(run, several)), runs.map((run) => failureTable(run, go)));
}

/** Batches from which on lines are drawn; fewer are a table. */
const BATCHES_OF_A_LINE = 3;

function batches(runs) {
  const most = Math.max(...runs.map((run) => run.metrics.length));
  return most < BATCHES_OF_A_LINE ? runs.map((run) => batchTable(run, runs.length > 1)) : batchCharts(runs);
}

function runSummary(run, several) {
  const { info } = run;
  const endpoint = info.endpoint || {};
  const facts = [info.recipe, info.status, info.started && `started ${info.started}`, fileName(endpoint.model || info.model), info.server && info.server.version].filter(Boolean);
  const estimates = Object.entries(info.estimates || {});
  return el("section.summary", {},
    several ? el("h2", {}, visibleText(run.title)) : null,
    el("p.facts", {}, visibleText(facts.join(" · "))),
    info.error ? el("p.bad", {}, visibleText(String(info.error))) : null,
    estimates.length ? el("table", {}, el("tbody", {}, estimates.map(([name, value]) => el("tr", {}, el("th", {}, name), el("td", {}, `${shown(value.value)} [${shown(value.low)}, ${shown(value.high)}]`))))) : null,
    lengthBias(run),
    tiles(run),
    el("section.charts.first", {}, accountingChart(run), histogram("rewards", run.samples.reward), extremes(run)));
}

/** The last part of a folder's path; another name as it is. */
const fileName = (name) => (name && name.startsWith("/") ? name.split("/").filter(Boolean).at(-1) : name);

function tiles(run) {
  const outcomes = run.groups.outcome.map((number) => run.name("outcome", number));
  const count = (outcome) => outcomes.filter((other) => other === outcome).length;
  const rewards = run.samples.reward.filter(isNumber);
  const numbers = [
    ["batches", run.metrics.length],
    ["groups kept", count("kept")],
    ["groups dropped", count("dropped")],
    ["groups failed", count("failed")],
    ["samples", run.last.toLocaleString("en")],
    ["reward, mean ± std", rewards.length ? `${shown(mean(rewards))} ± ${shown(deviation(rewards))}` : "-"],
    ["trained tokens", run.samples.trained.reduce((sum, tokens) => sum + tokens, 0).toLocaleString("en")],
    ["turns, mean", shown(mean(run.samples.turns))],
  ];
  return el("dl.tiles", {}, numbers.filter(([name, value]) => value || !name.startsWith("groups ")).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, String(value)))));
}

/** The best and the worst sample, each with its last reply, and the most frequent failure; of equal rewards the most and the least probable replies. */
function extremes(run) {
  const rows = run.samples.reward.map((_, row) => row).filter((row) => isNumber(run.samples.reward[row]) && run.samples.failure[row] === null);
  if (!rows.length && !run.failures.length) return null;
  const order = (a, b) => run.samples.reward[a] - run.samples.reward[b] || (run.samples.logprob[a] ?? 0) - (run.samples.logprob[b] ?? 0);
  const sorted = rows.sort(order);
  const ends = rows.length ? [["best sample", sorted.at(-1)], ["worst sample", sorted[0]]] : [];
  return el("figure.chart.extremes", {}, ends.map(([title, row]) => sampleCard(run, title, row)), failureCard(run));
}

function failureCard(run) {
  if (!run.failures.length) return null;
  const failures = byCount(run.failures);
  const [most] = failures;
  const others = failures.length - 1;
  return el("article.broke", {}, el("h3", {}, `most frequent failure: ${most.count} × ${visibleText(most.cause)} `, failureLink(run, most)),
    el("p.prompt", {}, visibleText(most.message.slice(0, 240))), others ? el("p", {}, `and ${others} other ${others === 1 ? "kind" : "kinds"}, at the end of this page`) : null);
}

const byCount = (failures) => [...failures].sort((a, b) => b.count - a.count);
const failureLink = (run, failure) => el("a", { href: `#run=${run.number}&group=${failure.group}&sample=${failure.sample}` }, `group ${failure.group}, sample ${failure.sample}`);

function sampleCard(run, title, row) {
  let position = run.groups.first.length - 1;
  while (run.groups.first[position] > row) position--;
  const [group, sample] = [run.groups.number[position], row - run.groups.first[position]];
  const reply = el("p.reply", {});
  run.members(position).then((members) => {
    const replies = members ? members[sample].messages.filter((message) => message.role === "assistant" && message.text.trim()) : [];
    reply.textContent = replies.length ? visibleText(replies.at(-1).text.trim().slice(0, 240)) : "";
  });
  return el("article", {}, el("h3", {}, `${title}: reward ${shown(run.samples.reward[row])} `, el("a", { href: `#run=${run.number}&group=${group}&sample=${sample}` }, `group ${group}, sample ${sample}`)),
    el("p.prompt", {}, visibleText(run.groups.prompt[position])), reply);
}

/** A row for each environment of a mix of them. */
function sources(run, several) {
  const names = run.names.environment;
  if (names.length < 2) return null;
  const total = run.samples.reward.filter(isNumber).reduce((sum, reward) => sum + reward, 0);
  const rows = names.map((name, number) => {
    const positions = run.groups.environment.flatMap((other, position) => (other === number ? [position] : []));
    const kept = positions.filter((position) => run.name("outcome", run.groups.outcome[position]) === "kept");
    const rewards = positions.flatMap((position) => run.rows(position).map((row) => run.samples.reward[row])).filter(isNumber);
    const sum = rewards.reduce((whole, reward) => whole + reward, 0);
    return [name || "(none)", positions.length, kept.length, shown(mean(rewards)), total > 0 ? `${Math.round((100 * sum) / total)} %` : "-"];
  });
  const header = ["environment", "groups", "kept", "mean reward", "share of all reward"];
  return el("section.sources", {}, several ? el("h3", {}, visibleText(run.title)) : null, el("table", {},
    el("thead", {}, el("tr", {}, header.map((name) => el("th", {}, name)))),
    el("tbody", {}, rows.map(([name, ...cells]) => el("tr", {}, el("th", {}, visibleText(name)), cells.map((cell) => el("td.number", {}, String(cell))))))));
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
    violationList(report.violations),
    report.notes.length ? el("details", {}, el("summary", {}, `${report.notes.length} checks were not made`), el("ul", {}, report.notes.map((note) => el("li", {}, visibleText(note))))) : null));
}

/** Violations that are open; the others are folded, so that the charts stay near. */
const OPEN_VIOLATIONS = 3;

function violationList(violations) {
  const items = violations.map(([law, place, got, expected]) => el("li", {}, visibleText(`law ${law}: ${place}: got ${got}; expected ${expected}`)));
  const folded = items.splice(OPEN_VIOLATIONS);
  return [items.length ? el("ul", {}, items) : null, folded.length ? el("details", {}, el("summary", {}, `${folded.length} more`), el("ul", {}, folded)) : null];
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

/** The numbers of one or two batches. */
function batchTable(run, several) {
  if (!run.metrics.length) return null;
  const rows = BATCH_CHARTS.flatMap(([title, lines]) => lines.map(([name, label]) => [lines.length > 1 || label !== "share" ? `${title}: ${label}` : title, run.metrics.map((_, batch) => valueOf(run, batch, name))]));
  return el("details.numbers", {}, el("summary", {}, several ? `${visibleText(run.title)}: numbers of the batches` : "numbers of the batches"), el("table", {},
    el("thead", {}, el("tr", {}, el("th", {}), run.metrics.map((_, batch) => el("th", {}, `batch ${batch}`)))),
    el("tbody", {}, rows.filter(([, values]) => values.some(isNumber)).map(([name, values]) => el("tr", {}, el("th", {}, name), values.map((value) => el("td.number", {}, shown(value))))))));
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
  return el("section.charts.bars", {}, countChart(`${title}why rollouts stopped`, counted("stop").filter(([name]) => name)), countChart(`${title}status`, counted("status")), histogram(`${title}trained tokens of a sample`, run.samples.trained), histogram(`${title}turns`, run.samples.turns));
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
  const [low, high] = [distinct[0], distinct[distinct.length - 1]];
  const whole = distinct.every(Number.isInteger);
  const width = whole ? Math.ceil((high - low + 1) / 12) : (high - low) / 12;
  const bins = whole ? Math.ceil((high - low + 1) / width) : 12;
  const counts = new Array(bins).fill(0);
  for (const value of present) counts[Math.min(bins - 1, Math.floor((value - low) / width))]++;
  const label = (bin) => (whole && width === 1 ? shown(low + bin) : `${shown(low + width * bin)} to ${shown(whole ? low + width * (bin + 1) - 1 : low + width * (bin + 1))}`);
  return countChart(title, counts.map((count, bin) => [label(bin), count]));
}

function failureTable(run, go) {
  if (!run.failures.length) return null;
  return el("section.failures", {}, el("h3", {}, "failures"), byCount(run.failures).map((failure) => el("details", {},
    el("summary", {}, el("b", {}, String(failure.count)), ` × ${visibleText(failure.cause)}: ${visibleText(failure.message)} `,
      failureLink(run, failure)),
    el("pre", {}, visibleText(failure.traceback)))));
}
