// What a run found, whether it is whole, what it depends on, and how to repeat it.
function verdictCard(run) {
  const told = run.verify;
  if (!told) {
    const words = " computes rows again under other schedules and compares every bit.";
    return el("div", { cls: "note plain" }, "Not verified: ", el("code", {}, "fengine verify"), words);
  }
  const stale = told.outputs_sha256 && told.outputs_sha256 !== run.totals.outputs_sha256;
  const good = told.identical === true && !stale;
  const sample = isNumber(told.sample?.rows) ? ` ${whole(told.sample.rows)} of ${many(told.sample.of, "row")}.` : "";
  const head = el(
    "div",
    { cls: `note ${good ? "good" : "bad"}` },
    el("b", {}, `${good ? "✓" : "✕"} ${told.verdict ?? "no verdict"}.`),
    sample,
    stale && " It is the verdict of another outputs.jsonl, not of this one.",
  );
  const layouts = (Array.isArray(told.layouts) ? told.layouts : []).filter((one) => one && typeof one === "object");
  const heads = [
    "schedule",
    ...["rows", "tokens", "logprobs", "differ"].map((text) => ({ text, num: true })),
    "verdict",
  ];
  const rows = layouts.map((one) => [
    [el("b", {}, one.layout), el("div", {}, one.what), el("div", { cls: "muted small" }, one.evidence)],
    ...[one.rows, one.tokens, one.logprobs, one.differing_logprobs].map(whole),
    one.verdict,
  ]);
  return card("Verified under other schedules", head, rows.length > 0 && wideTable(heads, rows));
}
function countsCard(run, onpick) {
  const entries = KINDS.map((name, kind) => [kind, name, run.counts[name]]).filter(([, , n]) => n > 0);
  return card(
    "Rows",
    el(
      "div",
      { cls: "kpi" },
      el("b", {}, whole(run.here)),
      el(
        "span",
        { cls: "muted small" },
        run.here === run.rows ? "all that the input has" : `of ${whole(run.rows)} that the input has`,
      ),
    ),
    el(
      "div",
      { cls: "split", "aria-hidden": "true" },
      entries.map(([kind, , n]) => el("i", { cls: `b${kind}`, style: { flex: n } })),
    ),
    el(
      "div",
      { cls: "chips" },
      entries.map(([kind, name, n]) =>
        el(
          "button",
          { type: "button", cls: "chip", onclick: () => onpick(kind) },
          el("span", { cls: `k${kind}`, "aria-hidden": "true" }, SIGNS[kind]),
          ` ${whole(n)} ${name}`,
        ),
      ),
    ),
    run.score &&
      el("p", { cls: "muted small", style: { "margin-top": "10px" } }, `A row is right where ${run.score} is 1.`),
  );
}
const GROUP = /^(.+) \[(.*)\]$/s; // a metric of the rows of one value of task.group_by
function groupCards(run) {
  const found = new Map();
  for (const m of run.metrics) {
    const [, name, group] = GROUP.exec(m.name) || [];
    if (name)
      found.set(name, [
        ...(found.get(name) || []),
        {
          ...m,
          label: group,
          figure: `${short(m.value)}${m.stderr === null ? "" : ` ± ${short(m.stderr)}`}`,
          title: `${short(m.value)}, ${many(m.n, "row")}`,
        },
      ]);
  }
  return [...found].map(([name, rows]) =>
    card(
      `${name} by ${run.group_by || "group"}`,
      fluid((w) => intervals(rows, { width: w, describe: `${name} of every group, with 95 % intervals` })),
    ),
  );
}
const briefCard = (run) =>
  card(
    null,
    el(
      "dl",
      { cls: "brief" },
      run.brief.map(([word, text]) => el("div", {}, el("dt", {}, word), el("dd", {}, text))),
    ),
  );
