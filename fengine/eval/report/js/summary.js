// What a run found, whether it is whole, what it depends on, and how to repeat it.
function verdictCard(run) {
  const told = run.verify;
  if (!told) {
    const words = " computes rows again under other schedules and compares every bit.";
    return div("note plain", "Not verified: ", el("code", {}, "fengine verify"), words);
  }
  const stale = told.outputs_sha256 && told.outputs_sha256 !== run.totals.outputs_sha256,
    good = told.identical === true && !stale,
    sample = isNumber(told.sample?.rows) ? ` ${whole(told.sample.rows)} of ${many(told.sample.of, "row")}.` : "";
  const head = div(
    `note ${good ? "good" : "bad"}`,
    el("b", {}, `${good ? "✓" : "✕"} ${told.verdict ?? "no verdict"}.`),
    sample,
    stale && " It is the verdict of another outputs.jsonl, not of this one.",
  );
  const layouts = (Array.isArray(told.layouts) ? told.layouts : []).filter((one) => one && typeof one === "object"),
    counts = ["rows", "tokens", "logprobs", "differ"].map((text) => ({ text, num: true }));
  const rows = layouts.map((one) => [
    [el("b", {}, one.layout), div(null, one.what), div("muted small", one.evidence)],
    ...[one.rows, one.tokens, one.logprobs, one.differing_logprobs].map(whole),
    one.verdict,
  ]);
  const found = rows.length > 0 && wideTable(["schedule", ...counts, "verdict"], rows);
  return card("Verified under other schedules", head, found);
}
function countsCard(run, onpick) {
  const entries = KINDS.map((name, kind) => [kind, name, run.counts[name]]).filter(([, , n]) => n > 0),
    of = run.here === run.rows ? "all that the input has" : `of ${whole(run.rows)} that the input has`,
    parts = entries.map(([kind, , n]) => el("i", { cls: `b${kind}`, style: { flex: n } }));
  const chips = entries.map(([kind, name, n]) =>
    button([silent(`k${kind}`, SIGNS[kind]), ` ${whole(n)} ${name}`], () => onpick(kind), { cls: "quiet chip" }),
  );
  const right = { cls: "muted small", style: { "margin-top": "10px" } };
  return card(
    "Rows",
    div("kpi", el("b", {}, whole(run.here)), span("muted small", of)),
    el("div", { cls: "split", "aria-hidden": "true" }, parts),
    div("chips", chips),
    run.score && el("p", right, `A row is right where ${run.score} is 1.`),
  );
}
const GROUP = /^(.+) \[(.*)\]$/s; // a metric of the rows of one value of task.group_by
function groupCards(run) {
  const found = new Map();
  for (const m of run.metrics) {
    const [, name, label] = GROUP.exec(m.name) || [];
    const row = { ...m, label, figure: plusMinus(m), title: `${short(m.value)}, ${many(m.n, "row")}` };
    if (name) found.set(name, [...(found.get(name) || []), row]);
  }
  return [...found].map(([name, rows]) => {
    const describe = `${name} of every group, with 95 % intervals`;
    return card(`${name} by ${run.group_by || "group"}`, fluid((width) => intervals(rows, { width, describe })));
  });
}
function metricCards(run) {
  const single = run.metrics.filter((m) => !GROUP.test(m.name));
  return (single.length ? single : run.metrics).map((m) => {
    const error = span("pm", m.stderr === null ? "" : `± ${short(m.stderr)}`),
      range = m.low === undefined ? "" : `95 %: ${short(m.low)} to ${short(m.high)} · `,
      value = el("b", {}, short(m.value), " ", error);
    return card(
      m.name,
      div("kpi", value, span("muted small", `${range}${many(m.n, "row")}`)),
      m.low !== undefined && fluid((width) => errorBar(m, width), 420),
    );
  });
}
function errorBar(m, width) {
  const unit = m.value >= 0 && m.value <= 1 && m.low >= -0.2 && m.high <= 1.2,
    [low, high] = unit ? [0, 1] : [m.low - (m.high - m.low || 1), m.high + (m.high - m.low || 1)],
    x = (v) => 8 + ((Math.min(high, Math.max(low, v)) - low) / (high - low)) * (width - 16),
    bar = { y: 15, height: 6, rx: 3 };
  const picture = sketch(width, 44, `${m.name} ${short(m.value)}, 95 % from ${short(m.low)} to ${short(m.high)}`),
    wide = Math.max(2, x(m.high) - x(m.low));
  picture.append(
    svg("rect", { ...bar, x: 8, width: width - 16, fill: "var(--sunk)" }),
    svg("rect", { ...bar, x: x(m.low), width: wide, fill: "var(--accent)", opacity: 0.35 }),
    svg("circle", { cx: x(m.value), cy: 18, r: 5.5, fill: "var(--accent)" }),
    label(8, 40, null, short(low)),
    label(width - 8, 40, "end", short(high)),
  );
  return picture;
}
function factsCard(run) {
  const groups = run.facts.map(([group, pairs], i) => {
    const name = span(null, group.replace(/_/g, " ")),
      count = span("muted small", pairs.length === 1 ? "" : whole(pairs.length)),
      node = folded([name, count], div("scroll", pairTable(pairs, { cls: "mono" })));
    node.open = i === 0;
    return node;
  });
  const words = "Two runs in which all of this is equal have the same outputs.jsonl, byte for byte.";
  return card(
    "What the result depends on",
    el("p", { cls: "muted small", style: { "margin-bottom": "8px" } }, words),
    div(null, groups),
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
  const heads = [{ text: "no.", num: true }, "started", "ended", "how it ended", "where"];
  return rows.length > 0 && card("Sessions", table(heads, rows));
}
function repeatCard(run) {
  const commands = run.commands.map(([what, command]) => div("cmdline", el("h3", {}, what), copyable(command))),
    sha256 = run.totals.outputs_sha256,
    props = { cls: "muted small", style: { "margin-top": "12px", "overflow-wrap": "anywhere" } };
  return card(
    "Repeat it",
    commands,
    sha256 && el("p", props, "SHA-256 of outputs.jsonl: ", el("code", {}, sha256)),
  );
}
function summaryView(run, onpick) {
  const state = el("b", {}, "This run has not come to its end. ");
  return div(
    "stack",
    !run.finished && div("note", state, "What is here are the rows that it has journaled."),
    noteList(run.notes),
    card(null, termList("brief", run.brief)),
    div("cols even", metricCards(run), countsCard(run, onpick)),
    groupCards(run),
    verdictCard(run),
    repeatCard(run),
    factsCard(run),
    sessionsCard(run),
  );
}
