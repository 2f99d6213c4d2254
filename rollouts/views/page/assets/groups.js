// The list of groups: one row each, with a square for each sample in the colour of its reward.

const ROWS_AT_ONCE = 300;
const SORTS = {
  "in order": () => 0,
  "spread, largest first": (run, a, b) => (spreadOf(run, b) ?? -1) - (spreadOf(run, a) ?? -1),
  "spread, smallest first": (run, a, b) => (spreadOf(run, a) ?? Infinity) - (spreadOf(run, b) ?? Infinity),
  "reward, lowest first": (run, a, b) => (meanOf(run, a) ?? Infinity) - (meanOf(run, b) ?? Infinity),
  "reward, highest first": (run, a, b) => (meanOf(run, b) ?? -Infinity) - (meanOf(run, a) ?? -Infinity),
  "tokens, most first": (run, a, b) => tokensOf(run, b) - tokensOf(run, a),
};
const numbersOf = (run, position) => run.rewards(position).filter(isNumber);
const spreadOf = (run, position) => mean(run.bySeat(position).map((rewards) => deviation(rewards)));
const meanOf = (run, position) => mean(numbersOf(run, position));
const tokensOf = (run, position) => run.rows(position).reduce((sum, row) => sum + run.samples.tokens[row], 0);

/** The positions that the filters leave, in the chosen order. */
function selectedGroups(run, state) {
  const { outcome, environment, cause, text } = state;
  const wanted = (text || "").toLowerCase();
  const left = [];
  for (let position = 0; position < run.count; position++) {
    if (outcome && run.name("outcome", run.groups.outcome[position]) !== outcome) continue;
    if (environment && run.name("environment", run.groups.environment[position]) !== environment) continue;
    if (cause && !run.rows(position).some((row) => causeOf(run, row) === cause)) continue;
    if (wanted) {
      const own = `${run.groups.number[position]} ${run.groups.prompt[position]} ${run.groups.label[position] ?? ""}`;
      if (!own.toLowerCase().includes(wanted) && !(state.found && state.found.has(position))) continue;
    }
    left.push(position);
  }
  const sort = SORTS[state.sort];
  return sort && state.sort !== "in order" ? left.sort((a, b) => sort(run, a, b)) : left;
}

const causeOf = (run, row) => {
  const failure = run.samples.failure[row];
  return failure === null ? null : run.failures[failure].cause;
};

/** The positions whose messages contain a text; reads all tokens of the page. */
async function searchMessages(run, text) {
  const wanted = text.toLowerCase();
  const found = new Set();
  for (let position = 0; position < run.count; position++) {
    const members = await run.members(position);
    if (!members) continue;
    const hit = members.some((sample) => sample.texts.join("").toLowerCase().includes(wanted)
      || sample.messages.some((message) => message.text.toLowerCase().includes(wanted)));
    if (hit) found.add(position);
  }
  return found;
}

function groupList(run, state, go) {
  const positions = selectedGroups(run, state);
  const range = rewardRange(run);
  const list = el("div.rows", { role: "listbox", data: { count: positions.length } });
  const place = Math.max(0, positions.indexOf(run.position.get(state.group)));
  let first = place - (place % ROWS_AT_ONCE);
  let end = first;
  const drawn = (from, to) => positions.slice(from, to).map((position) => groupRow(run, position, state, range, go));
  const earlier = el("button.more", {
    onclick: () => {
      list.prepend(...drawn(Math.max(0, first - ROWS_AT_ONCE), first));
      first = Math.max(0, first - ROWS_AT_ONCE);
      label();
    },
  });
  const later = el("button.more", {
    onclick: () => {
      list.append(...drawn(end, end + ROWS_AT_ONCE));
      end = Math.min(positions.length, end + ROWS_AT_ONCE);
      label();
    },
  });
  const label = () => {
    earlier.textContent = `${first} before these`;
    later.textContent = `${positions.length - end} after these`;
    earlier.hidden = first === 0;
    later.hidden = end >= positions.length;
  };
  later.click();
  return el("div.list", {}, groupFilters(run, state, go, positions.length), earlier, list, later);
}

function rewardRange(run) {
  let [low, high] = [Infinity, -Infinity];
  for (const reward of run.samples.reward) {
    if (isNumber(reward)) [low, high] = [Math.min(low, reward), Math.max(high, reward)];
  }
  return [Math.min(low, 0), high];
}

function groupRow(run, position, state, range, go) {
  const number = run.groups.number[position];
  const rows = run.rows(position);
  const outcome = run.name("outcome", run.groups.outcome[position]);
  const batch = run.groups.batch[position];
  const squares = rows.map((row, sample) => {
    const reward = run.samples.reward[row];
    const failed = run.samples.failure[row] !== null;
    const square = el(failed ? "b.square.failed" : "b.square", {
      title: `sample ${sample}${run.samples.seat[row] ? ` (${visibleText(run.samples.seat[row])})` : ""}: ${failed ? causeOf(run, row) : `reward ${shown(reward)}`}`,
      data: { sample },
      onclick: (event) => { event.stopPropagation(); go({ group: number, sample }); },
    });
    square.style.background = failed ? "" : rewardColour(reward, range);
    return square;
  });
  return el(state.group === number ? "div.row.chosen" : "div.row", { role: "option", data: { group: number }, onclick: () => go({ group: number, sample: null }) },
    el("span.number", {}, String(number)),
    el(`span.outcome.${outcome}`, { title: visibleText(run.name("reason", run.groups.reason[position])) }, outcome === "kept" && batch !== null ? `batch ${batch}` : outcome),
    el("span.squares", {}, squares),
    el("span.statistics", {}, `${shown(meanOf(run, position))} ± ${shown(spreadOf(run, position))}`),
    el("span.prompt", {}, visibleText(run.groups.prompt[position])));
}

function groupFilters(run, state, go, left) {
  const options = (name, values, label) => values.length > 1 || state[name] ? el("select", {
    name, "aria-label": label, onchange: (event) => go({ [name]: event.target.value || null }),
  }, el("option", { value: "" }, label), values.map((value) => el("option", { value, selected: state[name] === value }, value || "(none)"))) : null;
  const causes = [...new Set(run.failures.map((failure) => failure.cause))];
  return el("form.filters", { onsubmit: (event) => event.preventDefault() },
    el("input", {
      name: "text", type: "search", placeholder: "text of a prompt; Enter: of all messages", value: state.text || "",
      onchange: (event) => go({ text: event.target.value || null, found: null }),
      onkeydown: async (event) => {
        if (event.key !== "Enter" || !event.target.value) return;
        const text = event.target.value;
        go({ text, found: await searchMessages(run, text) });
      },
    }),
    options("outcome", run.names.outcome, "every outcome"),
    options("environment", run.names.environment, "every environment"),
    causes.length ? options("cause", [...causes], "failed or not") : null,
    el("select", { name: "sort", "aria-label": "order", onchange: (event) => go({ sort: event.target.value }) },
      Object.keys(SORTS).map((value) => el("option", { value, selected: state.sort === value }, value))),
    el("span.left", {}, `${left} of ${run.count} groups`));
}
