// All rows: a list of which only the part in sight is in the page, filters, and the chosen row beside it.
const LINE = 56,
  SPARE = 6;

function rowsView(run) {
  const here = run.rows_here,
    ctx = { vocab: here.vocab, recorded: here.recorded, target: run.target },
    all = here.items;
  for (const row of all) {
    // what is looked through, and shown in the list
    row.say = row.e
      ? `${row.e[0]}: ${row.e[1]}`
      : (row.a || [])
          .map((a) => a.t)
          .join(" ⏐ ")
          .slice(0, 300);
    row.expected = (row.d || []).find(([k]) => k === run.target)?.[1];
    if (row.sc?.picked !== undefined) row.say = String(row.sc.picked);
    if (row.s === 1 && row.expected !== undefined) row.say = `expected \u2068${row.expected.slice(0, 100)}\u2069, got ${row.say.trim() || "nothing"}`;
    row.find =
      `${row.i}\n${row.say}\n${(row.p || []).filter((p) => typeof p === "string").join("\n")}\n${(row.a || []).map((a) => a.t).join("\n")}\n${(row.d || []).map(([, v]) => v).join("\n")}`.toLowerCase();
    row.low = Math.min(
      0,
      ...(row.a || []).flatMap((a) => a.l.slice(0, 20000).filter(isNumber)).reduce((m, x) => [Math.min(m[0], x)], [0]),
    );
  }
  let kind = null,
    words = "",
    order = "input",
    shown = all,
    chosen = null;
  const space = el("div", { cls: "space", role: "presentation" });
  const list = el("div", { cls: "card list", tabindex: "0", role: "listbox", "aria-label": "Rows" }, space);
  const detail = el("div", { cls: "detail" }),
    status = el("span", { cls: "muted small num", role: "status" });
  const browse = el("div", { cls: "browse" }, list, detail);
  const nodes = new Map();

  function lineOf(row, at) {
    const node = el(
      "div",
      {
        cls: "item",
        role: "option",
        id: `row-${row.n}`,
        "aria-selected": String(row === chosen),
        "aria-setsize": shown.length,
        "aria-posinset": at + 1,
      },
      el("span", { cls: `sign k${row.s}`, title: KINDS[row.s], "aria-label": KINDS[row.s] }, SIGNS[row.s]),
      el("span", { cls: "id" }, row.i),
      el("span", { cls: "muted num" }, whole(row.n + 1)),
      el(
        "span",
        { cls: "say" },
        row.strange ? "no record of a run" : row.lost !== undefined ? "too large for this file" : row.say.trim().replace(/\s+/g, " ") || "–",
      ),
    );
    node.style.transform = `translateY(${at * LINE}px)`;
    node.addEventListener("click", () => choose(row, true));
    return node;
  }
  function draw() {
    const from = Math.max(0, Math.floor(list.scrollTop / LINE) - SPARE),
      to = Math.min(shown.length, Math.ceil((list.scrollTop + (list.clientHeight || 600)) / LINE) + SPARE);
    for (const [at, node] of nodes)
      if (at < from || at >= to) {
        node.remove();
        nodes.delete(at);
      }
    for (let at = from; at < to; at++)
      if (!nodes.has(at)) {
        const node = lineOf(shown[at], at);
        nodes.set(at, node);
        space.append(node);
      }
  }
  function filter() {
    shown = all.filter((row) => (kind === null || row.s === kind) && (!words || row.find.includes(words)));
    if (order === "surprise") shown.sort((a, b) => a.low - b.low);
    if (order === "slow") shown.sort((a, b) => (b.sec ?? -1) - (a.sec ?? -1));
    if (order === "long") shown.sort((a, b) => size(b) - size(a));
    nodes.forEach((node) => node.remove());
    nodes.clear();
    space.style.height = `${shown.length * LINE}px`;
    list.scrollTop = 0;
    status.textContent =
      shown.length === all.length ? many(all.length, "row") : `${whole(shown.length)} of ${many(all.length, "row")}`;
    draw();
    if (!shown.includes(chosen))
      shown.length
        ? choose(shown[0], false)
        : detail.replaceChildren(
            el("p", { cls: "muted" }, all.length ? "No row is like that." : "This run has no rows."),
          );
  }
  const size = (row) => (row.a || []).reduce((s, a) => s + (a.m || a.k.length), 0);
  function choose(row, open) {
    const before = chosen;
    chosen = row;
    for (const node of nodes.values()) node.setAttribute("aria-selected", String(node.id === `row-${row.n}`));
    list.setAttribute("aria-activedescendant", `row-${row.n}`);
    if (before !== row || !detail.firstChild) {
      const back = button(
        "‹ All rows",
        () => {
          browse.classList.remove("open");
          list.focus();
        },
        { cls: "quiet back" },
      );
      const steps = el("div", { cls: "chips", style: { float: "right" } });
      detail.replaceChildren(back, steps, rowView(ctx, row));
    }
    if (open) browse.classList.add("open");
    if (before) history.replaceState(null, "", `#rows/${encodeURIComponent(row.i)}`); // a link to this row
  }
  function move(by) {
    const at = Math.max(0, Math.min(shown.length - 1, shown.indexOf(chosen) + by));
    if (!shown[at]) return;
    if (at * LINE < list.scrollTop) list.scrollTop = at * LINE;
    if ((at + 1) * LINE > list.scrollTop + list.clientHeight) list.scrollTop = (at + 1) * LINE - list.clientHeight;
    draw();
    choose(shown[at], false);
  }
  list.addEventListener("scroll", draw, { passive: true });
  list.addEventListener("keydown", (e) => {
    const page = Math.max(1, Math.floor(list.clientHeight / LINE) - 1);
    const by = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1, PageDown: page, PageUp: -page, Home: -1e9, End: 1e9 }[e.key];
    if (by !== undefined) {
      e.preventDefault();
      move(by);
    } else if (e.key === "Enter") browse.classList.add("open");
  });
  new ResizeObserver(draw).observe(list);

  const chips = [null, 0, 1, 2, 3]
    .filter((k) => k === null || all.some((r) => r.s === k))
    .map((k) => {
      const node = el(
        "button",
        { type: "button", cls: "chip", "aria-pressed": String(k === kind), onclick: () => pick(k) },
        k === null
          ? `All ${whole(all.length)}`
          : [
              el("span", { "aria-hidden": "true" }, `${SIGNS[k]} `),
              `${KINDS[k]} ${whole(all.filter((r) => r.s === k).length)}`,
            ],
      );
      return [k, node];
    });
  function pick(k) {
    kind = k;
    for (const [one, node] of chips) node.setAttribute("aria-pressed", String(one === k));
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
  const orders = [
    ["input", "input"],
    ["surprise", "most surprising token"],
    ...(all.some((r) => isNumber(r.sec)) ? [["slow", "slowest"]] : []),
    ["long", "longest"],
  ];
  const tools = el(
    "div",
    { cls: "tools" },
    el(
      "div",
      { cls: "chips", role: "group", "aria-label": "Kinds of rows" },
      chips.map(([, node]) => node),
    ),
    search,
    choice("Order", orders, order, (v) => {
      order = v;
      filter();
    }),
    status,
  );
  filter();
  const node = el(
    "div",
    {},
    here.why && el("div", { cls: "note plain", style: { "margin-bottom": "14px" } }, here.why),
    here.tokens && el("div", { cls: "note plain", style: { "margin-bottom": "14px" } }, `Note: ${here.tokens}.`),
    tools,
    browse,
  );
  return {
    node,
    pick,
    show: (id) => {
      const row = all.find((r) => r.i === id);
      if (row) {
        pick(null);
        move(shown.indexOf(row) - shown.indexOf(chosen));
        choose(row, true);
      }
      return Boolean(row);
    },
  };
}
