// One group, one sample, or two samples of a group beside each other.

const LAYERS = ["mask", "logprob", "version", "fork", "cached"];
const PIECE_TOKENS = 4000;

function groupView(run, position, go) {
  const rows = run.rows(position);
  const number = run.groups.number[position];
  const reason = run.name("reason", run.groups.reason[position]);
  const seats = rows.some((row) => run.samples.seat[row]);
  const columns = ["sample", ...(seats ? ["seat"] : []), "reward", "status", "stop", "tokens", "trained", "turns", "logprob", ""];
  return el("section.group", {},
    el("h2", {}, `group ${number}`),
    el("p.prompt", {}, visibleText(run.groups.prompt[position])),
    run.groups.label[position] !== null ? el("p", {}, "label ", el("code", {}, visibleText(run.groups.label[position]))) : null,
    reason ? el("p", {}, `not in a batch: ${visibleText(reason)}`) : null,
    el("table", {},
      el("thead", {}, el("tr", {}, columns.map((name) => el("th", {}, name)))),
      el("tbody", {}, rows.map((row, sample) => el("tr", { data: { sample }, onclick: () => go({ sample }) },
        el("td", {}, String(sample)),
        seats ? el("td", {}, visibleText(run.samples.seat[row])) : null,
        el("td", {}, shown(run.samples.reward[row])),
        el("td", {}, run.name("status", run.samples.status[row])),
        el("td", {}, run.name("stop", run.samples.stop[row])),
        ["tokens", "trained", "turns", "logprob"].map((name) => el("td.number", {}, shown(run.samples[name][row]))),
        el("td", {}, run.samples.failure[row] === null ? "" : visibleText(run.failures[run.samples.failure[row]].message)))))));
}

function sampleView(run, position, number, members, state, go) {
  const sample = members[number];
  const row = run.rows(position)[number];
  const failure = run.samples.failure[row];
  const branches = run.rows(position).filter((other) => run.samples.rollout[other] === run.samples.rollout[row]);
  const before = branches.indexOf(row) > 0 ? members[run.rows(position).indexOf(branches[branches.indexOf(row) - 1])] : null;
  const forked = before ? sample.shared(before) : 0;
  const layer = LAYERS.includes(state.layer) ? state.layer : "mask";
  const turns = assistantTurns(sample);
  return el("section.sample", { data: { layer, trained: sample.mask.reduce((sum, value) => sum + value, 0) } },
    el("h2", {}, `group ${run.groups.number[position]} · sample ${number}${run.samples.seat[row] ? ` · ${visibleText(run.samples.seat[row])}` : ""}`),
    el("p.facts", {},
      `reward ${shown(run.samples.reward[row])} · ${run.name("status", run.samples.status[row])} ${run.name("stop", run.samples.stop[row])} · `,
      `${sample.length} tokens, ${shown(run.samples.trained[row])} trained · ${sample.completions.length} completions`,
      branches.length > 1 ? ` · branch ${branches.indexOf(row) + 1} of ${branches.length}` : ""),
    run.groups.label[position] !== null ? el("p", {}, "label ", el("code", {}, visibleText(run.groups.label[position]))) : null,
    sample.steps.length ? el("p.facts", {}, `step rewards, in order: ${sample.steps.map(shown).join(", ")}`) : null,
    layerChoice(layer, go),
    sample.pieces.map(([start, stop, completion]) => pieceView(run, sample, { start, stop, completion, layer, forked, turns })),
    sample.pieces.length ? null : sample.messages.map(messageView),
    failure === null ? null : el("section.failure", {}, el("h3", {}, run.failures[failure].kind), el("p", {}, visibleText(run.failures[failure].message)), el("pre", {}, visibleText(run.failures[failure].traceback))),
    Object.keys(sample.metrics).length ? el("details", {}, el("summary", {}, "metrics of the episode"), el("dl", {}, Object.entries(sample.metrics).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, shown(value))]))) : null);
}

/** For each completion the message of its reply and the messages that answer it; none where one message has several. */
function assistantTurns(sample) {
  const turns = [];
  sample.messages.forEach((message, place) => {
    if (message.role === "assistant") turns.push({ reply: message, answers: [] });
    else if (turns.length) turns[turns.length - 1].answers.push(message);
  });
  return turns.length < sample.completions.length ? [] : turns.slice(-sample.completions.length);
}

function layerChoice(layer, go) {
  return el("nav.layers", { "aria-label": "layer" }, LAYERS.map((name, number) => el(name === layer ? "button.chosen" : "button", { onclick: () => go({ layer: name }) }, `${number + 1} ${name}`)));
}

