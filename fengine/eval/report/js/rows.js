// Rows to choose from: a list of which only the part in sight is in the page, and the chosen one beside it.
const LINE = 56,
  SPARE = 6;

// items: {n, i}, a number of its own and its id. `parts`: what a line shows of one; `view`: what is beside the list.
function picker(name, parts, view) {
  const space = el("div", { cls: "space", role: "presentation" }),
    list = el("div", { cls: "card list", tabindex: "0", role: "listbox", "aria-label": name }, space),
    detail = div("detail"),
    node = div("browse", list, detail),
    nodes = new Map();
  let shown = [],
    chosen = null;

  function lineOf(item, at) {
    const props = {
      cls: "item",
      role: "option",
      id: `row-${item.n}`,
      "aria-selected": String(item === chosen),
      "aria-setsize": shown.length,
      "aria-posinset": at + 1,
      style: { transform: `translateY(${at * LINE}px)` },
      onclick: () => choose(item, true),
    };
    return el("div", props, parts(item));
  }
  function draw() {
    const from = Math.max(0, Math.floor(list.scrollTop / LINE) - SPARE),
      to = Math.min(shown.length, Math.ceil((list.scrollTop + (list.clientHeight || 600)) / LINE) + SPARE);
    for (const [at, line] of nodes)
      if (at < from || at >= to) {
        line.remove();
        nodes.delete(at);
      }
    for (let at = from; at < to; at++)
      if (!nodes.has(at)) {
        nodes.set(at, lineOf(shown[at], at));
        space.append(nodes.get(at));
      }
  }
  function close() {
    node.classList.remove("open");
    list.focus();
  }
  function choose(item, open) {
    const before = chosen;
    chosen = item;
    for (const line of nodes.values()) line.setAttribute("aria-selected", String(line.id === `row-${item.n}`));
    list.setAttribute("aria-activedescendant", `row-${item.n}`);
    if (before !== item || open || !detail.firstChild)
      detail.replaceChildren(button("‹ All rows", close, { cls: "quiet back" }), view(item, before));
    if (open) node.classList.add("open");
  }
  function fill(items, lacking) {
    shown = items;
    nodes.forEach((line) => line.remove());
    nodes.clear();
    space.style.height = `${shown.length * LINE}px`;
    list.scrollTop = 0;
    draw();
    if (shown.includes(chosen)) return;
    if (shown.length) choose(shown[0], false);
    else detail.replaceChildren(el("p", { cls: "muted" }, lacking));
  }
  function go(at, open = false) {
    const item = shown[Math.max(0, Math.min(shown.length - 1, at))];
    if (!item) return;
    const top = shown.indexOf(item) * LINE;
    if (top < list.scrollTop) list.scrollTop = top;
    if (top + LINE > list.scrollTop + list.clientHeight) list.scrollTop = top + LINE - list.clientHeight;
    draw();
    choose(item, open);
  }
  list.addEventListener("scroll", draw, { passive: true });
  list.addEventListener("keydown", (e) => {
    const page = Math.max(1, Math.floor(list.clientHeight / LINE) - 1);
    const by = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1, PageDown: page, PageUp: -page, Home: -1e9, End: 1e9 }[e.key];
    if (by !== undefined) {
      e.preventDefault();
      go(shown.indexOf(chosen) + by);
    } else if (e.key === "Enter") node.classList.add("open");
  });
  new ResizeObserver(draw).observe(list);
  return { node, fill, go };
}

// What is looked through of a row, and shown in the list. Modifies: the row.
function prepared(row, target) {
  const answers = row.a || [],
    columns = row.d || [],
    texts = answers.map((a) => a.t);
  row.say = row.e ? `${row.e[0]}: ${row.e[1]}` : texts.join(" ⏐ ").slice(0, 300);
  row.expected = columns.find(([k]) => k === target)?.[1];
  if (row.sc?.picked !== undefined) row.say = String(row.sc.picked);
  if (row.s === 1 && row.expected !== undefined)
    row.say = `expected \u2068${row.expected.slice(0, 100)}\u2069, got ${row.say.trim() || "nothing"}`;
  const prompts = (row.p || []).filter((p) => typeof p === "string");
  row.find = [row.i, row.say, ...prompts, ...texts, ...columns.map(([, v]) => v)].join("\n").toLowerCase();
  row.low = answers.flatMap((a) => a.l.slice(0, 20000)).reduce((least, x) => (x < least ? x : least), 0);
  row.size = answers.reduce((sum, a) => sum + (a.m || a.k.length), 0);
}

