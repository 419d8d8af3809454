// Which views there are, and the one that is shown.
function viewsOf(data) {
  if (data.kind === "run") {
    const run = data.run;
    let rows = null;
    const theRows = () => (rows ||= rowsView(run));
    const go = (kind) => {
      show("rows");
      theRows().pick(kind);
    };
    const goto = (id) => {
      if (run.rows_here.items.some((r) => r.i === id)) {
        show("rows");
        theRows().show(id);
      }
    };
    return [
      ["summary", "Summary", () => summaryView(run, go)],
      ["rows", "Rows", () => theRows().node, (id) => theRows().show(id)],
      ["schedule", "Schedule", () => scheduleView(run, goto)],
    ];
  }
  if (data.kind === "diff")
    return [
      ["summary", "Difference", () => diffSummary(data)],
      ["rows", "Rows that differ", () => diffRows(data)],
      ["a", "A", () => summaryView(data.runs[0], () => {})],
      ["b", "B", () => summaryView(data.runs[1], () => {})],
    ];
  return [
    ["summary", "Metrics", () => sweepView(data.sweep)],
    [
      "deltas",
      "Differences",
      () =>
        el(
          "div",
          { cls: "stack" },
          deltaView(data.sweep) || el("p", { cls: "muted" }, "No two points have rows of the same input."),
          gridView(data.sweep),
        ),
    ],
  ];
}
const views = viewsOf(DATA),
  made = new Map(),
  panel = el("div", { id: "panel", role: "tabpanel" });
const tabs = views.map(([name, title]) =>
  el(
    "button",
    { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": "panel", onclick: () => show(name) },
    title,
  ),
);

function unescaped(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
function show(name) {
  const [view, id] = name.split(/\/(.*)/s);
  const found = views.find(([one]) => one === view) || views[0];
  tabs.forEach((tab, i) => {
    const on = views[i] === found;
    tab.setAttribute("aria-selected", String(on));
    tab.tabIndex = on ? 0 : -1;
  });
  if (!made.has(found[0])) made.set(found[0], found[2]());
  hideTip();
  panel.replaceChildren(made.get(found[0]));
  panel.setAttribute("aria-labelledby", `tab-${found[0]}`);
  if (id && found[3]) found[3](unescaped(id));
  else if (location.hash.slice(1).split("/")[0] !== found[0]) history.replaceState(null, "", `#${found[0]}`);
  redraw();
}
document.getElementById("tabs").append(...tabs);
document.getElementById("main").replaceChildren(panel);
document.getElementById("tabs").addEventListener("keydown", (e) => {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
  if (!by) return;
  const next = tabs[(tabs.indexOf(document.activeElement) + by + tabs.length) % tabs.length];
  next.focus();
  next.click();
});
addEventListener("hashchange", () => {
  if (location.hash !== "#main") show(location.hash.slice(1));
});
document.title = DATA.title;
document.getElementById("title").textContent =
  DATA.kind === "run"
    ? `${DATA.run.task[0]} on ${DATA.run.model}`
    : DATA.kind === "diff"
      ? "Difference of two runs"
      : "Sweep";
document.getElementById("subtitle").textContent =
  `${DATA.kind === "run" ? DATA.run.folder : DATA.kind === "sweep" ? `${many(DATA.sweep.points.length, "point")} in ${DATA.sweep.folder}` : `${DATA.runs[0].folder} ↔ ${DATA.runs[1].folder}`} · written ${DATA.made.slice(0, 16).replace("T", " ")} UTC by fengine ${DATA.fengine}`;
applyTheme();
show(location.hash.slice(1));
document.documentElement.dataset.ready = String(Math.round(performance.now()));
