// Elements, texts, numbers. No text of the data is ever markup: it enters the page by textContent alone.
const DATA = JSON.parse(document.getElementById("data").textContent);
const KINDS = ["failed", "wrong", "right", "scored"],
  SIGNS = ["!", "✕", "✓", "·"];
const SVG = "http://www.w3.org/2000/svg";

function put(node, props, children) {
  for (const [key, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") for (const [name, one] of Object.entries(value)) node.style.setProperty(name, one);
    else node.setAttribute(key === "cls" ? "class" : key, value === true ? "" : value);
  }
  for (const child of children.flat(9)) {
    if (child !== null && child !== undefined && child !== false) node.append(child); // a text becomes a text node
  }
  return node;
}
const el = (tag, props, ...children) => put(document.createElement(tag), props, children);
const svg = (tag, props, ...children) => put(document.createElementNS(SVG, tag), props, children);
const div = (cls, ...children) => el("div", { cls }, ...children);
const span = (cls, ...children) => el("span", { cls }, ...children);
const hint = (...children) => el("p", { cls: "muted small" }, ...children);
const silent = (cls, ...children) => el("span", { cls, "aria-hidden": "true" }, ...children); // for eyes only

const MINUS = "\u2212";
const fixed = (x, digits = 4) => {
  if (x === null || x === undefined) return "–";
  const text = x.toFixed(digits);
  return text.replace(/^-/, Number(text) === 0 ? "" : MINUS); // no minus zero
};
const signed = (x, digits = 4) => (x === null ? "–" : (x > 0 ? "+" : "") + fixed(x, digits));
const grouped = new Intl.NumberFormat("en-US");
const whole = (x) => (x === null || x === undefined ? "–" : grouped.format(Number(x)));
const short = (x) =>
  x === null || x === undefined
    ? "–"
    : Math.abs(x) >= 1000
      ? whole(Math.round(x))
      : fixed(x, Math.abs(x) >= 100 ? 1 : Math.abs(x) >= 10 ? 2 : 4);
const percent = (p) =>
  (p >= 0.0995 ? (100 * p).toFixed(1) : p >= 0.00095 ? (100 * p).toFixed(2) : (100 * p).toPrecision(2)) + " %";
const micros = (us) =>
  us >= 1e6 ? (us / 1e6).toFixed(2) + " s" : us >= 1e3 ? (us / 1e3).toFixed(2) + " ms" : Math.round(us) + " µs";
const many = (n, word) => `${whole(n)} ${word}${n === 1 ? "" : "s"}`;
const isNumber = (x) => typeof x === "number" && Number.isFinite(x);
const plusMinus = (m) => short(m.value) + (m.stderr === null ? "" : ` ± ${short(m.stderr)}`);

function visible(text) {
  // a text in which white space can be seen, for labels
  return text === "" ? "(nothing)" : text.replace(/ /g, "·").replace(/\n/g, "↵").replace(/\t/g, "⇥");
}
function table(heads, rows, cls = "scroll") {
  const head = heads.map((h) => el("th", { scope: "col", cls: h.num && "num" }, h.text ?? h));
  const line = (row) => row.map((cell, i) => el("td", { cls: heads[i].num && "num" }, cell));
  const body = rows.map((row) => el("tr", {}, line(row)));
  return el("div", { cls, tabindex: "0" }, el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, body)));
}
const wideTable = (heads, rows) => table(heads, rows, "scroll wide");
function pairTable(pairs, props) {
  const rows = pairs.map(([key, value]) => el("tr", {}, el("td", { cls: "key" }, key), el("td", props, value)));
  return el("table", {}, el("tbody", {}, rows));
}
const termList = (cls, pairs) =>
  el("dl", { cls }, pairs.map(([term, text]) => div(null, el("dt", {}, term), el("dd", {}, text))));
const pill = (kind, text) => span(`pill k${kind}`, silent(null, SIGNS[kind]), text ?? KINDS[kind]);
function card(title, ...children) {
  const head = title && div("head", typeof title === "string" ? el("h2", {}, title) : title);
  return el("section", { cls: "card" }, head, ...children);
}
function noteList(notes) {
  const told = notes.length === 1 ? notes[0] : el("ul", {}, notes.map((n) => el("li", {}, n)));
  return notes.length > 0 && el("div", { cls: "note", role: "note" }, told);
}
const folded = (head, ...children) => el("details", {}, el("summary", {}, head), ...children);
const button = (text, onclick, props) => el("button", { type: "button", cls: "quiet", onclick, ...props }, text);

function choice(label, options, value, onpick) {
  const box = el(
    "select",
    { cls: "field", onchange: () => onpick(box.value) },
    options.map(([v, text]) => el("option", { value: v, selected: String(v) === String(value) }, text)),
  );
  return el("label", { cls: "with" }, label, box);
}
function copyable(text) {
  const word = button(
    "Copy",
    async () => {
      try {
        await navigator.clipboard.writeText(text);
      } catch {
        getSelection().selectAllChildren(code);
        document.execCommand("copy");
      }
      word.textContent = "Copied";
      setTimeout(() => (word.textContent = "Copy"), 1500);
    },
    { "aria-label": "Copy the command" },
  );
  const code = el("code", { tabindex: "0" }, text);
  return div("cmd", code, word);
}

// -- one tooltip, beside what it is about
const tip = document.getElementById("tip");
function showTip(x, y, text) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${y + 18 + box.height > innerHeight ? Math.max(8, y - box.height - 10) : y + 18}px`;
}
const hideTip = () => (tip.hidden = true);
function hover(node, words) {
  // what `words` tells of the place under the pointer, if it does
  node.addEventListener("mousemove", (e) => {
    const text = words(e);
    if (text) showTip(e.clientX, e.clientY, text);
    else hideTip();
  });
  node.addEventListener("mouseleave", hideTip);
}
addEventListener("scroll", hideTip, { capture: true, passive: true });

// -- light and dark: the system's, or as chosen
const drawn = new Set(); // what draws on canvases, and must again when colours or sizes change
const redraw = () => drawn.forEach((draw) => draw());
const dark = matchMedia("(prefers-color-scheme: dark)");
let theme = "auto";
const colours = new Map(); // of this theme, by name
function applyTheme() {
  const name = theme === "auto" ? (dark.matches ? "dark" : "light") : theme;
  document.documentElement.dataset.theme = name;
  colours.clear();
  const word = document.getElementById("theme");
  word.textContent = { auto: "Auto", light: "Light", dark: "Dark" }[theme];
  word.setAttribute("aria-label", `Colours: ${theme}. Change`);
  redraw();
}
document.getElementById("theme").addEventListener("click", () => {
  theme = theme === "auto" ? (dark.matches ? "light" : "dark") : theme === "light" ? "dark" : "light";
  applyTheme();
});
for (const media of [dark, matchMedia("print")]) media.addEventListener("change", applyTheme); // paper is white
const colour = (name) => {
  if (!colours.has(name)) colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return colours.get(name);
};