// All rows of a run, with filters.
function rowsView(run) {
  const here = run.rows_here,
    ctx = { vocab: here.vocab, recorded: here.recorded, target: run.target },
    all = here.items;
  all.forEach((row) => prepared(row, run.target));
  let kind = null,
    words = "",
    order = "input",
    shown = all;
  const status = el("span", { cls: "muted small num", role: "status" });
  const lacks = (row) => (row.strange ? "no record of a run" : row.lost !== undefined && "too large for this file");
  const parts = (row) => [
    el("span", { cls: `sign k${row.s}`, title: KINDS[row.s], "aria-label": KINDS[row.s] }, SIGNS[row.s]),
    span("id", row.i),
    span("muted num", whole(row.n + 1)),
    span("say", lacks(row) || row.say.trim().replace(/\s+/g, " ") || "–"),
  ];
  const list = picker("Rows", parts, (row, before) => {
    if (before) history.replaceState(null, "", `#rows/${encodeURIComponent(row.i)}`); // a link to this row
    return rowView(ctx, row);
  });
  const orders = {
    surprise: (a, b) => a.low - b.low,
    slow: (a, b) => (b.sec ?? -1) - (a.sec ?? -1),
    long: (a, b) => b.size - a.size,
  };
  function filter() {
    shown = all.filter((row) => (kind === null || row.s === kind) && (!words || row.find.includes(words)));
    if (orders[order]) shown.sort(orders[order]);
    const of = many(all.length, "row");
    status.textContent = shown.length === all.length ? of : `${whole(shown.length)} of ${of}`;
    list.fill(shown, all.length ? "No row is like that." : "This run has no rows.");
  }
  const chips = [null, 0, 1, 2, 3]
    .filter((k) => k === null || all.some((r) => r.s === k))
    .map((k) => {
      const counted = `${KINDS[k]} ${whole(all.filter((r) => r.s === k).length)}`,
        text = k === null ? `All ${whole(all.length)}` : [silent(null, `${SIGNS[k]} `), counted];
      return [k, button(text, () => pick(k), { cls: "quiet chip", "aria-pressed": String(k === kind) })];
    });
  function pick(k) {
    kind = k;
    for (const [one, chip] of chips) chip.setAttribute("aria-pressed", String(one === k));
    filter();
  }
  const search = el("input", {
    type: "search",
    cls: "field",
    placeholder: "Search ids, prompts, answers, columns",
    "aria-label": "Search rows",
    oninput: () => {
      words = search.value.toLowerCase();
      filter();
    },
  });
  const names = [
    ["input", "input"],
    ["surprise", "most surprising token"],
    ...(all.some((r) => isNumber(r.sec)) ? [["slow", "slowest"]] : []),
    ["long", "longest"],
  ];
  const group = { cls: "chips", role: "group", "aria-label": "Kinds of rows" },
    kinds = el("div", group, chips.map(([, chip]) => chip));
  const ordered = choice("Order", names, order, (v) => {
    order = v;
    filter();
  });
  filter();
  const note = (text) => el("div", { cls: "note plain", style: { "margin-bottom": "14px" } }, text);
  const node = div(
    null,
    here.why && note(here.why),
    here.tokens && note(`Note: ${here.tokens}.`),
    div("tools", kinds, search, ordered, status),
    list.node,
  );
  const show = (id) => {
    const row = all.find((r) => r.i === id);
    if (row) {
      pick(null);
      list.go(shown.indexOf(row), true);
    }
  };
  return { node, pick, show };
}
