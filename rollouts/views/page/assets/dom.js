// Elements and numbers. Texts enter the page as text nodes only.

/** An element: `el("td.number", {title: "…"}, "text", child, …)`; `on…` are listeners. */
function el(kind, properties, ...children) {
  const [tag, ...classes] = kind.split(".");
  const element = document.createElement(tag || "div");
  if (classes.length) element.className = classes.join(" ");
  for (const [name, value] of Object.entries(properties || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** An element of a drawing. */
function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function shown(value) {
  if (!isNumber(value)) return value === null || value === undefined ? "-" : String(value);
  if (Number.isInteger(value)) return String(value);
  const size = Math.abs(value);
  return size >= 1000 ? value.toFixed(0) : size >= 0.001 ? String(Number(value.toPrecision(3))) : value.toExponential(1);
}

const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);

function deviation(values) {
  const centre = mean(values);
  return centre === null ? null : Math.sqrt(mean(values.map((value) => (value - centre) ** 2)));
}

/** A place between red (0), yellow and green (1). */
function rewardColour(reward, [low, high]) {
  if (!isNumber(reward)) return "var(--none)";
  const share = high > low ? (reward - low) / (high - low) : reward > 0 ? 1 : 0;
  return `hsl(${Math.round(8 + 124 * share)} 62% var(--light))`;
}

/** Invisible characters as visible ones: what the model wrote is what is read. */
function visibleText(text) {
  return text.replace(/[\u0000-\u0009\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g, (character) => {
    const code = character.codePointAt(0);
    if (character === "\t") return "⇥\t";
    if (code < 0x20) return String.fromCodePoint(0x2400 + code);
    return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}