function metricCards(run) {
  const single = run.metrics.filter((m) => !GROUP.test(m.name));
  return (single.length ? single : run.metrics).map((m) =>
    card(
      m.name,
      el(
        "div",
        { cls: "kpi" },
        el("b", {}, short(m.value), " ", el("span", { cls: "pm" }, m.stderr === null ? "" : `± ${short(m.stderr)}`)),
        el(
          "span",
          { cls: "muted small" },
          `${m.low === undefined ? "" : `95 %: ${short(m.low)} to ${short(m.high)} · `}${many(m.n, "row")}`,
        ),
      ),
      m.low !== undefined && fluid((w) => errorBar(m, w), 420),
    ),
  );
}
function errorBar(m, width) {
  const unit = m.value >= 0 && m.value <= 1 && m.low >= -0.2 && m.high <= 1.2;
  const [low, high] = unit ? [0, 1] : [m.low - (m.high - m.low || 1), m.high + (m.high - m.low || 1)];
  const x = (v) => 8 + ((Math.min(high, Math.max(low, v)) - low) / (high - low)) * (width - 16);
  return svg(
    "svg",
    {
      viewBox: `0 0 ${width} 44`,
      width,
      height: 44,
      role: "img",
      "aria-label": `${m.name} ${short(m.value)}, 95 % from ${short(m.low)} to ${short(m.high)}`,
    },
    svg("rect", { x: 8, y: 15, width: width - 16, height: 6, rx: 3, fill: "var(--sunk)" }),
    svg("rect", {
      x: x(m.low),
      y: 15,
      width: Math.max(2, x(m.high) - x(m.low)),
      height: 6,
      rx: 3,
      fill: "var(--accent)",
      opacity: 0.35,
    }),
    svg("circle", { cx: x(m.value), cy: 18, r: 5.5, fill: "var(--accent)" }),
    svg("text", { x: 8, y: 40 }, short(low)),
    svg("text", { x: width - 8, y: 40, "text-anchor": "end" }, short(high)),
  );
}
function factsCard(run) {
  const body = el(
    "div",
    {},
    run.facts.map(([group, pairs], i) =>
      el(
        "details",
        { open: i === 0 },
        el(
          "summary",
          {},
          el("span", {}, group.replace(/_/g, " ")),
          el("span", { cls: "muted small" }, pairs.length === 1 ? "" : whole(pairs.length)),
        ),
        el(
          "div",
          { cls: "scroll" },
          el(
            "table",
            {},
            el(
              "tbody",
              {},
              pairs.map(([k, v]) => el("tr", {}, el("td", { cls: "key" }, k), el("td", { cls: "mono" }, v))),
            ),
          ),
        ),
      ),
    ),
  );
  return card(
    "What the result depends on",
    el(
      "p",
      { cls: "muted small", style: { "margin-bottom": "8px" } },
      "Two runs in which all of this is equal have the same outputs.jsonl, byte for byte.",
    ),
    body,
  );
}
function sessionsCard(run) {
  const rows = run.sessions.map((s, i) => [
    String(i + 1),
    s.started || "–",
    s.ended || "–",
    s.how || "did not end",
    s.host ? `${s.host}, process ${s.pid || "?"}` : "–",
  ]);
  return (
    rows.length > 0 &&
    card("Sessions", table([{ text: "no.", num: true }, "started", "ended", "how it ended", "where"], rows))
  );
}
function summaryView(run, onpick) {
  const state = run.finished
    ? null
    : el(
        "div",
        { cls: "note" },
        el("b", {}, "This run has not come to its end. "),
        "What is here are the rows that it has journaled.",
      );
  const totals = run.totals;
  return el(
    "div",
    { cls: "stack" },
    state,
    noteList(run.notes),
    briefCard(run),
    el("div", { cls: "cols even" }, metricCards(run), countsCard(run, onpick)),
    groupCards(run),
    verdictCard(run),
    card(
      "Repeat it",
      run.commands.map(([what, command]) => el("div", { cls: "cmdline" }, el("h3", {}, what), copyable(command))),
      totals.outputs_sha256 &&
        el(
          "p",
          { cls: "muted small", style: { "margin-top": "12px", "overflow-wrap": "anywhere" } },
          "SHA-256 of outputs.jsonl: ",
          el("code", {}, totals.outputs_sha256),
        ),
    ),
    factsCard(run),
    sessionsCard(run),
  );
}
