// The state of the page is its address: #tab=groups&group=3&sample=1&layer=logprob.

const settings = JSON.parse(asText(embedded("settings")));
const VIEW = document.getElementById("view");
const STATE = { tab: "overview", run: 0, group: null, sample: null, against: null, layer: "mask", outcome: null, environment: null, cause: null, text: null, sort: "in order", found: null };
const NUMBERS = ["run", "group", "sample", "against"];
const UNSAID = ["found"];
let state = { ...STATE };
let runs = [];
let hovered = null;

function stateOfAddress() {
  const given = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  const next = { ...STATE, found: state.found };
  for (const name of Object.keys(STATE)) {
    if (!(name in given)) continue;
    next[name] = NUMBERS.includes(name) ? (Number.isInteger(Number(given[name])) ? Number(given[name]) : STATE[name]) : given[name];
  }
  if (next.group !== null && !("tab" in given)) next.tab = "groups";
  return next;
}

function go(change) {
  state = { ...state, ...change };
  if ("group" in change || "sample" in change) state.tab = "groups";
  if ("group" in change && !("against" in change)) state.against = null;
  const said = Object.entries(state).filter(([name, value]) => value !== null && value !== STATE[name] && !UNSAID.includes(name));
  const address = `#${new URLSearchParams(said.map(([name, value]) => [name, String(value)]))}`;
  if (address === (location.hash || "#")) draw();
  else location.hash = address;
}

async function draw() {
  const run = runs[Math.min(state.run, runs.length - 1)];
  const header = el("header.top", {},
    el("h1", {}, visibleText(run.title), run.growing ? el("span.live", {}, settings.live ? "live" : "was running when it was read") : null),
    el("nav", {}, ["overview", "groups", "timeline"].map((tab) => el(state.tab === tab ? "button.chosen" : "button", { onclick: () => go({ tab }) }, tab))),
    runs.length > 1 ? el("select", { name: "run", "aria-label": "run", onchange: (event) => go({ run: Number(event.target.value), group: null, sample: null }) }, runs.map((other, number) => el("option", { value: number, selected: number === state.run }, visibleText(other.title)))) : null,
    run.report ? el(run.report.ok ? "span.badge.good" : "span.badge.bad", {}, run.report.ok ? "laws 1 to 5 hold" : "a law is broken") : null,
    el("button.theme", { onclick: changeTheme, title: "dark or light (t)" }, "◐"));
  const list = document.querySelector(".rows");
  const scrolled = list ? list.scrollTop : 0;
  const body = state.tab === "groups" ? el("main.split", {}, groupList(run, state, go), await detail(run)) : state.tab === "timeline" ? el("main", {}, await timelineView(run, go)) : el("main", {}, overview(runs, go));
  VIEW.replaceChildren(header, body, el("div.hint", {}, "j k groups · h l samples · 1 to 5 layers · c compare · / search · t theme"));
  const drawn = document.querySelector(".rows");
  if (drawn) {
    drawn.scrollTop = scrolled;
    const chosen = drawn.querySelector(".chosen");
    if (chosen) chosen.scrollIntoView({ block: "nearest" });
  }
  document.title = `${visibleText(run.title)} · rollouts`;
  VIEW.removeAttribute("aria-busy");
  VIEW.dataset.ready = String(run.count);
  VIEW.dataset.milliseconds ||= String(Math.round(performance.now()));
}

async function detail(run) {
  const position = run.position.get(state.group);
  hovered = null;
  if (position === undefined) return el("section.detail", {}, el("p", {}, state.group === null ? "choose a group" : `there is no group ${state.group}`));
  const rows = run.rows(position);
  if (state.sample === null) return el("section.detail", {}, groupView(run, position, go));
  if (!(state.sample in rows)) return el("section.detail", {}, el("p", {}, `group ${state.group} has no sample ${state.sample}`));
  const members = await run.members(position);
  if (!members) {
    const page = settings.pages.find(([, first, end]) => position >= first && position < end);
    return el("section.detail", {}, el("p", {}, "its tokens are on ", el("a", { href: `${page[0]}${location.hash}` }, visibleText(page[0]))));
  }
  const tip = el("div.tip", { hidden: "" });
  hovered = { run, sample: members[state.sample], tip };
  const other = state.against !== null && state.against in rows;
  const shownDetail = other ? compareView(run, position, [state.sample, state.against], members, go) : sampleView(run, position, state.sample, members, state, go);
  return el("section.detail", {}, el("nav.samples", {}, rows.map((row, number) => el(number === state.sample ? "button.chosen" : "button", { onclick: () => go({ sample: number, against: null }) }, String(number))),
    rows.length > 1 ? el(other ? "button.chosen" : "button", { onclick: () => go({ against: other ? null : state.sample === 0 ? 1 : 0 }) }, "compare") : null), shownDetail, tip);
}

document.addEventListener("mouseover", (event) => {
  const token = event.target.closest && event.target.closest(".token");
  if (!hovered || !token) {
    if (hovered) hovered.tip.hidden = true;
    return;
  }
  const side = token.closest("[data-sample]");
  if (side) return;
  hovered.tip.textContent = tokenFacts(hovered.run, hovered.sample, Number(token.dataset.place));
  hovered.tip.hidden = false;
});

function changeTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
}

document.addEventListener("keydown", (event) => {
  if (event.target.matches("input, select") || event.ctrlKey || event.metaKey || event.altKey) return;
  const run = runs[Math.min(state.run, runs.length - 1)];
  const positions = selectedGroups(run, state);
  const place = positions.indexOf(run.position.get(state.group));
  const rows = place >= 0 ? run.rows(positions[place]).length : 0;
  const toGroup = (next) => positions[next] !== undefined && go({ group: run.groups.number[positions[next]], sample: state.sample === null ? null : 0 });
  const actions = {
    j: () => toGroup(place + 1),
    k: () => toGroup(place - 1),
    l: () => rows && go({ sample: state.sample === null ? 0 : Math.min(rows - 1, state.sample + 1) }),
    h: () => rows && go({ sample: state.sample ? state.sample - 1 : null }),
    c: () => rows > 1 && state.sample !== null && go({ against: state.against === null ? (state.sample === 0 ? 1 : 0) : null }),
    t: changeTheme,
    "/": () => { go({ tab: "groups" }); setTimeout(() => document.querySelector("input[name=text]")?.focus(), 50); },
  };
  for (const [number, layer] of LAYERS.entries()) actions[String(number + 1)] = () => go({ layer });
  if (event.key in actions) {
    event.preventDefault();
    actions[event.key]();
  }
});

window.addEventListener("hashchange", () => { state = stateOfAddress(); draw(); });

async function openRuns(read) {
  runs = await Promise.all(Array.from({ length: settings.runs }, (_, number) => Run.open(number, read)));
}

async function followServer() {
  let stamp = null;
  const read = async (name) => {
    const answer = await fetch(`part/${name}`);
    return answer.ok ? new Uint8Array(await answer.arrayBuffer()) : null;
  };
  for (;;) {
    const answer = await fetch("stamp").catch(() => null);
    const text = answer && answer.ok ? await answer.text() : stamp;
    if (text !== null && text !== stamp) {
      stamp = text;
      await openRuns(read);
      await draw();
    }
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

async function start() {
  state = stateOfAddress();
  if (settings.live) return followServer();
  await openRuns(async (name) => embedded(name));
  return draw();
}

start().catch((error) => { VIEW.textContent = `this page cannot be drawn: ${error}`; });
