// What the page is about: its title, where that lies, and its views: [name, title, how it is made, how it shows an id].
function ofRun({ run }) {
  let rows = null;
  const theRows = () => (rows ||= rowsView(run));
  const go = (kind) => {
    show("rows");
    theRows().pick(kind);
  };
  const goto = (id) => {
    if (!run.rows_here.items.some((r) => r.i === id)) return;
    show("rows");
    theRows().show(id);
  };
  return [
    `${run.task[0]} on ${run.model}`,
    run.folder,
    [
      ["summary", "Summary", () => summaryView(run, go)],
      ["rows", "Rows", () => theRows().node, (id) => theRows().show(id)],
      ["schedule", "Schedule", () => scheduleView(run, goto)],
    ],
  ];
}
const ofTwo = (data) => [
  "Difference of two runs",
  data.runs.map((run) => run.folder).join(" ↔ "),
  [
    ["summary", "Difference", () => diffSummary(data)],
    ["rows", "Rows that differ", () => diffRows(data)],
    ...["a", "b"].map((name, i) => [name, name.toUpperCase(), () => summaryView(data.runs[i], () => {})]),
  ],
];
function ofSweep({ sweep }) {
  const none = el("p", { cls: "muted" }, "No two points have rows of the same input.");
  return [
    "Sweep",
    `${many(sweep.points.length, "point")} in ${sweep.folder}`,
    [
      ["summary", "Metrics", () => sweepView(sweep)],
      ["deltas", "Differences", () => div("stack", deltaView(sweep) || none, gridView(sweep))],
    ],
  ];
}
const [title, where, views] = { run: ofRun, diff: ofTwo, sweep: ofSweep }[DATA.kind](DATA),
  made = new Map(),
  panel = el("div", { id: "panel", role: "tabpanel" });
const tabs = views.map(([name, text]) => {
  const props = { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": "panel", onclick: () => show(name) };
  return el("button", props, text);
});

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
document.getElementById("title").textContent = title;
document.getElementById("subtitle").textContent =
  `${where} · written ${DATA.made.slice(0, 16).replace("T", " ")} UTC by fengine ${DATA.fengine}`;
applyTheme();
show(location.hash.slice(1));
document.documentElement.dataset.ready = String(Math.round(performance.now()));