function pieceView(run, sample, { start, stop, completion, layer, forked, turns }) {
  const record = completion >= 0 ? sample.completions[completion] : null;
  const turn = completion >= 0 ? turns[completion] : null;
  const heading = record ? completionHeading(run, sample, record, completion) : `${start === 0 ? "prompt" : "context"}: ${stop - start} tokens`;
  const text = el("div.text", {});
  let drawn = start;
  const more = el("button.more", { onclick: () => draw() });
  const draw = () => {
    const end = Math.min(stop, drawn + PIECE_TOKENS);
    while (drawn < end) {
      const image = sample.images.get(drawn);
      text.append(image ? imageView(image) : tokenView(run, sample, drawn, layer, forked));
      drawn = image ? image.stop : drawn + 1;
    }
    more.hidden = drawn >= stop;
    more.textContent = `${stop - drawn} more tokens`;
  };
  draw();
  return el(record ? "article.piece.reply" : "article.piece", {}, el("header", {}, heading), text, more,
    turn && turn.reply.calls.length ? turn.reply.calls.map(([name, given]) => el("div.card.call", {}, el("b", {}, visibleText(name)), el("code", {}, visibleText(given)))) : null,
    turn ? turn.answers.filter((message) => message.role === "tool").map((message) => el("div.card.result", {}, el("b", {}, "result"), el("pre", {}, visibleText(message.text)))) : null);
}

/** An image in the place of its tokens. */
function imageView({ url, start, stop }) {
  const about = `image of tokens ${start} to ${stop - 1}`;
  return el("img.image", { src: url, alt: about, title: about });
}

function completionHeading(run, sample, [start, stop, finish, cached, seconds, id], number) {
  const own = Array.from(sample.logprobs.subarray(start, stop)).filter(isNumber);
  const versions = [...new Set(sample.versions.slice(start, stop).filter((version) => version !== null))];
  const about = [`completion ${number}`, `${stop - start} tokens`, finish, `${shown(seconds)} s`, `cached ${cached}/${start}`];
  if (own.length) about.push(`logprob ${shown(mean(own))}, least ${shown(own.reduce((a, b) => Math.min(a, b)))}`);
  if (versions.length) about.push(`version ${versions.map((version) => run.name("version", version)).join(", ")}`);
  return el("span", { title: visibleText(id) }, about.join(" · "));
}

function tokenView(run, sample, place, layer, forked) {
  const sampled = sample.mask[place] === 1;
  const token = el(sampled ? "span.token.s" : "span.token", { data: { place } }, visibleText(sample.texts[place]).replace(/\n/g, "⏎\n"));
  if (layer === "logprob" && sampled && isNumber(sample.logprobs[place])) {
    const probability = Math.exp(sample.logprobs[place]);
    token.style.background = `hsl(${Math.round(8 + 124 * Math.sqrt(probability))} 62% var(--light))`;
  }
  if (layer === "version" && sampled && sample.versions[place] !== null) token.style.background = `hsl(${(sample.versions[place] * 67 + 200) % 360} 55% var(--light))`;
  if (layer === "fork" && place < forked) token.classList.add("shared");
  if (layer === "cached") {
    const next = sample.completions.find(([start]) => start > place);
    if (next && place < next[3]) token.classList.add("cached");
  }
  return token;
}

function tokenFacts(run, sample, place) {
  const facts = [`position ${place}`, `id ${sample.ids[place]}`, sample.mask[place] ? "sampled, trained" : "context"];
  if (isNumber(sample.logprobs[place])) facts.push(`logprob ${sample.logprobs[place].toPrecision(3)}`, `p ${shown(Math.exp(sample.logprobs[place]))}`);
  if (sample.versions[place] !== null) facts.push(`version ${run.name("version", sample.versions[place])}`);
  return facts.join(" · ");
}

function messageView(message) {
  return el(`article.piece.${message.role === "assistant" ? "reply" : "other"}`, {}, el("header", {}, message.role), el("div.text", {}, visibleText(message.text)),
    message.calls.map(([name, given]) => el("div.card.call", {}, el("b", {}, visibleText(name)), el("code", {}, visibleText(given)))));
}

/** Two samples of a group from their first different token on. */
function compareView(run, position, [left, right], members, go) {
  const shared = members[left].shared(members[right]);
  const side = (number) => {
    const sample = members[number];
    const row = run.rows(position)[number];
    const text = el("div.text", {});
    const end = Math.min(sample.length, shared + PIECE_TOKENS);
    for (let place = shared; place < end; place++) text.append(tokenView(run, sample, place, "logprob", 0));
    if (end < sample.length) text.append(el("em", {}, ` … ${sample.length - end} more tokens`));
    return el("article.piece", { data: { sample: number } }, el("header", {}, `sample ${number} · reward ${shown(run.samples.reward[row])} · ${sample.length} tokens`), text);
  };
  const choice = (name, value) => el("select", { name, "aria-label": `sample ${name}`, onchange: (event) => go({ against: name === "right" ? Number(event.target.value) : right, sample: name === "left" ? Number(event.target.value) : left }) },
    members.map((_, number) => el("option", { value: number, selected: number === value }, `sample ${number}`)));
  const before = members[left].texts.slice(Math.max(0, shared - 40), shared).join("");
  return el("section.compare", { data: { shared } },
    el("h2", {}, `group ${run.groups.number[position]}: `, choice("left", left), " and ", choice("right", right)),
    el("p", {}, `the first ${shared} tokens are the same; they end with `, el("code", {}, visibleText(before))),
    el("div.sides", {}, side(left), side(right)));
}
