// Small drawings: lines over batches, counts, and where the prompts went.

const COLOURS = ["var(--a)", "var(--b)", "var(--c)", "var(--d)", "var(--e)", "var(--f)"];

/** Lines over the batches: `series` are {name, values, low?, high?}; `null` is a gap. */
function lineChart(title, series, labels) {
  const [width, height, left, bottom] = [360, 150, 44, 18];
  const present = series.filter((line) => line.values.some(isNumber));
  if (!present.length) return null;
  const all = present.flatMap((line) => [...line.values, ...(line.low || []), ...(line.high || [])]).filter(isNumber);
  let [low, high] = [all.reduce((a, b) => Math.min(a, b)), all.reduce((a, b) => Math.max(a, b))];
  if (low > 0 && low < high / 2) low = 0;
  if (high === low) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const count = labels.length;
  const x = (place) => left + (count > 1 ? (place / (count - 1)) * (width - left - 8) : (width - left) / 2);
  const y = (value) => 8 + (1 - (value - low) / (high - low)) * (height - bottom - 12);
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img" });
  for (const value of [low, (low + high) / 2, high]) {
    drawing.append(svg("line", { x1: left, x2: width - 8, y1: y(value), y2: y(value), class: "grid" }));
    drawing.append(svg("text", { x: left - 5, y: y(value) + 4, class: "tick end" }, shown(value)));
  }
  drawing.append(svg("text", { x: left, y: height - 3, class: "tick" }, `${labels[0]}`));
  if (count > 1) drawing.append(svg("text", { x: width - 8, y: height - 3, class: "tick end" }, `${labels[count - 1]}`));
  present.forEach((line, number) => {
    const colour = line.colour || COLOURS[number % COLOURS.length];
    if (line.low) {
      const edge = [...line.high.map((value, place) => [place, value]), ...line.low.map((value, place) => [place, value]).reverse()];
      const points = edge.filter(([, value]) => isNumber(value)).map(([place, value]) => `${x(place)},${y(value)}`);
      const band = svg("polygon", { points: points.join(" "), class: "band" });
      band.style.fill = colour;
      drawing.append(band);
    }
    let path = "";
    line.values.forEach((value, place) => {
      if (isNumber(value)) path += `${path && isNumber(line.values[place - 1]) ? "L" : "M"}${x(place)} ${y(value)}`;
    });
    const drawn = svg("path", { d: path, class: "line" });
    drawn.style.stroke = colour;
    drawing.append(drawn);
    line.values.forEach((value, place) => {
      if (!isNumber(value) || count > 60) return;
      const dot = svg("circle", { cx: x(place), cy: y(value), r: 2.5 }, svg("title", {}, `${labels[place]}: ${line.name} ${shown(value)}`));
      dot.style.fill = colour;
      drawing.append(dot);
    });
  });
  return el("figure.chart", {}, el("figcaption", {}, title, legend(present)), drawing);
}

function legend(series) {
  return el("span.legend", {}, series.map((line, number) => {
    const mark = el("i", {});
    mark.style.background = line.colour || COLOURS[number % COLOURS.length];
    return el("span", {}, mark, line.name);
  }));
}

/** Bars of counts: `rows` are [name, count]. */
function countChart(title, rows) {
  const most = Math.max(...rows.map(([, count]) => count));
  if (!rows.length || !most) return null;
  return el("figure.chart", {}, el("figcaption", {}, title), el("div.counts", {}, rows.map(([name, count]) => {
    const bar = el("i", {});
    bar.style.width = `${(100 * count) / most}%`;
    return [el("span", { title: name }, name), el("div", {}, bar), el("b", {}, count.toLocaleString("en"))];
  })));
}

/** Where the prompts went: bands from what was taken to each end. */
function flowChart(title, taken, ends) {
  const rows = ends.filter((end) => end.count > 0);
  const total = rows.reduce((sum, end) => sum + end.count, 0);
  if (!total) return null;
  const [width, height, gap] = [560, Math.max(120, rows.length * 34), 10];
  const scale = (height - (gap + 8) * (rows.length - 1) - 8) / total;
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "flow", role: "img" });
  const leftHeight = total * scale;
  let [from, to] = [(height - leftHeight) / 2, 4];
  drawing.append(svg("rect", { x: 92, y: from, width: 8, height: leftHeight, class: "stem" }));
  drawing.append(svg("text", { x: 86, y: height / 2 + 4, class: "label end" }, `${taken} taken`));
  for (const end of rows) {
    const size = Math.max(end.count * scale, 1);
    const band = svg("path", {
      d: `M100 ${from} C170 ${from} 170 ${to} 240 ${to} L240 ${to + size} C170 ${to + size} 170 ${from + size} 100 ${from + size} Z`,
      class: "flowing",
    });
    band.style.fill = end.colour;
    const name = `${end.count} ${end.name}`;
    const label = svg("text", { x: 248, y: to + size / 2 + 4, class: "label" }, name.length > 44 ? `${name.slice(0, 43)}…` : name);
    label.append(svg("title", {}, name));
    drawing.append(band, label);
    from += size;
    to += Math.max(size, 8) + gap; // a label is taller than a narrow band
  }
  return el("figure.chart.wide", {}, el("figcaption", {}, title), drawing);
}
