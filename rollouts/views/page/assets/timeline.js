// When every rollout did what: a lane for each, and a line where a batch was sealed.

const ACTIVITIES = { queued: "--none", generating: "--a", environment: "--e", tool: "--b", reward: "--d" };
const LANE = 7;
const TENTHS = 10000;

/** Lanes of rollouts, in the order in which they began: {group, batch, began, spans: [[name, began, ended, sample]]}. */
function lanesOf(run, times) {
  const lanes = new Map();
  const positions = new Int32Array(run.last);
  for (let position = 0; position < run.count; position++) for (const row of run.rows(position)) positions[row] = position;
  for (let place = 0; place < times.row.length; place++) {
    const row = times.row[place];
    const position = positions[row];
    const rollout = `${position} ${run.rollout(row)}`;
    if (!lanes.has(rollout)) lanes.set(rollout, { group: run.groups.number[position], batch: run.groups.batch[position], seat: run.samples.seat[row], spans: [] });
    const began = times.began[place];
    lanes.get(rollout).spans.push([times.name[place], began, began + times.lasted[place], row - run.groups.first[position]]);
  }
  const begin = (lane) => Math.min(...lane.spans.map(([, began]) => began));
  return [...lanes.values()].map((lane) => ({ ...lane, began: begin(lane) })).sort((a, b) => a.began - b.began);
}

/** The shortest span of a lane that contains a time. */
function spanAt(lane, time) {
  return lane.spans.filter(([, began, ended]) => began <= time && time <= ended).sort((a, b) => a[2] - a[1] - (b[2] - b[1]))[0];
}

/** The branch to which a time of a lane belongs: that of the last span that has begun, or the first one. */
function sampleAt(lane, time) {
  const begun = lane.spans.filter(([, began]) => began <= time).sort((a, b) => b[1] - a[1]);
  return (begun[0] || lane.spans[0])[3];
}

async function timelineView(run, go) {
  const times = await run.times();
  const lanes = lanesOf(run, times);
  if (!lanes.length) return el("section.timeline", {}, el("p", {}, "this run has no times: it was stored by an earlier version"));
  const end = lanes.reduce((latest, lane) => lane.spans.reduce((most, [, , ended]) => Math.max(most, ended), latest), 0);
  const seals = run.metrics.filter((line) => isNumber(line.ended)).map((line) => [line.batch, (line.ended - times.origin) * TENTHS]);
  const view = { from: 0, to: Math.max(end, ...seals.map(([, at]) => at), 1) };
  const whole = { ...view };
  const canvas = el("canvas", {});
  const spacer = el("div.spacer", {});
  spacer.style.height = `${lanes.length * LANE}px`;
  const frame = el("div.lanes", { data: { lanes: lanes.length, spans: times.row.length, seals: seals.length } }, canvas, spacer);
  const fact = el("p.facts", {}, " ");
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(ACTIVITIES[times.names[name][0]] || "--none");

  const draw = () => {
    const [width, height] = [frame.clientWidth, frame.clientHeight];
    const dots = window.devicePixelRatio || 1;
    canvas.width = width * dots;
    canvas.height = height * dots;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.scale(dots, dots);
    const x = (at) => ((at - view.from) / (view.to - view.from)) * width;
    const first = Math.floor(frame.scrollTop / LANE);
    const colours = times.names.map((_, name) => colour(name));
    lanes.slice(first, first + Math.ceil(height / LANE) + 1).forEach((lane, number) => {
      const top = (first + number) * LANE - frame.scrollTop;
      for (const [name, began, ended] of lane.spans) {
        context.fillStyle = colours[name];
        const tool = times.names[name][0] === "tool";
        context.fillRect(x(began), top + (tool ? 2 : 1), Math.max(1, x(ended) - x(began)), LANE - (tool ? 4 : 2));
      }
    });
    context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--bad");
    context.font = "11px system-ui";
    for (const [batch, at] of seals) {
      context.fillRect(x(at), 0, 1, height);
      const label = `batch ${batch}`;
      const wide = context.measureText(label).width;
      context.fillText(label, x(at) + 3 + wide > width ? x(at) - 3 - wide : x(at) + 3, 11);
    }
  };
  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    return { time: view.from + ((event.clientX - box.left) / box.width) * (view.to - view.from), lane: lanes[Math.floor((event.clientY - box.top + frame.scrollTop) / LANE)] };
  };
  frame.addEventListener("scroll", draw);
  frame.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.shiftKey) return;
    event.preventDefault();
    const { time } = at(event);
    const factor = (event.deltaY || event.deltaX) > 0 ? 1.25 : 0.8;
    zoom(time, factor);
  }, { passive: false });
  const zoom = (time, factor) => {
    view.from = Math.max(whole.from, time - (time - view.from) * factor);
    view.to = Math.min(whole.to, time + (view.to - time) * factor);
    draw();
  };
  let dragged = null;
  canvas.addEventListener("pointerdown", (event) => { dragged = { x: event.clientX, ...view, moved: false }; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => {
    if (dragged) {
      const shift = ((dragged.x - event.clientX) / canvas.clientWidth) * (dragged.to - dragged.from);
      const kept = Math.max(whole.from - dragged.from, Math.min(whole.to - dragged.to, shift));
      [view.from, view.to, dragged.moved] = [dragged.from + kept, dragged.to + kept, dragged.moved || Math.abs(event.clientX - dragged.x) > 3];
      draw();
      return;
    }
    const { time, lane } = at(event);
    if (!lane) return;
    const inside = spanAt(lane, time);
    const doing = inside ? `${times.names[inside[0]].join(" ")}, ${shown((inside[2] - inside[1]) / TENTHS)} s` : "nothing that was recorded";
    fact.textContent = `${shown(time / TENTHS)} s · group ${lane.group}, sample ${sampleAt(lane, time)}${lane.seat ? ` (${visibleText(lane.seat)})` : ""}: ${visibleText(doing)}`;
  });
  canvas.addEventListener("pointerup", (event) => {
    const clicked = dragged && !dragged.moved;
    dragged = null;
    const { time, lane } = at(event);
    if (clicked && lane) go({ group: lane.group, sample: sampleAt(lane, time) });
  });
  new ResizeObserver(draw).observe(frame);
  return el("section.timeline", {},
    el("nav.layers", {}, legend(Object.entries(ACTIVITIES).map(([name, variable]) => ({ name, colour: `var(${variable})` }))),
      el("button", { onclick: () => zoom((view.from + view.to) / 2, 0.5) }, "nearer"), el("button", { onclick: () => zoom((view.from + view.to) / 2, 2) }, "farther"),
      el("span.facts", {}, `${lanes.length} rollouts in ${shown((whole.to - whole.from) / TENTHS)} s; drag to move, Ctrl and wheel to zoom, click to open`)),
    fact, frame, heldUpTable(run));
}

function heldUpTable(run) {
  if (!run.held_up.length) return null;
  return el("section.heldup", {}, el("h3", {}, "what each batch waited for last"), el("table", {}, el("tbody", {}, run.held_up.map(([batch, group, sample, activity, name, seconds]) => el("tr", { data: { batch } },
    el("td", {}, `batch ${batch}`), el("td.number", {}, `${shown(seconds)} s`),
    el("td", {}, el("a", { href: `#group=${group}&sample=${sample}` }, `group ${group}, sample ${sample}`)), el("td", {}, visibleText(`${activity} ${name}`)))))));
}
